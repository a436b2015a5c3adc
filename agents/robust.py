"""The robust controller: the study's four requirements, each of which can be switched off."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Floats, Integers, fill
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.agents.threshold import WindowP99Thresholds
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

REQUIREMENTS = ("signal", "scope", "asymmetry", "context")
"""The study's four, in the order in which the ablation adds them."""


@dataclass(frozen=True)
class RobustConfig:
    """Parameters of `RobustPolicy`; the numbers were tuned on training seeds (from 10000)."""

    signal: bool = True
    """Requirement 1: congestion as a confidence bound over long windows, against what the engine
    does unloaded. Off: the naive rule's p99 of the sliding window against 6 s, and occupancy."""

    scope: bool = True
    """Requirement 2: each tenant by itself. Off: all caps move together."""

    asymmetry: bool = True
    """Requirement 3: expand on need, take only what others need or congestion demands. Off: one
    up below the lower threshold, one down above the upper one."""

    context: bool = True
    """Requirement 4: SLA weights, bursts and the forecast of arrivals. Off: the present backlog,
    all tenants alike."""

    window_s: float = 60.0
    """The longest window over which congestion, service times and violations are estimated."""

    confidence: float = 2.0
    """Standard errors by which an estimate must be past its threshold."""

    slowdown_tolerance: float = 1.1
    """How many times slower than unloaded a token may come before concurrency is in question."""

    backoff_exponent: float = 0.5
    """The engine's budget after congestion: what ran, over the slowdown to this power."""

    probe_s: float = 15.0
    """For so long the budget stays below the level at which congestion was last seen."""

    allowed_violations: float = 0.01
    """Share of requests beyond their SLO that a promised 99th percentile allows."""

    fast_window_s: float = 6.0
    """Window of the arrival rate that detects bursts."""

    burst_deviations: float = 3.0
    """Standard deviations of a Poisson count that make a burst, or the end of one."""

    urgency: float = 0.3
    """Worth of a slot for a request that waits now, in requests saved."""

    thresholds: WindowP99Thresholds = WindowP99Thresholds()
    """The naive rule's, for requirements that are off."""


def parse_requirements(text: str) -> RobustConfig:
    """The configuration without the requirements that `-NAME-NAME...` names.

    Raises:
        ValueError: not of that form, or an unknown requirement.
    """
    first, *names = text.split("-")
    if first or not names or not set(names) <= set(REQUIREMENTS) or len(set(names)) < len(names):
        raise ValueError(
            f"policy 'robust:{text}': accepted are the requirements to leave out, each once after "
            f"a minus, such as robust:-signal-context; they are {', '.join(REQUIREMENTS)}"
        )
    return RobustConfig(**dict.fromkeys(names, False))


class RobustPolicy(CapPolicy):
    """WIP."""

    def __init__(self, config: RobustConfig | None = None) -> None:
        self.config = config or RobustConfig()
        off = [name for name in REQUIREMENTS if not getattr(self.config, name)]
        self.name = "robust" + (":-" + "-".join(off) if off else "")

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        config, control = self.config, scenario.control
        n = scenario.n_tenants
        dt = control.control_interval_s
        self._dt = dt
        self._memory = max(1, round(config.window_s / dt))
        self._weights = np.array([t.drop_weight for t in scenario.tenants])
        if not config.context or not self._weights.any():
            self._weights = np.ones(n)
        self._weights = np.maximum(self._weights, 1e-6)
        self._bound = float(scenario.total_cap)
        if config.context and self._weights.min() < self._weights.max():
            self._bound = min(self._bound, scenario.max_num_seqs)
        self._budget = math.inf  # what the engine bears, once congestion was seen
        self._bad = math.inf
        self._since_bad_s = 0.0
        self._readings: deque[tuple[float, float, float]] = deque(maxlen=self._memory)
        self._fastest_s = math.inf
        self._rates: dict[int, float] = {}
        self._fast: deque[Floats] = deque(maxlen=max(1, round(config.fast_window_s / dt)))
        self._arrivals = np.zeros(n)
        self._arrival_s = np.zeros(n)
        self._busy_s = np.zeros(n)
        self._done = np.zeros(n)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        config, control, tenants = self.config, self._scenario.control, telemetry.tenants
        queued = reading(tenants["queued"])
        backlog = queued + reading(tenants["in_flight"])
        self._learn(telemetry)
        if config.signal:
            self._judge_engine(telemetry, caps, backlog)
            limit = min(self._budget, self._bound)
            high = np.full(caps.size, caps.sum() > self._budget)
            low = np.full(caps.size, caps.sum() < self._budget)
        else:
            limit = self._bound
            high, low = self._by_thresholds(telemetry)

        need = backlog
        if config.context:
            load = self._load()
            need = np.maximum(backlog, np.ceil(load + np.sqrt(load)))
        if config.asymmetry and config.scope:
            if limit < caps.size * control.cap_max:
                wanted = self._share(int(limit), backlog)
            else:
                wanted = np.maximum(caps, need)
            if not config.signal:
                waits = queued > 0
                wanted = np.where(high & ~waits, caps - 1, np.where(high, caps, wanted))
            return wanted
        if config.asymmetry:
            up = need > caps
            down = high & (queued == 0 if not config.signal else True)
        else:
            up, down = low & (queued > 0), high
        if not config.scope:
            up, down = np.full(caps.size, up.any()), np.full(caps.size, down.any())
        up = up & ~high & ~down
        return caps + up.astype(np.int64) - down.astype(np.int64)

    def _by_thresholds(self, telemetry: Telemetry):
        limits, tenants, cluster = self.config.thresholds, telemetry.tenants, telemetry.cluster
        occupancy = reading(tenants["in_flight"]).sum() / self._scenario.max_num_seqs
        if self.config.scope:
            p99 = np.where(
                reading(tenants["window_completions"]) > 0, reading(tenants["latency_p99_s"]), 0.0
            )
        else:
            c = cluster["latency_p99_s"] if cluster["window_completions"] > 0 else 0.0
            p99 = np.full(tenants.size, float(reading(c)))
        high = (p99 > limits.throttle_p99_s) | (occupancy >= limits.throttle_occupancy)
        low = (p99 < limits.expand_p99_s) & (occupancy < limits.expand_occupancy)
        return high, low & ~high

    def _learn(self, telemetry: Telemetry) -> None:
        tenants = telemetry.tenants
        if telemetry.cluster["time_s"] == 0:
            return
        arrived = reading(tenants["arrived"])
        self._fast.append(arrived)
        keep = 1 - self._dt / self.config.window_s
        self._busy_s = self._busy_s * keep + reading(tenants["mean_in_flight"]) * self._dt
        self._done = self._done * keep + reading(tenants["completed"])
        self._arrivals = self._arrivals * keep + arrived
        self._arrival_s = self._arrival_s * keep + self._dt
        recent = np.sum(self._fast, axis=0)
        recent_s = len(self._fast) * self._dt
        expected = self._arrivals / self._arrival_s * recent_s
        changed = np.abs(recent - expected) > self.config.burst_deviations * np.sqrt(
            np.maximum(expected, 1.0)
        )
        self._arrivals = np.where(changed, recent, self._arrivals)
        self._arrival_s = np.where(changed, recent_s, self._arrival_s)

    def _rate(self) -> Floats:
        return self._arrivals / np.maximum(self._arrival_s, 1e-9)

    def _service(self) -> Floats:
        return self._busy_s / np.maximum(self._done, 1.0)

    def _load(self) -> Floats:
        return self._rate() * self._service()

    def _judge_engine(self, telemetry, caps, backlog) -> None:
        config, tenants = self.config, telemetry.tenants
        itl = reading(tenants["itl_p50_s"])
        busy = reading(tenants["mean_in_flight"])
        seen = (itl > 0) & (busy > 0)
        self._since_bad_s += self._dt
        if not seen.any():
            return
        n = float(busy.sum())
        value = float((itl * busy)[seen].sum() / busy[seen].sum())
        tokens = n * self._dt / value
        self._readings.append((math.log(value), tokens, n))
        self._fastest_s = min(self._fastest_s, value)
        base = math.log(self._fastest_s)
        total = weight = 0.0
        worst = -math.inf
        for log_itl, size, _ in reversed(self._readings):
            total += (log_itl - base) * size
            weight += size
            worst = max(worst, total / weight - config.confidence / math.sqrt(weight))
            break  # WIP
        slowdown = value / self._fastest_s
        congested = worst > math.log(config.slowdown_tolerance)
        if congested:
            now = n
            target = now / slowdown**config.backoff_exponent
            self._bad = max(1.0, now)
            self._since_bad_s = 0.0
            floor = caps.size * self._scenario.control.cap_min
            self._budget = max(floor, min(self._budget, target))
        elif math.isfinite(self._budget) and backlog.sum() > caps.sum() - 0.5:
            nxt = self._budget + 1
            if nxt < self._bad or self._since_bad_s >= config.probe_s:
                self._budget = nxt
                if nxt >= self._bad:
                    self._bad = math.inf

    def _share(self, limit: int, backlog: Floats) -> Integers:
        control = self._scenario.control
        n = backlog.size
        shares = np.full(n, control.cap_min)
        left = max(limit - int(shares.sum()), 0)
        if not self.config.context:
            most = np.full(n, control.cap_max)
            demand = np.clip(backlog, control.cap_min, control.cap_max)
            shares = shares + fill(demand - shares, self._weights, left)
            return shares + fill(most - shares, self._weights, limit - int(shares.sum()))
        load, rate = self._load(), self._rate()
        heap = []
        loss = np.ones(n)
        for i in range(n):
            for c in range(1, control.cap_min + 1):
                loss[i] = load[i] * loss[i] / (c + load[i] * loss[i]) if load[i] > 0 else 0.0
            heap.append(self._offer(i, int(shares[i]), float(loss[i]), load, rate, backlog))
        heapq.heapify(heap)
        while left > 0 and heap:
            _, _, i, after = heapq.heappop(heap)
            shares[i] += 1
            loss[i] = after
            left -= 1
            if shares[i] < control.cap_max:
                heapq.heappush(heap, self._offer(i, int(shares[i]), after, load, rate, backlog))
        return shares

    def _offer(self, i, c, loss, load, rate, backlog):
        a = float(load[i])
        after = a * loss / (c + 1 + a * loss) if a > 0 else 0.0
        value = rate[i] * self._dt * (loss - after) + self.config.urgency * (c < backlog[i])
        return (-self._weights[i] * value, c, i, after)
