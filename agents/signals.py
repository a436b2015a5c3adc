"""What rules read from telemetry: token times and how the promised percentiles are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import Floats
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

TokenTime = Literal["server", "itl"]
"""What stands for a round trip: `server`, the time a request spends in the server for each of
its output tokens, or `itl`, the median inter-token latency."""


LEAST_READING = 1e-9


def reading(values: npt.ArrayLike) -> Floats:
    """Readings with 0 for those that are not available, (n_tenants,) float64.

    So are those under a billionth of their unit, finer than anything measured: quotients of them
    overflow.
    """
    array = np.asarray(values, np.float64)
    return np.where(np.isfinite(array) & (np.abs(array) >= LEAST_READING), array, 0.0)


def slo_ratio(tenants: npt.NDArray[np.void], scenario: Scenario) -> Floats:
    """How the window's 99th percentiles stand to the tenants' SLOs; above 1 one is violated.

    The largest ratio counts, of latency, TTFT and ITL wherever the tenant has an SLO on it: what
    the reward punishes. NaN where the window has no completions.

    Args:
        tenants: structured (n_tenants,) of `TENANT_DTYPE`.
        scenario: gives the SLOs.
    """
    slos = np.array(
        [
            (tenant.slo_latency_p99_s, tenant.slo_ttft_p99_s, tenant.slo_itl_p99_s)
            for tenant in scenario.tenants
        ],
        np.float64,
    )
    fields = ("latency_p99_s", "ttft_p99_s", "itl_p99_s")
    ratios = np.stack([reading(tenants[field]) for field in fields], axis=1) / slos
    worst = np.nan_to_num(ratios, nan=0.0).max(axis=1)
    return np.where((worst > 0) & (reading(tenants["window_completions"]) > 0), worst, np.nan)


@dataclass(frozen=True)
class RoundTrips:
    """One sample for each tenant; NaN where a tenant has none yet.

    Attributes:
        token_time_s: (n_tenants,) seconds for an output token.
        in_flight: (n_tenants,) the most that were in flight at the end of an interval.
        failed: (n_tenants,) bool, whether the server refused or broke a request.
    """

    token_time_s: Floats
    in_flight: Floats
    failed: npt.NDArray[np.bool_]


class TokenTimeWindow:
    """Collects, tenant by tenant, windows of enough completions: a round trip for each.

    Concurrency limiters compare a request's round trip with the fastest one. For an LLM it grows
    with the output, so the time in the server is divided by the output tokens; and it must not
    contain the wait at our own gate, or a low cap would look like congestion. By Little's law
    the sum of the in-flight time over the tokens completed is such a time per token.

    Args:
        n_tenants: number of tenants.
        interval_s: length of a control interval.
        min_samples: completions that a window needs (Netflix's WindowedLimit: 10).
        token_time: see `TokenTime`; `itl` gives a sample in every interval with work in flight.
    """

    def __init__(
        self, n_tenants: int, interval_s: float, min_samples: int, token_time: TokenTime
    ) -> None:
        self._interval_s = interval_s
        self._min_samples = min_samples
        self._token_time = token_time
        self._sums = np.zeros((4, n_tenants))  # in-flight seconds, tokens, completions, failures
        self._most = np.zeros(n_tenants)

    def add(self, telemetry: Telemetry) -> RoundTrips:
        """Take an interval in; give the windows that it completes, and begin those anew."""
        tenants = telemetry.tenants
        busy_s = reading(tenants["mean_in_flight"]) * self._interval_s
        self._sums += [
            busy_s,
            reading(tenants["output_tokens"]),
            reading(tenants["completed"]),
            reading(tenants["failed"]),
        ]
        self._most = np.maximum(self._most, reading(tenants["in_flight"]))
        in_flight_s, tokens, completions, failures = self._sums
        if self._token_time == "itl":
            value = reading(tenants["itl_p50_s"])
            ready = (value > 0) & (busy_s > 0)
        else:
            value = in_flight_s / np.maximum(tokens, 1.0)
            ready = (completions >= self._min_samples) & (value > 0)
        done = ready | (failures > 0)
        result = RoundTrips(np.where(ready, value, np.nan), self._most.copy(), failures > 0)
        self._sums[:, done] = 0.0
        self._most[done] = 0.0
        return result

    def clear(self, which: npt.NDArray[np.bool_]) -> None:
        """Begin the windows of some tenants anew."""
        self._sums[:, which] = 0.0
        self._most[which] = 0.0
