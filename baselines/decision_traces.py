"""Decisions over time: one episode a policy, its caps, queues and latencies, and why caps moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from vllm_tenant_tuning.agents import ExplainedPolicy, Policy, make_policy
from vllm_tenant_tuning.baselines.episode import Trajectory, make_env, play
from vllm_tenant_tuning.baselines.evaluate import Contender, trajectories
from vllm_tenant_tuning.baselines.records import append_record, read_lines
from vllm_tenant_tuning.scenario import Scenario

TRACES_FILE = "traces.jsonl"

UNTOLD = "not told"
"""The reason of a move that its policy does not explain."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Move(_Record):
    """A change of one cap.

    Attributes:
        time_s: of the decision, the beginning of the interval in which the cap is first in force.
        tenant: its name.
        change: of the cap, in requests; not 0.
        reason: the policy's, or `UNTOLD`.
    """

    time_s: float
    tenant: str
    change: int
    reason: str


class DecisionTrace(_Record):
    """One episode, control interval by control interval, and the moves of the caps.

    Attributes:
        scenario, scenario_digest, policy, seed: as in `EpisodeRecord`.
        explained: whether the policy tells why it moves.
        time_s: (K,) ends of the intervals.
        caps, queued: (K, n_tenants) requests, in the order of the scenario's tenants.
        latency_p99_s: (K, n_tenants) of the sliding window; None before the first completion.
        moves: in the order of time.
    """

    scenario: str
    scenario_digest: str
    policy: str
    seed: int
    explained: bool
    time_s: tuple[float, ...]
    caps: tuple[tuple[int, ...], ...]
    queued: tuple[tuple[float, ...], ...]
    latency_p99_s: tuple[tuple[float | None, ...], ...]
    moves: tuple[Move, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes two traces of a scenario the same episode."""
        return (self.policy, self.scenario_digest, self.seed)


class _Listener:
    """Plays a policy and keeps what it tells after each decision."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.told: list[tuple[str, ...]] = []

    def initial_caps(self, scenario: Scenario) -> Sequence[int] | None:
        self.begun_with = self._policy.initial_caps(scenario)
        return self.begun_with

    def reset(self, scenario: Scenario, seed: int) -> None:
        self.told.clear()
        self._policy.reset(scenario, seed)

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        action = self._policy.act(observation, info)
        if isinstance(self._policy, ExplainedPolicy):
            self.told.append(self._policy.reasons)
        return action


def record_traces(
    contenders: Sequence[tuple[Contender, str]],
    scenario: Scenario,
    seed: int,
    out_dir: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Play one seed under each contender and append its trace to `TRACES_FILE`.

    Those that the file holds already are not played again.

    Args:
        contenders: who plays, each with the digest of its episodes (see `evaluate.digest`).
        scenario: the task.
        seed: of the episodes.
        out_dir: the folder of the file, in which `evaluate` kept the transcripts of LLMs.
        on_progress: called with (traces recorded, traces in all).
    """
    path = out_dir / TRACES_FILE
    known = {trace.key for trace in read_lines(path, DecisionTrace)}
    missing = [
        (contender, digest)
        for contender, digest in contenders
        if (contender.label, digest, seed) not in known
    ]
    if not missing:
        return
    with closing(make_env(scenario)) as env:
        for i, (contender, digest) in enumerate(missing):
            told: list[tuple[str, ...]] = []
            if contender.is_llm:  # replayed from its transcripts
                shown = trajectories([contender], scenario, seed, out_dir=out_dir)[contender.label]
                begun_with = make_policy(contender.text).initial_caps(scenario)
            else:
                listener = _Listener(make_policy(contender.text))
                _, shown = play(env, listener, seed)
                told, begun_with = listener.told, listener.begun_with
            began = scenario.caps_initial if begun_with is None else begun_with
            trace = _trace(shown, scenario, began, told)
            update = {"scenario_digest": digest, "policy": contender.label, "seed": seed}
            append_record(path, trace.model_copy(update=update))
            if on_progress is not None:
                on_progress(len(contenders) - len(missing) + i + 1, len(contenders))


def _trace(
    shown: Trajectory,
    scenario: Scenario,
    began: Sequence[int],
    told: Sequence[Sequence[str]],
) -> DecisionTrace:
    caps = shown["caps"].astype(int)
    changes = np.diff(caps, axis=0, prepend=[list(began)])
    interval_s = scenario.control.control_interval_s
    moves = [
        Move(
            time_s=round(float(shown["time_s"][k]) - interval_s, 9),
            tenant=scenario.tenant_names[i],
            change=int(changes[k, i]),
            reason=(told[k][i] if told else "") or UNTOLD,
        )
        for k, i in np.argwhere(changes != 0).tolist()
    ]
    p99_s = [
        tuple(None if math.isnan(value) else value for value in row)
        for row in shown["latency_p99_s"].tolist()
    ]
    return DecisionTrace(
        scenario=scenario.name,
        scenario_digest="",
        policy="",
        seed=0,
        explained=bool(told),
        time_s=tuple(shown["time_s"].tolist()),
        caps=tuple(map(tuple, caps.tolist())),
        queued=tuple(map(tuple, shown["queued"].tolist())),
        latency_p99_s=tuple(p99_s),
        moves=tuple(moves),
    )
