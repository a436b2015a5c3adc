"""The state as compact text, in which names and notes can be nothing but data."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.llm.config import AgentSource
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

_UNSAFE = re.compile(r"[^A-Za-z0-9 ._,:/+()%-]")


def shown(value: Any) -> str:
    """A value as every prompt shows it, whatever the template does.

    Text becomes a JSON string in which all but letters, digits and harmless punctuation is
    written as an escape, so that it can neither end the line, nor close the data block, nor form
    a chat template's special tokens. Numbers have four digits; what is not available is `-`.
    """
    if value is None or value != value:
        return "-"
    if isinstance(value, str):
        return '"' + _UNSAFE.sub(_escape, value) + '"'
    if isinstance(value, bool | int):
        return str(value)
    return f"{float(value):.4g}"


def tenant_ids(scenario: Scenario) -> tuple[str, ...]:
    """What answers call the tenants: `t1`, `t2`, ..., chosen by us and not by the tenants."""
    return tuple(f"t{i + 1}" for i in range(scenario.n_tenants))


def changes_schema(scenario: Scenario, reason: bool) -> dict[str, Any]:
    """JSON schema of an answer: a bounded change for each tenant, and nothing else.

    Args:
        scenario: gives the tenants and `max_delta`.
        reason: whether a sentence of reasoning comes first.
    """
    max_delta = scenario.control.max_delta
    change: dict[str, Any] = {"type": "integer", "minimum": -max_delta, "maximum": max_delta}
    if max_delta <= 8:  # an enumeration is what most endpoints can enforce
        change = {"type": "integer", "enum": list(range(-max_delta, max_delta + 1))}
    properties: dict[str, Any] = {"reason": {"type": "string"}} if reason else {}
    properties |= dict.fromkeys(tenant_ids(scenario), change)
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class Prompt:
    """Renders the messages of one episode.

    Args:
        agent: the templates and what they may show.
        scenario: the task.

    Attributes:
        system: the first message, the same in all decisions.

    Raises:
        ValueError: a template that is broken, or notes about unknown tenants.
    """

    def __init__(self, agent: AgentSource, scenario: Scenario) -> None:
        config = agent.config
        unknown = sorted(set(config.tenant_notes) - set(scenario.tenant_names))
        if unknown:
            raise ValueError(
                f"tenant_notes: got '{unknown[0]}'; scenario '{scenario.name}' has "
                f"{', '.join(scenario.tenant_names)}"
            )
        environment = jinja2.Environment(
            autoescape=False,  # `finalize` escapes, and for prompts rather than HTML
            undefined=jinja2.StrictUndefined,
            finalize=shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        control = scenario.control
        self._ids = tenant_ids(scenario)
        self._history: deque[dict[str, Any]] = deque(maxlen=config.history_intervals + 1)
        self._constants = {
            "control_interval_s": control.control_interval_s,
            "episode_s": control.episode_s,
            "max_delta": control.max_delta,
            "cap_min": control.cap_min,
            "cap_max": control.cap_max,
            "total_cap": control.total_cap,
            "max_num_seqs": scenario.max_num_seqs,
            "reward": scenario.reward.model_dump(),
            "reason": config.reason,
        }
        self._tenants = [
            {
                "id": id_,
                "name": tenant.name,
                "note": config.tenant_notes.get(tenant.name),
                **tenant.model_dump(
                    include={
                        "slo_latency_p99_s",
                        "slo_ttft_p99_s",
                        "slo_itl_p99_s",
                        "patience_s",
                        "queue_limit",
                        "priority",
                        "slo_weight",
                        "drop_weight",
                    }
                ),
            }
            for id_, tenant in zip(self._ids, scenario.tenants, strict=True)
        ]
        try:
            self._user = environment.from_string(agent.user)
            self._retry = environment.from_string(agent.retry)
            system = environment.from_string(agent.system)
            self.system = system.render(**self._constants, tenants=self._tenants)
            self.retry("x")
        except jinja2.TemplateError as error:
            raise ValueError(f"template: {type(error).__name__}: {error}") from error

    def observe(self, telemetry: Telemetry) -> None:
        """Add a control interval to the history."""
        content = telemetry.to_dict()
        by_field = content["tenants"]
        self._history.append(
            {
                "time_s": content["cluster"]["time_s"],
                "cluster": content["cluster"],
                "tenants": [
                    {"id": id_, **{field: values[i] for field, values in by_field.items()}}
                    for i, id_ in enumerate(self._ids)
                ],
            }
        )

    def user(self, caps: npt.NDArray[np.int64]) -> str:
        """The message that asks for a decision.

        Args:
            caps: (n_tenants,) int64, in force from now on.

        Raises:
            ValueError: a template that is broken.
        """
        tenants = [
            tenant | {"cap": cap} for tenant, cap in zip(self._tenants, caps.tolist(), strict=True)
        ]
        last = self._history[-1]
        try:
            return self._user.render(
                **self._constants,
                time_s=last["time_s"],
                cluster=last["cluster"],
                tenants=tenants,
                intervals=list(self._history),
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"user_template: {type(error).__name__}: {error}") from error

    def retry(self, problem: str) -> str:
        """The message that asks again.

        Args:
            problem: what was wrong, in our own words: an answer is never quoted.
        """
        return self._retry.render(problem=problem)

    def messages(self, user: str, problem: str | None) -> Sequence[dict[str, str]]:
        """The messages of one attempt.

        Args:
            user: what `user` gave.
            problem: of the attempt before, if this is a retry.
        """
        text = user if problem is None else f"{user}\n{self.retry(problem)}"
        return [{"role": "system", "content": self.system}, {"role": "user", "content": text}]


def _escape(match: re.Match[str]) -> str:
    """UTF-16 escapes, as JSON has them."""
    units = match.group().encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
