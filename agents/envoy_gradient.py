"""Envoy's gradient controller, one for each tenant.

Source: github.com/envoyproxy/envoy, `gradient_controller.cc` of the adaptive concurrency filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers
from vllm_tenant_tuning.agents.signals import TokenTime, TokenTimeWindow
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class EnvoyGradientConfig:
    """Parameters of `EnvoyGradientPolicy`, Envoy's defaults where it has one."""

    min_concurrency: int = 3
    """Cap while the fastest round trip is measured, and the smallest limit."""

    request_count: int = 50
    """Completions that this measurement takes."""

    interval_s: float = 300.0
    """From one measurement to the next (Envoy demands one; its documentation's 60 s would be
    measuring all the time at a request a second)."""

    jitter: float = 0.15
    """Largest share of `interval_s` that is added at random."""

    buffer: float = 0.25
    """Share of the fastest round trip that is tolerated on top of it."""

    consecutive_min: int = 5
    """Updates in a row at the smallest limit that call for a new measurement."""

    token_time: TokenTime = "server"
    """What stands for the round trip."""


class EnvoyGradientPolicy(CapPolicy):
    """`limit * gradient + sqrt(limit * gradient)`, the gradient being fastest over present.

    The gradient is `(1 + buffer) * fastest / now`, from 0.5 to 2. The fastest round trip is
    measured: the cap is brought down to `min_concurrency` until enough requests have completed,
    then put back where it was. Round trips are times per output token. Envoy samples the median
    of a window; here it is the mean of the interval, which telemetry gives. Assumes that a server
    at the smallest concurrency is idle, which other tenants' load contradicts, and that a tenant
    can spare its throughput while it is measured.
    """

    def __init__(self, config: EnvoyGradientConfig | None = None) -> None:
        self.config = config or EnvoyGradientConfig()
        suffix = "" if self.config.token_time == "server" else f":{self.config.token_time}"
        self.name = "envoy_gradient" + suffix

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Begin with a measurement."""
        n, interval_s = scenario.n_tenants, scenario.control.control_interval_s
        config = self.config
        self._rng = rng
        self._sample = TokenTimeWindow(n, interval_s, 1, config.token_time)
        self._fast = TokenTimeWindow(n, interval_s, config.request_count, "server")
        self._floor = max(config.min_concurrency, scenario.control.cap_min)
        self._fastest_s = np.full(n, np.nan)
        self._fastest_itl_s = np.full(n, np.inf)
        self._measuring = np.ones(n, np.bool_)
        self._deferred = np.array(scenario.caps_initial, np.float64)
        self._next_s = np.full(n, np.inf)
        self._at_floor = np.zeros(n, np.int64)
        self._restore = np.zeros(n, np.bool_)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Measure, or follow the gradient."""
        now_s = float(telemetry.cluster["time_s"])
        samples = self._sample.add(telemetry).token_time_s
        # A measurement begins when the cap is down: requests of before are no sample of it.
        self._fast.clear(~self._measuring | (caps > self._floor))
        measured = self._fast.add(telemetry).token_time_s
        wanted = caps.astype(np.float64)
        for i in range(caps.size):
            if self._measuring[i]:
                if self.config.token_time == "itl" and caps[i] <= self._floor:
                    self._fastest_itl_s[i] = np.fmin(self._fastest_itl_s[i], samples[i])
                if np.isnan(measured[i]):
                    wanted[i] = self._floor
                    continue
                by_itl = self.config.token_time == "itl"
                self._fastest_s[i] = self._fastest_itl_s[i] if by_itl else measured[i]
                self._measuring[i] = False
                self._next_s[i] = now_s + self.config.interval_s * (
                    1 + self.config.jitter * self._rng.random()
                )
                self._restore[i] = True
            if self._restore[i]:  # steps of max_delta on the way back up
                wanted[i] = self._deferred[i]
                self._restore[i] = caps[i] < self._deferred[i]
                continue
            if not np.isnan(samples[i]):
                wanted[i] = self._limit(float(caps[i]), float(samples[i]), int(i))
                stuck = caps[i] <= self._floor and wanted[i] <= self._floor
                self._at_floor[i] = self._at_floor[i] + 1 if stuck else 0
            if now_s >= self._next_s[i] or self._at_floor[i] >= self.config.consecutive_min:
                self._measuring[i] = True
                self._deferred[i] = caps[i]
                self._fastest_itl_s[i] = np.inf
                self._at_floor[i] = 0
                wanted[i] = self._floor
        return wanted

    def _limit(self, limit: float, sample_s: float, i: int) -> float:
        fastest_s = self._fastest_s[i] * (1 + self.config.buffer)
        gradient = max(0.5, min(2.0, float(fastest_s / sample_s)))
        return max(float(self._floor), math.floor(limit * gradient + math.sqrt(limit * gradient)))
