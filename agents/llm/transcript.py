"""Every decision as a line of JSON, and the same decisions again without a network."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_tenant_tuning.agents.llm.config import OutputForm
from vllm_tenant_tuning.agents.llm.failures import Failure
from vllm_tenant_tuning.scenario import Scenario

FORMAT = 1

_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ReplayError(ValueError):
    """A transcript that does not fit the episode that is played."""


class Attempt(BaseModel):
    """One request and what came back.

    Attributes:
        form: of output, as it was asked for.
        status: HTTP status; None without a response.
        failure: what happened on the way; None where a response came.
        body: of the response, at most `max_response_bytes`, the key redacted.
        latency_s: seconds from the request to the whole response or to the failure.
    """

    model_config = _STRICT

    form: OutputForm
    status: int | None
    failure: Failure | None
    body: str
    latency_s: Annotated[float, Field(ge=0)]


class Decision(BaseModel):
    """One decision, good or not.

    Attributes:
        step: the control interval whose telemetry it saw, from 0.
        time_s: of the episode, then.
        user: the user message; the system message is in the episode's line.
        attempts: in order.
        failures: why each attempt was refused; None for the one that was accepted.
        deltas: the changes; None: none was accepted, all caps are held.
        reason: what the model gave as its reason.
        latency_s: of all attempts together.
        effective_step: the control interval at whose start it takes effect; None where the wall
            clock decides.
    """

    model_config = _STRICT

    kind: Literal["decision"] = "decision"
    step: int
    time_s: float
    user: str
    attempts: tuple[Attempt, ...]
    failures: tuple[Failure | None, ...]
    deltas: tuple[int, ...] | None
    reason: str | None
    latency_s: float
    effective_step: int | None


class EpisodeHeader(BaseModel):
    """The first line of a transcript.

    Attributes:
        scenario, scenario_digest, seed: the episode.
        policy, model, base_url: who was asked.
        real_time: whether decisions took effect by the wall clock; such an episode cannot be
            replayed bit for bit.
        system: the system message of all decisions.
        config: the agent's configuration; it names the key's variable, never the key.
    """

    model_config = _STRICT

    kind: Literal["episode"] = "episode"
    format: int = FORMAT
    scenario: str
    scenario_digest: str
    seed: int
    policy: str
    model: str
    base_url: str | None
    real_time: bool
    system: str
    config: dict[str, Any]


def transcript_path(folder: str | Path, scenario: str, seed: int) -> Path:
    """Where an episode's transcript lies in a folder of one agent's."""
    return Path(folder) / f"{scenario}-{seed}.jsonl"


def agent_folder(label: str) -> str:
    """A folder's name for an agent: its label, and a digest where that had to be changed."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", label).strip(".")
    if plain != label or len(plain) > 80:
        plain = f"{plain[:80]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    return plain


def scenario_digest(scenario: Scenario) -> str:
    """Twelve hex digits of a scenario."""
    return hashlib.sha256(scenario.model_dump_json().encode()).hexdigest()[:12]


class TranscriptWriter:
    """Writes one episode, a line for each decision as it is made.

    Args:
        path: of the file; an older one is replaced.
        header: of the episode.
    """

    def __init__(self, path: Path, header: EpisodeHeader) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="ascii")
        self._write(header)

    def add(self, decision: Decision) -> None:
        """Write a decision."""
        self._write(decision)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: BaseModel) -> None:
        # Not pydantic's writer: it refuses the lone surrogates that an endpoint may send.
        json.dump(line.model_dump(), self._file, ensure_ascii=True, allow_nan=False)
        self._file.write("\n")
        self._file.flush()


class Replay:
    """The recorded attempts of one episode, in order.

    Args:
        path: of the transcript.
        scenario, seed: the episode that is played.
        system: the system message that would be sent.

    Raises:
        ReplayError: no such file, a line that cannot be read, or another episode.
    """

    def __init__(self, path: Path, scenario: Scenario, seed: int, system: str) -> None:
        self._path = path
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ReplayError(f"replay {path}: cannot be read: {error}") from error
        self._decisions: dict[int, Decision] = {}
        header: EpisodeHeader | None = None
        for number, line in enumerate(lines, start=1):
            try:
                content = json.loads(line)
                if number == 1:
                    header = EpisodeHeader.model_validate(content)
                else:
                    decision = Decision.model_validate(content)
                    self._decisions[decision.step] = decision
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                field = ".".join(map(str, first["loc"])) or "line"
                raise ReplayError(
                    f"replay {path}, line {number}: {field}: {first['msg']}"
                ) from None
            except ValueError as error:
                raise ReplayError(f"replay {path}, line {number}: not JSON: {error}") from None
        if header is None:
            raise ReplayError(f"replay {path}: the file is empty")
        for field, recorded, played in (
            ("format", header.format, FORMAT),
            ("scenario", header.scenario_digest, scenario_digest(scenario)),
            ("seed", header.seed, seed),
            ("real_time", header.real_time, False),
            ("system message", header.system, system),
        ):
            if recorded != played:
                raise ReplayError(
                    f"replay {path}: {field}: recorded was {recorded!r}, played is {played!r}"
                )

    def attempts(self, step: int, user: str) -> Iterator[Attempt]:
        """What was answered at a control interval, attempt by attempt.

        Raises:
            ReplayError: nothing was recorded there, for another prompt, or fewer attempts.
        """
        decision = self._decisions.get(step)
        if decision is None:
            raise ReplayError(f"replay {self._path}: no decision was recorded for step {step}")
        if decision.user != user:
            raise ReplayError(
                f"replay {self._path}: the decision of step {step} was recorded for another "
                "prompt: scenario, template or code have changed"
            )
        yield from decision.attempts
        raise ReplayError(
            f"replay {self._path}: step {step}: {len(decision.attempts)} attempts were recorded, "
            "and one more is asked for: the configuration has changed"
        )
