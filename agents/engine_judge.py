"""What the robust controller makes of the engine: whether it is congested, and how surely."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from vllm_tenant_tuning.agents.robust_config import RobustConfig
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


class EngineJudge:
    """Whether the engine is congested, and how much may be in flight.

    Attributes:
        budget: requests in flight together; infinite until congestion was seen.
    """

    def __init__(self, config: RobustConfig, scenario: Scenario) -> None:
        self._config = config
        self._interval_s = scenario.control.control_interval_s
        self._lag = max(1, math.ceil(scenario.control.window_s / self._interval_s))
        self._least = float(scenario.n_tenants * scenario.control.cap_min)
        self._most = float(scenario.n_tenants * scenario.control.cap_max)
        self._readings: deque[tuple[float, float]] = deque(
            maxlen=max(1, round(config.window_s / self._interval_s))
        )
        self._running: deque[float] = deque(maxlen=self._lag)
        self._fastest_s = math.inf
        self._token_rates: dict[int, float] = {}
        self._done = np.zeros(2)  # completed and beyond an SLO, decaying with window_s
        self._done_unslowed = np.zeros(2)  # the same while tokens came unslowed
        self._congested_at = math.inf
        self._calm_s = 0.0
        self._since_backoff = self._lag
        self.budget = math.inf

    def learn(self, telemetry: Telemetry, exhausted: bool) -> None:
        """Take an interval in and set the budget.

        Args:
            telemetry: of the interval.
            exhausted: whether the tenants could use more than their caps.
        """
        config = self._config
        slowdown, running = self._read(telemetry)
        self._since_backoff += 1
        self._calm_s += self._interval_s
        # The sliding window still shows what was before the last backoff.
        settled = self._since_backoff >= self._lag
        if settled and running > 0 and self._congested(telemetry, slowdown, running):
            self.budget = max(
                self._least,
                min(self.budget, running / max(slowdown, 1.1) ** config.backoff_exponent),
            )
            self._congested_at = running
            self._calm_s = 0.0
            self._since_backoff = 0
            self._readings.clear()
        elif settled and exhausted and math.isfinite(self.budget):
            grown = self.budget + max(1.0, config.growth * self.budget)
            if grown < self._congested_at or self._calm_s >= config.probe_s:
                self.budget = grown
            if self.budget >= self._most:
                self.budget = math.inf

    def _read(self, telemetry: Telemetry) -> tuple[float, float]:
        """The slowdown of tokens (1: none or unknown), and what ran in the sliding window."""
        tenants = telemetry.tenants
        itl_s = reading(tenants["itl_p50_s"])
        busy = reading(tenants["mean_in_flight"])
        self._running.append(float(busy.sum()))
        running = sum(self._running) / len(self._running)
        completed = reading(tenants["completed"])
        beyond = np.maximum(completed - reading(tenants["good"]), 0.0)
        done = np.array([completed.sum(), beyond.sum()])
        keep = math.exp(-self._interval_s / self._config.window_s)
        self._done = self._done * keep + done
        seen = (itl_s > 0) & (busy > 0)
        if not seen.any():
            return 1.0, running
        token_s = float((itl_s * busy)[seen].sum() / busy[seen].sum())
        self._fastest_s = min(self._fastest_s, token_s)
        slowdown = token_s / self._fastest_s
        tokens = float(busy[seen].sum()) * self._interval_s / token_s
        self._readings.append((math.log(token_s), tokens))
        if slowdown <= self._config.slowdown_tolerance:
            self._done_unslowed += done
        level = _level(running)
        known = self._token_rates.get(level, running / slowdown)
        self._token_rates[level] = known + 0.5 * (running / slowdown - known)
        return slowdown, running

    def _congested(self, telemetry: Telemetry, slowdown: float, running: float) -> bool:
        config, cluster = self._config, telemetry.cluster
        if (
            cluster["preemptions"] > 0
            or cluster["num_requests_waiting"] > config.queue_depth_threshold
        ):
            return True
        if not self._slowed():
            return False
        level = _level(running)
        fewer = [rate for known, rate in self._token_rates.items() if known < level]
        if fewer and max(fewer) > running / slowdown * config.slowdown_tolerance:
            return True
        return self._violated()

    def _slowed(self) -> bool:
        """Whether a window's slowdown is above the tolerance by the confidence asked for.

        A window of N tokens has a mean logarithm within `confidence / sqrt(N)`, taking the
        spread of token times to be as wide as their mean.
        """
        threshold = math.log(self._fastest_s * self._config.slowdown_tolerance)
        total = tokens = 0.0
        for log_s, weight in reversed(self._readings):
            total += log_s * weight
            tokens += weight
            if total / tokens - self._config.confidence / math.sqrt(tokens) > threshold:
                return True
        return False

    def _violated(self) -> bool:
        """Whether more requests miss their SLOs than is allowed and than the service alone does.

        By the lower end of Wilson's interval.
        """
        n, beyond = self._done
        if n <= 0:
            return False
        z = self._config.confidence
        share = beyond / n
        spread = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
        low = (share + z**2 / (2 * n) - spread) / (1 + z**2 / n)
        intrinsic = self._done_unslowed[1] / max(self._done_unslowed[0], 1.0)
        return bool(low > max(self._config.allowed_violations, intrinsic))


def _level(running: float) -> int:
    """Numbers of sequences told apart: one by one up to 16, then by a tenth."""
    return round(running) if running < 16 else 16 + int(math.log(running / 16) / math.log(1.1))
