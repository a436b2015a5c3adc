"""The robust controller: the study's four requirements, each of which can be switched off."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Floats, Integers, fill
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.agents.threshold import WindowP99Thresholds
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

Bools = npt.NDArray[np.bool_]

REQUIREMENTS = ("signal", "scope", "asymmetry", "context")
"""The study's four, in the order in which an ablation adds them."""


@dataclass(frozen=True)
class RobustConfig:
    """Parameters of `RobustPolicy`; those marked tuned were chosen on training seeds."""

    signal: bool = True
    """Requirement 1: congestion as a confidence bound over long windows, against what the engine
    does unloaded. Off: the naive rule's p99 of the sliding window against 6 s, and occupancy."""

    scope: bool = True
    """Requirement 2: each tenant by itself. Off: all caps move together."""

    asymmetry: bool = True
    """Requirement 3: expand on need, take only what others need or what congestion demands. Off:
    one up below the lower threshold, one down above the upper one."""

    context: bool = True
    """Requirement 4: SLA weights, bursts and the forecast of arrivals. Off: the present backlog,
    all tenants alike."""

    window_s: float = 60.0
    """The longest window of congestion, violations, rates and service times."""

    confidence: float = 2.0
    """Standard errors by which an estimate must be past its threshold."""

    slowdown_tolerance: float = 1.1
    """How many times slower than unloaded a token may come before concurrency is in question."""

    allowed_violations: float = 0.01
    """Share of requests beyond their SLOs that a promised 99th percentile allows."""

    queue_depth_threshold: float = 5.0
    """Requests waiting inside the engine, on average, that show a full KV cache (llm-d's)."""

    backoff_exponent: float = 0.3
    """The budget after congestion: what ran, over the slowdown to this power (tuned)."""

    growth: float = 0.05
    """Share by which an exhausted budget grows in an interval, at least one request."""

    probe_s: float = 6.0
    """For so long the budget stays below the level that was last congested (tuned)."""

    burst_window_s: float = 15.0
    """Longest of the recent windows in which a change of the arrival rate is looked for."""

    burst_deviations: float = 2.5
    """Standard deviations, of a likelihood ratio test, that make a change (tuned)."""

    peak_memory_s: float = 600.0
    """Time constant with which a tenant's peak rate is forgotten."""

    horizon: float = 2.0
    """Intervals ahead for which a tenant's bursts are expected (tuned)."""

    urgency: float = 3.0
    """Worth of a slot to a request that waits now, in requests of the next interval (tuned)."""

    thresholds: WindowP99Thresholds = field(default_factory=WindowP99Thresholds)
    """The naive rule's, in place of the first and third requirement where they are off."""


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
    without: dict[str, Any] = dict.fromkeys(names, False)
    return replace(RobustConfig(), **without)


class RobustPolicy(CapPolicy):
    """Expands on need, and takes only by evidence: the study's four requirements.

    **Signal.** A token's time against the fastest seen (the median ITL, weighted by what is in
    flight) is averaged over the most recent windows up to `window_s`, each with a confidence
    bound from the number of its tokens; the engine is slowed down when the bound of any is above
    the tolerance. It is congested when the slowdown does harm: fewer sequences have been seen to
    give more tokens per second, or the share of requests beyond their SLOs is, again with
    confidence, above what is allowed and above what the unslowed engine has (the intrinsic tail).
    So are preemptions, and requests queueing in the engine. Congestion lowers a budget of
    requests in flight at once; a budget that is exhausted without congestion grows.

    **Scope.** The budget, `total_cap`, and for tenants of different weights the engine's
    sequences, are dealt tenant by tenant.

    **Asymmetry.** Without a bound that binds, caps only grow, with the need; a tenant loses cap to
    congestion or to another's need, never for being idle, and never while it waits unless one of
    the two is shown.

    **Context.** A slot goes to where it saves most: `drop_weight` times the requests that would
    be lost without it. The loss is that of a queue with waiting room for the tenant's patience, at
    its present rate and, by the probability of a burst, at its peak; the rate is estimated over
    `window_s` from the last change that a likelihood ratio test finds. Tenants of larger weight
    may use the share of those of smaller weight, not the reverse.

    Assumes that the ITL tells the engine's state, a Poisson count in the test, exponential
    service in the loss (both are mild), and SLA weights that mean what they say. An engine whose
    token rate falls for another reason than concurrency (a wave of long prompts) looks congested.
    """

    def __init__(self, config: RobustConfig | None = None) -> None:
        self.config = config or RobustConfig()
        off = [name for name in REQUIREMENTS if not getattr(self.config, name)]
        self.name = "robust" + (":-" + "-".join(off) if off else "")

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Forget engine and arrivals."""
        weights = np.array([tenant.drop_weight for tenant in scenario.tenants])
        if not self.config.context or not weights.any():
            weights = np.ones(scenario.n_tenants)
        self._weights = np.maximum(weights, 1e-6)
        self._bound = scenario.total_cap
        if weights.min() < weights.max():
            self._bound = min(self._bound, scenario.max_num_seqs)
        self._unbounded = scenario.n_tenants * scenario.control.cap_max
        self._engine = EngineJudge(self.config, scenario)
        self._demand = DemandForecast(self.config, scenario)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Weigh need against evidence."""
        config, tenants = self.config, telemetry.tenants
        queued = reading(tenants["queued"])
        backlog = queued + reading(tenants["in_flight"])
        self._demand.learn(telemetry)
        limit = float(self._bound)
        if config.signal:
            self._engine.learn(telemetry, exhausted=bool(backlog.sum() >= caps.sum()))
            limit = min(limit, self._engine.budget)
            high = np.full(caps.size, caps.sum() > self._engine.budget)
            low = np.full(caps.size, caps.sum() < self._engine.budget)
        else:
            high, low = self._by_thresholds(telemetry)

        need = np.maximum(backlog, self._demand.expected()) if config.context else backlog
        if config.scope and config.asymmetry:
            wanted = np.maximum(caps, need)
            if limit < self._unbounded:
                wanted = self._dealt(int(limit), backlog).astype(np.float64)
            if not config.signal:  # a p99 cannot tell the engine's cause from the gate's
                wanted = np.where(high, np.where(queued > 0, caps, caps - 1), wanted)
            return wanted
        if config.asymmetry:
            up, down = (need > caps) & ~high, high
            if config.signal:
                up &= low
            else:
                down = high & (queued == 0)
        else:
            up, down = low & (queued > 0), high
        if not config.scope:
            up, down = np.full(caps.size, up.any()), np.full(caps.size, down.any())
        return caps + np.where(down, -1, np.where(up, 1, 0))

    def _by_thresholds(self, telemetry: Telemetry) -> tuple[Bools, Bools]:
        """Above the naive rule's upper thresholds, and below its lower ones."""
        limits, tenants = self.config.thresholds, telemetry.tenants
        occupancy = reading(tenants["in_flight"]).sum() / self._scenario.max_num_seqs
        seen = tenants if self.config.scope else telemetry.cluster[None]
        p99_s = np.where(seen["window_completions"] > 0, reading(seen["latency_p99_s"]), 0.0)
        p99_s = np.broadcast_to(p99_s, tenants.shape)
        high = (p99_s > limits.throttle_p99_s) | (occupancy >= limits.throttle_occupancy)
        low = (p99_s < limits.expand_p99_s) & (occupancy < limits.expand_occupancy)
        return high, low & ~high

    def _dealt(self, limit: int, backlog: Floats) -> Integers:
        """The limit, dealt out whole."""
        control = self._scenario.control
        floor = np.full(backlog.size, control.cap_min)
        if not self.config.context:
            demand = np.clip(backlog, control.cap_min, control.cap_max).astype(np.int64)
            spare = max(limit - int(floor.sum()), 0)
            shares = floor + fill(demand - floor, self._weights, spare)
            spare = max(limit - int(shares.sum()), 0)
            return shares + fill(control.cap_max - shares, self._weights, spare)
        shares = self._demand.deal(limit, floor, backlog, self._weights)
        if limit < self._scenario.total_cap:  # the bound is not one on the sum of the caps
            above = self._weights[:, None] > self._weights[None, :]
            shares = shares + (above * shares).sum(axis=1)
        return shares


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


class DemandForecast:
    """Arrival rates with their changes, service times, and what slots are worth."""

    def __init__(self, config: RobustConfig, scenario: Scenario) -> None:
        n = scenario.n_tenants
        self._config = config
        self._interval_s = scenario.control.control_interval_s
        self._cap_max = scenario.control.cap_max
        # A request is lost when it has waited for its patience, or misses its SLO.
        self._wait_s = [
            min(tenant.patience_s or math.inf, tenant.slo_latency_p99_s)
            for tenant in scenario.tenants
        ]
        self._recent: deque[Floats] = deque(
            maxlen=max(1, round(config.burst_window_s / self._interval_s))
        )
        self._arrived, self._arrived_s = np.zeros(n), np.zeros(n)
        self._busy_s, self._completed = np.zeros(n), np.zeros(n)
        self._peak, self._bursts = np.zeros(n), np.zeros(n)
        self._intervals = 0

    @property
    def rate_per_s(self) -> Floats:
        """(n_tenants,) arrivals per second since the last change, over `window_s` at most."""
        rate: Floats = self._arrived / np.maximum(self._arrived_s, 1e-9)
        return rate

    @property
    def service_s(self) -> Floats:
        """(n_tenants,) time in the server by Little's law; 0 before the first completions."""
        return np.where(self._completed > 0.5, self._busy_s / np.maximum(self._completed, 0.5), 0)

    def expected(self) -> Floats:
        """(n_tenants,) slots for the forecast: the load and a square root on top of it."""
        load = self.rate_per_s * self.service_s
        slots: Floats = np.ceil(load + np.sqrt(load))
        return slots

    def learn(self, telemetry: Telemetry) -> None:
        """Take an interval in; nothing at time 0."""
        if not telemetry.cluster["time_s"] > 0:
            return
        config, tenants, dt_s = self._config, telemetry.tenants, self._interval_s
        arrived = reading(tenants["arrived"])
        keep = math.exp(-dt_s / config.window_s)
        self._busy_s = self._busy_s * keep + reading(tenants["mean_in_flight"]) * dt_s
        self._completed = self._completed * keep + reading(tenants["completed"])
        self._arrived = self._arrived * keep + arrived
        self._arrived_s = self._arrived_s * keep + dt_s
        self._recent.append(arrived)
        self._intervals += 1

        before = self.rate_per_s
        best = np.full(arrived.size, config.burst_deviations**2 / 2)
        changed = np.zeros(arrived.size, np.bool_)
        count = np.zeros(arrived.size)
        for back, counts in enumerate(reversed(self._recent), 1):
            count = count + counts
            mean = np.maximum(before * back * dt_s, 1e-3)
            # Log-likelihood ratio of a Poisson count with its own mean and with the old one.
            ratio = count * np.log(np.maximum(count, 1e-9) / mean) - (count - mean)
            better = ratio > best
            best = np.where(better, ratio, best)
            changed |= better
            self._arrived = np.where(better, count, self._arrived)
            self._arrived_s = np.where(better, back * dt_s, self._arrived_s)
        self._bursts += changed & (self.rate_per_s > before)
        settled = self._arrived_s >= config.burst_window_s
        faded = self._peak * math.exp(-dt_s / config.peak_memory_s)
        self._peak = np.where(settled, np.maximum(faded, self.rate_per_s), faded)

    def deal(self, limit: int, floor: Integers, backlog: Floats, weights: Floats) -> Integers:
        """Give slot after slot to the tenant to whom it is worth most.

        Args:
            limit: slots in all.
            floor: (n_tenants,) slots that everyone has.
            backlog: (n_tenants,) requests queued and in flight.
            weights: (n_tenants,) worth of a request.

        Returns:
            (n_tenants,) int64; what nothing is gained by goes to the smallest shares.
        """
        shares = floor.copy()
        service_s, now = self.service_s.tolist(), self.rate_per_s.tolist()
        peak = np.maximum(self._peak, self.rate_per_s).tolist()
        burst = np.minimum(1.0, self._config.horizon * self._bursts / max(self._intervals, 20))
        tenants = [
            SlotWorth(
                float(weights[i]),
                float(backlog[i]),
                self._config.urgency,
                self._wait_s[i] / service_s[i] if service_s[i] > 0 else 0.0,
                [
                    (now[i] * service_s[i], now[i] * self._interval_s * (1 - float(burst[i]))),
                    (peak[i] * service_s[i], peak[i] * self._interval_s * float(burst[i])),
                ],
                int(floor[i]),
            )
            for i in range(shares.size)
        ]
        offers = [
            (-tenant.worth(), int(shares[i]), i)
            for i, tenant in enumerate(tenants)
            if shares[i] < self._cap_max
        ]
        heapq.heapify(offers)
        for _ in range(limit - int(shares.sum())):
            if not offers:
                break
            _, _, i = heapq.heappop(offers)
            shares[i] += 1
            tenants[i].take()
            if shares[i] < self._cap_max:
                heapq.heappush(offers, (-tenants[i].worth(), int(shares[i]), i))
        return shares


class SlotWorth:
    """What the next slot is worth to a tenant: its weight times the requests that it saves.

    Args:
        weight: worth of a request.
        backlog: requests queued and in flight; a slot for one that waits is worth `urgency`.
        urgency: see there.
        places: requests that may wait for each slot, patience over service time.
        states: (load in slots, arrivals in an interval) of each state that is expected.
        slots: that the tenant has already.
    """

    def __init__(
        self,
        weight: float,
        backlog: float,
        urgency: float,
        places: float,
        states: list[tuple[float, float]],
        slots: int,
    ) -> None:
        self._weight, self._backlog, self._urgency = weight, backlog, urgency
        self._places, self._states = places, states
        self._slots = slots
        self._blocking = [erlang_b(load, slots) for load, _ in states]

    def worth(self) -> float:
        """Of one more slot."""
        saved = self._urgency if self._slots < self._backlog else 0.0
        for (load, arrivals), blocking in zip(self._states, self._blocking, strict=True):
            after = _erlang_b_next(load, self._slots, blocking)
            saved += arrivals * (
                lost_share(load, self._slots, blocking, self._places)
                - lost_share(load, self._slots + 1, after, self._places)
            )
        return self._weight * saved

    def take(self) -> None:
        """Take the slot."""
        self._blocking = [
            _erlang_b_next(load, self._slots, blocking)
            for (load, _), blocking in zip(self._states, self._blocking, strict=True)
        ]
        self._slots += 1


def erlang_b(load: float, slots: int) -> float:
    """Share of Poisson arrivals that find all slots busy and are lost (Erlang's B).

    Args:
        load: arrival rate times service time, in slots.
        slots: from 0 on.
    """
    blocking = 1.0 if load > 0 else 0.0
    for c in range(slots):
        blocking = _erlang_b_next(load, c, blocking)
    return blocking


def _erlang_b_next(load: float, slots: int, blocking: float) -> float:
    """Erlang's B of one slot more, by its recursion."""
    return load * blocking / (slots + 1 + load * blocking)


def lost_share(load: float, slots: int, blocking: float, places: float) -> float:
    """Share of arrivals that the queue M/M/c/K turns away, K = slots * (1 + places).

    From the state that all slots are busy on, the chain is geometric in load / slots, so that
    the recursion over waiting places, 1 / B = 1 + 1 / (r B'), has a closed form; it is used for
    a fraction of a place too.

    Args:
        load: in slots.
        slots: from 0 on; without any all is lost.
        blocking: Erlang's B of load and slots.
        places: that wait for each slot.
    """
    if load <= 0 or blocking <= 0:
        return 0.0
    if slots == 0:
        return 1.0
    ratio = load / slots
    if abs(ratio - 1) < 1e-6:
        ratio = 1 + 1e-6
    exponent = slots * places * math.log(ratio)
    if exponent > 500:
        return 1 - 1 / ratio
    if exponent < -500:
        return 0.0
    decay = math.exp(-exponent)
    return 1 / (decay / blocking + (1 - decay) / (1 - 1 / ratio))


def _level(running: float) -> int:
    """Numbers of sequences told apart: one by one up to 16, then by a tenth."""
    return round(running) if running < 16 else 16 + int(math.log(running / 16) / math.log(1.1))
