"""A PI controller that holds each tenant's tail at its SLO.

Source: the velocity form of a PI controller with clamping against windup (Astrom and Hagglund,
Advanced PID Control, 2006, sections 3.5 and 13.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers
from vllm_tenant_tuning.agents.signals import reading, slo_ratio
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class SloPiConfig:
    """Parameters of `SloPiPolicy` (our choice)."""

    proportional: float = 1.0
    """Requests of cap for a change of the error by 1."""

    integral: float = 0.25
    """Requests of cap for an error of 1, each interval."""

    length_window: int = 20
    """Intervals over which a tenant's usual output length is averaged."""


class SloPiPolicy(CapPolicy):
    """Raises the cap while the window's p99 is below its SLO, lowers it while it is above.

    The error is `1 - p99 / slo`, of the worst of the tenant's SLOs, cut to [-1, 1]; each change
    is `proportional * (error - last) + integral * error`. A p99 over longer answers than the
    tenant's usual ones is brought to their length, since an LLM's latency grows with its output.
    Without completions the last error stays and only the integral acts. Assumes that fewer in
    flight make the tail shorter; where the tail is the wait at the gate, the sign is wrong.
    """

    def __init__(self, config: SloPiConfig | None = None) -> None:
        self.config = config or SloPiConfig()
        self.name = "slo_pi"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Forget errors and lengths."""
        self._output = np.array(scenario.caps_initial, np.float64)
        self._error = np.zeros(scenario.n_tenants)
        self._usual_tokens = np.zeros(scenario.n_tenants)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """One step of the controller."""
        config, tenants = self.config, telemetry.tenants
        completed = reading(tenants["completed"])
        tokens = reading(tenants["output_tokens"]) / np.maximum(completed, 1.0)
        measured = (completed > 0) & (tokens > 0)
        first = measured & (self._usual_tokens == 0)
        gain = np.where(first, 1.0, 1.0 / config.length_window)
        self._usual_tokens += np.where(measured, gain * (tokens - self._usual_tokens), 0.0)
        length = np.where(measured, self._usual_tokens / np.maximum(tokens, 1.0), 1.0)

        error = np.clip(1.0 - slo_ratio(tenants, self._scenario) * length, -1.0, 1.0)
        error = np.where(np.isnan(error), self._error, error)
        change = config.proportional * (error - self._error) + config.integral * error
        self._error = error
        # The cap in force is what the last output became: what a bound cut off is not kept.
        self._output = np.clip(self._output, caps, np.nextafter(caps + 1.0, 0.0)) + change
        return self._output
