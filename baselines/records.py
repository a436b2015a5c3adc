"""Raw records: one episode a line, written as it ends, readable after a crash."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

M = TypeVar("M", bound=BaseModel)

_logger = logging.getLogger(__name__)

# Infinity and NaN have no form in JSON: they are refused here, before a line is spoilt.
_CONFIG = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class RecordError(ValueError):
    """A file of records that cannot be read."""


class RewardTerms(BaseModel):
    """Sums of the reward's terms over an episode, signs included."""

    model_config = _CONFIG

    throughput: float
    slo: float
    drop: float
    cost: float


class TenantRecord(BaseModel):
    """What an episode was for one tenant: requests, seconds (None without a completion)."""

    model_config = _CONFIG

    arrived: float
    completed: float
    good: float
    dropped: float
    failed: float
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    mean_cap: float
    mean_in_flight: float
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None


class DecisionRecord(BaseModel):
    """What the decisions of an episode came to, for a policy that asks a model elsewhere.

    Attributes:
        model: who was asked.
        decisions: asked for; answered: with a valid answer; held: without one, all caps held;
            applied: answered, and arrived before the episode's end.
        attempts: requests sent; retries: those that were not a decision's first.
        failures: refused attempts by their kind (`vllm_tenant_tuning.agents.llm.Failure`).
        prompt_tokens, completion_tokens: as the endpoint reports them; unreported: attempts
            without a report that can be believed.
        cost_usd: of these tokens; None where no price was given.
        latency_p50_s, latency_p95_s, latency_p99_s, latency_max_s: of a decision, its attempts
            together, by the wall clock; None without a decision.
    """

    model_config = _CONFIG

    model: str
    decisions: int
    answered: int
    held: int
    applied: int
    attempts: int
    retries: int
    failures: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    unreported: int
    cost_usd: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    latency_max_s: float | None


class LiveRecord(BaseModel):
    """How an episode on a live server went.

    Attributes:
        folder: of the raw records, from the folder that this record lies in.
        server: its URL, model, version and KV blocks.
        fault: a sentence on why the episode was truncated; empty if it was not.
        invalid: why its load is not what was scheduled; empty if it is.
        scheduled, delivered: requests due, and those that reached the gate.
        send_lateness_p99_s: of the sends of the episode.
        event_loop_lag_max_s: of the load's event loops.
        overrun_max_s: by how much the policy missed the end of an interval.
        prefix_hit_rate: share of prompt tokens that the server had in its prefix cache.
        server_restarts: noticed during the episode.
    """

    model_config = _CONFIG

    folder: str
    server: dict[str, str | int | None]
    fault: str
    invalid: tuple[str, ...]
    scheduled: int
    delivered: int
    send_lateness_p99_s: float
    event_loop_lag_max_s: float
    overrun_max_s: float
    prefix_hit_rate: float
    server_restarts: int


class EpisodeRecord(BaseModel):
    """One episode of one policy.

    Attributes:
        scenario: its name.
        scenario_digest: hex digits of all that the result depends on but the seed.
        policy: its label.
        seed: of the environment and of the policy.
        backend: what played it.
        truncation: why it ended: `time_limit` or a fault.
        steps: control intervals.
        episode_s: seconds.
        return_: sum of the rewards (`return` in files).
        reward_terms: what it is made of.
        throughput_rps: completed requests per second.
        goodput_rps: requests completed within their tenant's SLO, per second.
        drops: requests; weighted_drops: each times its tenant's drop weight.
        failed: requests.
        latency_p50_s, latency_p95_s, latency_p99_s: over all completions, gate to last token,
            as `numpy.percentile` takes them; None without a completion.
        cost: held capacity, the time average of requests in flight over `max_num_seqs`.
        cap_changes: how often a cap changed.
        jain_fairness: Jain's index of the tenants' completed shares, 1 where they are even.
        wall_s: how long playing took.
        ttft_p50_s, ttft_p99_s: arrival at the gate to the first token, over all first tokens.
        tpot_p50_s, tpot_p99_s: mean inter-token latency of a request, over all completions.
        preemptions: of running requests. generation_tokens_per_s: emitted.
        energy_j: that the GPU drew, where the profile knows its power.
        usd_per_1000_good, usd_per_million_tokens: the GPU's price over the episode, for requests
            that met their SLOs and for tokens emitted, where the scenario assumes a price.
            All of these are None where the engine has no tokens.
        decisions: what an LLM's decisions came to; None for other policies.
        live: how it went on a live server; None in simulation.
        tenants: the same per tenant.
    """

    model_config = _CONFIG

    scenario: str
    scenario_digest: str
    policy: str
    seed: int
    backend: str
    truncation: str
    steps: int
    episode_s: float
    return_: float = Field(alias="return")
    reward_terms: RewardTerms
    throughput_rps: float
    goodput_rps: float
    drops: float
    weighted_drops: float
    failed: float
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    cost: float
    cap_changes: int
    jain_fairness: float
    wall_s: float
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None
    preemptions: float | None = None
    generation_tokens_per_s: float | None = None
    energy_j: float | None = None
    usd_per_1000_good: float | None = None
    usd_per_million_tokens: float | None = None
    decisions: DecisionRecord | None = None
    live: LiveRecord | None = None
    tenants: dict[str, TenantRecord]

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What makes two records the same episode."""
        return (self.scenario, self.scenario_digest, self.policy, self.seed)

    @property
    def is_whole(self) -> bool:
        """Whether the episode ran to its end; one that a fault cut short is played again."""
        return self.truncation == "time_limit"

    @property
    def left_out(self) -> str:
        """Why the episode is no result; empty if it is one."""
        if not self.is_whole:
            detail = f": {self.live.fault}" if self.live is not None and self.live.fault else ""
            return f"truncated by {self.truncation}{detail}"
        if self.live is not None and self.live.invalid:
            return f"the load was not delivered: {'; '.join(self.live.invalid)}"
        return ""


def append_record(path: Path, record: BaseModel) -> None:
    """Add a record to a file and see it onto the disk.

    A line that a crash tore off is ended first, so that it spoils no other.
    """
    line = record.model_dump_json(by_alias=True) + "\n"
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> list[EpisodeRecord]:
    """All episodes of a file, as `read_lines` reads them."""
    return read_lines(path, EpisodeRecord)


def read_lines(path: Path, model: type[M]) -> list[M]:
    """All records of a file, oldest first; none if there is no file. `.gz` is decompressed.

    Lines that are not whole JSON, as a crash leaves them, are passed over with a warning in the
    log: their episodes count as not played.

    Raises:
        RecordError: a whole line that is no record, with file, line and reason.
    """
    records = []
    if not path.exists():
        return []
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):  # torn: JSON or UTF-8 that stops in the middle
            _logger.warning(
                "%s, line %d: torn, ignored; its episode counts as not played", path, number
            )
            continue
        try:
            records.append(model.model_validate(fields))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "line"
            raise RecordError(f"{path}, line {number}: {field}: {first['msg']}") from error
    return records


def completed_keys(path: Path) -> set[tuple[str, str, str, int]]:
    """The keys of the whole episodes that a file holds."""
    return {record.key for record in read_records(path) if record.is_whole}
