"""AIMD, Vegas and Gradient2 after Netflix's concurrency-limits, one limit for each tenant.

Source: github.com/Netflix/concurrency-limits, classes `AIMDLimit`, `VegasLimit`,
`Gradient2Limit` and `WindowedLimit`. There a limit is updated after a window of round trips, any
number of times a second, and moves freely; here the caps move once in a control interval, by
`max_delta` at most, and the limit never runs away from the cap in force. Round trips are times
per output token (`signals.TokenTimeWindow`). What is dropped at the gate is no sign of a
congested server (the lower the cap, the more of it), so only refused and broken requests count
as the original's drops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Floats, Integers
from vllm_tenant_tuning.agents.policy import first_that_holds
from vllm_tenant_tuning.agents.signals import TokenTime, TokenTimeWindow, reading, slo_ratio
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class AIMDConfig:
    """Parameters of `AIMDPolicy`, those of Netflix's `AIMDLimit`."""

    backoff_ratio: float = 0.9
    """What a limit is multiplied with on a violation, rounded down."""

    signal: Literal["slo", "itl"] = "slo"
    """What a violation is: a p99 above its SLO, or a median ITL above `itl_tolerance`."""

    itl_tolerance: float = 1.25
    """With `itl`: the largest ratio of the ITL to the fastest one seen (our choice)."""


class AIMDPolicy(CapPolicy):
    """Times 0.9 on a violation, else one more while at least half of the cap is used.

    The original's timeout is the tenant's SLO: a violation is a p99 of the window above it, or a
    request that the server refused. Assumes that what violates the SLO is the concurrency, not
    the wait at the gate; where it is the wait, it throttles the tenant that needs more.
    """

    def __init__(self, config: AIMDConfig | None = None) -> None:
        self.config = config or AIMDConfig()
        self.name = "aimd" if self.config.signal == "slo" else "aimd:itl"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Forget the fastest ITL."""
        self._fastest_s = np.full(scenario.n_tenants, np.inf)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Back off, grow or hold."""
        tenants = telemetry.tenants
        if self.config.signal == "slo":
            violated = slo_ratio(tenants, self._scenario) > 1.0
        else:
            itl_s = reading(tenants["itl_p50_s"])
            seen = itl_s > 0
            self._fastest_s = np.where(seen, np.minimum(self._fastest_s, itl_s), self._fastest_s)
            violated = seen & (itl_s > self.config.itl_tolerance * self._fastest_s)
        failed = reading(tenants["failed"]) > 0
        used = 2 * reading(tenants["in_flight"]) >= caps
        self._told = (failed, violated, used)
        violated = violated | failed
        grown = caps + used
        return np.where(violated, np.floor(caps * self.config.backoff_ratio), grown)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was violated, or that the cap is used."""
        slow = "p99 above the SLO"
        if self.config.signal == "itl":
            slow = f"ITL above {self.config.itl_tolerance:g} times the fastest"
        failed, violated, used = self._told
        return first_that_holds(
            self._scenario.n_tenants,
            (failed, "requests failed"),
            (violated, slow),
            (used, "half of the cap used"),
        )


@dataclass(frozen=True)
class VegasConfig:
    """Parameters of `VegasPolicy`, those of Netflix's `VegasLimit` and `WindowedLimit`."""

    alpha: float = 3.0
    """Times log10 of the limit: below this queue the limit grows by log10."""

    beta: float = 6.0
    """Times log10 of the limit: above this queue it shrinks by log10; growth without a queue."""

    probe_multiplier: float = 30.0
    """Samples per request of the limit, on average 3/4 of them, after which the fastest round
    trip is taken anew."""

    min_samples: int = 10
    """Completions that a sample needs."""

    token_time: TokenTime = "server"
    """What stands for the round trip."""


class VegasPolicy(CapPolicy):
    """Keeps the queue in the server, estimated from the round trip's rise, in a band.

    The queue is `ceil(limit * (1 - fastest / now))`. Assumes that the fastest round trip seen is
    that of an idle server: noise makes the fastest too fast, and every other one looks queued.
    """

    def __init__(self, config: VegasConfig | None = None) -> None:
        self.config = config or VegasConfig()
        self.name = _named("vegas", self.config.token_time)

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Forget the fastest round trips; draw when to take them anew."""
        n = scenario.n_tenants
        self._window = _window(scenario, self.config.min_samples, self.config.token_time)
        self._rng = rng
        self._limit = np.array(scenario.caps_initial, np.float64)
        self._fastest_s = np.full(n, np.inf)
        self._samples = np.zeros(n)
        self._jitter = rng.uniform(0.5, 1.0, n)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Update the limit of every tenant that has a new sample."""
        self._limit = _follow(self._limit, caps)
        trips = self._window.add(telemetry)
        for i in np.flatnonzero(~np.isnan(trips.token_time_s) | trips.failed):
            self._limit[i] = self._updated(
                int(i),
                float(trips.token_time_s[i]),
                float(trips.in_flight[i]),
                bool(trips.failed[i]),
            )
        return self._limit

    def _updated(self, i: int, now_s: float, in_flight: float, failed: bool) -> float:
        limit = float(self._limit[i])
        step = _log10(limit)
        if not math.isnan(now_s):
            self._samples[i] += 1
            if self._jitter[i] * self.config.probe_multiplier * limit <= self._samples[i]:
                self._jitter[i] = self._rng.uniform(0.5, 1.0)
                self._samples[i] = 0
                self._fastest_s[i] = now_s
                return limit
            if now_s < self._fastest_s[i]:
                self._fastest_s[i] = now_s
                return limit
        if failed:
            return max(1.0, limit - step)
        if 2 * in_flight < limit:
            return limit
        queue = math.ceil(limit * (1 - self._fastest_s[i] / now_s))
        if queue <= step:
            return limit + self.config.beta * step
        if queue < self.config.alpha * step:
            return limit + step
        if queue > self.config.beta * step:
            return max(1.0, limit - step)
        return limit


@dataclass(frozen=True)
class Gradient2Config:
    """Parameters of `Gradient2Policy`, those of Netflix's `Gradient2Limit`."""

    tolerance: float = 1.5
    """How much slower than the long average a round trip may be before the limit shrinks."""

    smoothing: float = 0.2
    """Share of the new estimate in the limit."""

    queue_size: float = 4.0
    """Requests by which the estimate grows while round trips are as ever."""

    long_window: int = 600
    """Samples of the long average, exponential after the first `warmup`."""

    warmup: int = 10
    """Samples of the long average that are averaged plainly."""

    min_samples: int = 10
    """Completions that a sample needs."""

    token_time: TokenTime = "server"
    """What stands for the round trip."""


class Gradient2Policy(CapPolicy):
    """Shrinks by the ratio of the long average of round trips to the last one, at most to half.

    Assumes that congestion is short against the long average: one that lasts becomes the
    standard. The constant queue of 4 is meant for limits in the dozens; at caps of a few it
    outweighs any gradient.
    """

    def __init__(self, config: Gradient2Config | None = None) -> None:
        self.config = config or Gradient2Config()
        self.name = _named("gradient2", self.config.token_time)

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Forget the long averages."""
        self._window = _window(scenario, self.config.min_samples, self.config.token_time)
        self._limit = np.array(scenario.caps_initial, np.float64)
        self._long_s = np.zeros(scenario.n_tenants)
        self._samples = np.zeros(scenario.n_tenants)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Update the limit of every tenant that has a new sample."""
        config = self.config
        self._limit = _follow(self._limit, caps)
        trips = self._window.add(telemetry)
        for i in np.flatnonzero(~np.isnan(trips.token_time_s)):
            now_s, limit = trips.token_time_s[i], self._limit[i]
            self._samples[i] += 1
            warm = self._samples[i] > config.warmup
            factor = 2 / (config.long_window + 1) if warm else 1 / self._samples[i]
            long_s = self._long_s[i] * (1 - factor) + now_s * factor
            self._long_s[i] = long_s * (0.95 if long_s / now_s > 2 else 1.0)
            if trips.in_flight[i] < limit / 2:
                continue
            gradient = max(0.5, min(1.0, config.tolerance * (long_s / now_s)))
            estimate = limit * gradient + config.queue_size
            self._limit[i] = limit * (1 - config.smoothing) + estimate * config.smoothing
        return self._limit


def _window(scenario: Scenario, min_samples: int, token_time: TokenTime) -> TokenTimeWindow:
    interval_s = scenario.control.control_interval_s
    return TokenTimeWindow(scenario.n_tenants, interval_s, min_samples, token_time)


def _named(name: str, token_time: TokenTime) -> str:
    return name if token_time == "server" else f"{name}:{token_time}"


def _follow(limit: Floats, caps: Integers) -> Floats:
    """The limit with the cap in force as its whole part, as the original has it."""
    followed: Floats = np.clip(limit, caps, np.nextafter(caps + 1.0, 0.0))
    return followed


def _log10(limit: float) -> int:
    """The original's table: log10 rounded down, at least 1."""
    return max(1, int(math.log10(max(limit, 1.0))))
