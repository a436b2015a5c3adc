"""An LLM as a policy: asks, checks, and applies a decision when it arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.llm.accounting import Accounting
from vllm_tenant_tuning.agents.llm.answer import AnswerError, failure_of_status, read_answer
from vllm_tenant_tuning.agents.llm.config import AgentSource, OutputForm, load_agent
from vllm_tenant_tuning.agents.llm.endpoint import Endpoint
from vllm_tenant_tuning.agents.llm.failures import FORM_IGNORED, RETRIED, Failure
from vllm_tenant_tuning.agents.llm.prompt import Prompt, changes_schema, tenant_ids
from vllm_tenant_tuning.agents.llm.transcript import (
    Attempt,
    Decision,
    EpisodeHeader,
    Replay,
    TranscriptWriter,
    scenario_digest,
    transcript_path,
)
from vllm_tenant_tuning.agents.policy import as_action
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.spaces import ActionDecoder

Ask = Callable[[Sequence[dict[str, str]], OutputForm, float], Attempt]
"""One attempt: messages, form of output, seconds left."""

_ACTIVE = np.ones(1, np.bool_)


@dataclass
class _Pending:
    """A decision on its way: what it changes (None: it failed), and when it takes effect."""

    deltas: tuple[int, ...] | None
    due_step: int


class LLMPolicy:
    """Asks a large language model behind an OpenAI-compatible endpoint.

    In every control interval in which no decision is on its way, the state goes out as text and a
    bounded change for each tenant is expected. An answer that is missing, late or not acceptable
    is asked for once more where that can help and time is left; after that all caps are held.
    Whatever the endpoint does, the episode goes on.

    A decision takes effect at the first start of a control interval at which it has arrived, never
    earlier. In simulation, time stands still during the call, so the decision's latency (measured,
    or `decision_latency_s`) is added: with 0.4 s and intervals of 3 s it takes effect one interval
    later. In real time (`run_in_real_time`) the call goes on in the background and the wall clock
    decides. Until then caps are held, and no second decision is begun.

    Args:
        agent: configuration and templates, or the policy text that `load_agent` reads.

    Attributes:
        name: how tables call it.

    Raises:
        ValueError: a configuration that is refused.
    """

    def __init__(self, agent: AgentSource | str) -> None:
        self._agent = load_agent(agent) if isinstance(agent, str) else agent
        self._config = self._agent.config
        self.name = self._config.label
        self._replay_folder = None if self._config.replay is None else Path(self._config.replay)
        self._record_folder: Path | None = None
        self._real_time = False
        self._endpoint: Endpoint | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._future: Future[Decision] | None = None
        self._writer: TranscriptWriter | None = None
        self._accounting = Accounting(self._config)

    def record_to(self, folder: str | Path) -> None:
        """Keep the transcripts of the episodes to come in a folder of this agent's own."""
        self._record_folder = Path(folder)

    def replay_from(self, folder: str | Path) -> None:
        """Take the answers from the transcripts in a folder, without any network."""
        self._replay_folder = Path(folder)

    def run_in_real_time(self) -> None:
        """Let decisions take effect by the wall clock, as a live server needs it."""
        self._real_time = True

    def initial_caps(self, scenario: Scenario) -> None:
        """The scenario's.

        Raises:
            ValueError: a configuration that does not fit the scenario, or a missing key.
        """
        Prompt(self._agent, scenario)
        interval_s = scenario.control.control_interval_s
        if self._config.timeout_s is not None and self._config.timeout_s > interval_s:
            raise ValueError(
                f"timeout_s: got {self._config.timeout_s:g}; at most the control interval of "
                f"scenario '{scenario.name}' is accepted, {interval_s:g} s"
            )
        if self._replay_folder is None:
            self._config.api_key()
        elif self._real_time:
            raise ValueError("replay: a replay has no clock; it plays in simulation only")

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Begin an episode: history, transcript and accounts are new.

        Raises:
            ValueError: as `initial_caps`, or a transcript that does not fit.
        """
        self._end_episode()
        self.initial_caps(scenario)
        self._scenario, self._seed = scenario, seed
        self._prompt = Prompt(self._agent, scenario)
        self._ids = tenant_ids(scenario)
        self._schema = changes_schema(scenario, self._config.reason)
        self._forms = list(self._config.forms)
        self._decoder = ActionDecoder(scenario)
        self._timeout_s = self._config.timeout_s or scenario.control.control_interval_s
        self._hold = np.zeros(scenario.n_tenants, np.int64)
        self._step = 0
        self._pending: _Pending | None = None
        self._accounting = Accounting(self._config)
        self._replay: Replay | None = None
        if self._replay_folder is not None:
            path = transcript_path(self._replay_folder, scenario.name, seed)
            self._replay = Replay(path, scenario, seed, self._prompt.system)
        elif self._endpoint is None:
            self._endpoint = Endpoint(self._config)
        if self._record_folder is not None:
            path = transcript_path(self._record_folder, scenario.name, seed)
            self._writer = TranscriptWriter(path, self._header())

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        """The decision that has arrived, or hold; begins the next one where none is on its way."""
        step, self._step = self._step, self._step + 1
        self._prompt.observe(info["telemetry"])
        time_s = float(info["telemetry"].cluster["time_s"])
        deltas = self._arrived(step)
        if self._future is None and self._pending is None:
            user = self._prompt.user(self._after(info["caps"], deltas))
            if self._real_time:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, "llm-decision")
                self._future = self._executor.submit(self._decide, step, time_s, user)
            else:
                decision = self._timed(self._decide(step, time_s, user))
                self._book(decision)
                assert decision.effective_step is not None
                self._pending = _Pending(decision.deltas, decision.effective_step)
                deltas = deltas + self._arrived(step)  # at once, if it costs no time
        return as_action(deltas, self._scenario)

    def decision_summary(self) -> dict[str, Any]:
        """What the episode's decisions came to, as a `DecisionRecord` has it.

        Waits for a decision that is on its way by the wall clock; it is counted, not applied.
        """
        self._collect()
        return self._accounting.summary()

    def close(self) -> None:
        """End the transcript, the connections and the threads."""
        self._end_episode()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _decide(self, step: int, time_s: float, user: str) -> Decision:
        """Ask, check and ask once more, within the time there is."""
        ask = self._asker(step, user)
        attempts: list[Attempt] = []
        failures: list[Failure | None] = []
        deltas, reason = None, None
        problem: str | None = None
        spent_s = 0.0
        retries_left = 1
        while spent_s < self._timeout_s:
            form = self._forms[0]
            attempt = ask(self._prompt.messages(user, problem), form, self._timeout_s - spent_s)
            attempts.append(attempt)
            spent_s += attempt.latency_s
            try:
                deltas, reason = self._read(attempt)
                failures.append(None)
                break
            except AnswerError as error:
                failure = error.failure
                failures.append(failure)
                answered = attempt.status is not None and failure_of_status(attempt.status) is None
                problem = str(error) if answered else None
            other_form = failure in FORM_IGNORED and len(self._forms) > 1
            if other_form:
                del self._forms[0]
            if other_form and failure is Failure.BAD_REQUEST:
                continue  # finding out what the endpoint knows is not the retry
            if failure not in RETRIED or retries_left == 0:
                break
            retries_left -= 1
        return Decision(
            step=step,
            time_s=time_s,
            user=user,
            attempts=tuple(attempts),
            failures=tuple(failures),
            deltas=deltas,
            reason=reason,
            latency_s=spent_s,
            effective_step=None,
        )

    def _asker(self, step: int, user: str) -> Ask:
        """The network, or what was recorded of it."""
        if self._replay is not None:
            recorded = self._replay.attempts(step, user)
            return lambda messages, form, left_s: next(recorded)
        endpoint = self._endpoint
        assert endpoint is not None
        return lambda messages, form, left_s: endpoint.ask(
            messages, form, self._schema, left_s, self._seed
        )

    def _read(self, attempt: Attempt) -> tuple[tuple[int, ...], str | None]:
        if attempt.failure is not None:
            raise AnswerError(attempt.failure, "no response")
        assert attempt.status is not None
        failure = failure_of_status(attempt.status)
        if failure is not None:
            raise AnswerError(failure, f"HTTP status {attempt.status}")
        answer = read_answer(attempt.body, self._ids, self._scenario.control.max_delta)
        return answer.deltas, answer.reason

    def _timed(self, decision: Decision) -> Decision:
        """The decision, with the simulated step at which it takes effect."""
        charged = self._config.decision_latency_s
        latency_s = decision.latency_s if charged == "measured" else float(charged)
        intervals = math.ceil(latency_s / self._scenario.control.control_interval_s - 1e-9)
        return decision.model_copy(update={"effective_step": decision.step + intervals})

    def _arrived(self, step: int) -> npt.NDArray[np.int64]:
        """The changes that take effect now."""
        if self._future is not None and self._future.done():
            decision = self._collect()
            if decision is not None:
                self._pending = _Pending(decision.deltas, step)
        if self._pending is None or self._pending.due_step > step:
            return self._hold
        deltas, self._pending = self._pending.deltas, None
        if deltas is None:
            return self._hold
        self._accounting.applied += 1
        return np.array(deltas, np.int64)

    def _collect(self) -> Decision | None:
        """The outcome of the decision that is on its way by the wall clock, if there is one."""
        if self._future is None:
            return None
        decision = self._future.result()
        self._future = None
        self._book(decision)
        return decision

    def _book(self, decision: Decision) -> None:
        self._accounting.add(decision)
        if self._writer is not None:
            self._writer.add(decision)

    def _after(
        self, caps: npt.NDArray[np.int64], deltas: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The caps once the changes are made, within their bounds."""
        after, clipped = caps[None].copy(), np.zeros((1, len(caps)), np.int64)
        self._decoder.apply(as_action(deltas, self._scenario)[None], after, clipped, _ACTIVE)
        row: npt.NDArray[np.int64] = after[0]
        return row

    def _header(self) -> EpisodeHeader:
        return EpisodeHeader(
            scenario=self._scenario.name,
            scenario_digest=scenario_digest(self._scenario),
            seed=self._seed,
            policy=self.name,
            model=self._config.model,
            base_url=self._config.base_url,
            real_time=self._real_time,
            system=self._prompt.system,
            config=self._config.model_dump(mode="json"),
        )

    def _end_episode(self) -> None:
        self._collect()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
