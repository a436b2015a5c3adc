"""The robust controller: the study's four requirements, each of which can be switched off."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Floats, Integers, fill
from vllm_tenant_tuning.agents.deadline_judge import DeadlineJudge
from vllm_tenant_tuning.agents.demand_forecast import DemandForecast
from vllm_tenant_tuning.agents.engine_judge import EngineJudge
from vllm_tenant_tuning.agents.policy import first_that_holds
from vllm_tenant_tuning.agents.robust_config import REQUIREMENTS, RobustConfig
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

Bools = npt.NDArray[np.bool_]


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

    **Continuous batching** needs another judge, since requests are not alike there and slots are
    not what is scarce: `DeadlineJudge` says which tenants harm others of earlier deadlines.

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
        self._deadlines = None
        if self.config.signal and isinstance(scenario.engine, ContinuousBatchingEngine):
            self._deadlines = DeadlineJudge(self.config, scenario, self._demand)

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Weigh need against evidence."""
        wanted = self._weighed(telemetry, caps)
        self._moved = (wanted > caps, wanted < caps)
        return wanted

    def _weighed(self, telemetry: Telemetry, caps: Integers) -> Floats:
        config, tenants = self.config, telemetry.tenants
        queued = reading(tenants["queued"])
        backlog = queued + reading(tenants["in_flight"])
        self._demand.learn(telemetry)
        limit = float(self._bound)
        if self._deadlines is not None:
            self._deadlines.learn(telemetry, caps)
            high, low = self._deadlines.harm, self._deadlines.headroom
        elif config.signal:
            self._engine.learn(telemetry, exhausted=bool(backlog.sum() >= caps.sum()))
            limit = min(limit, self._engine.budget)
            high = np.full(caps.size, caps.sum() > self._engine.budget)
            low = np.full(caps.size, caps.sum() < self._engine.budget)
        else:
            high, low = self._by_thresholds(telemetry)

        need = np.maximum(backlog, self._demand.expected()) if config.context else backlog
        self._told = (high, backlog > caps, need > caps)
        if config.scope and config.asymmetry:
            if self._deadlines is not None:
                return np.rint(self._deadlines.caps)
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
        return (caps + np.where(down, -1, np.where(up, 1, 0))).astype(np.float64)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Whether congestion, need or another's need moved a cap."""
        (up, down), (high, waiting, needed) = self._moved, self._told
        if self._deadlines is not None:
            return first_that_holds(
                self._scenario.n_tenants,
                (down & high, "harms tenants of earlier deadlines"),
                (down, "tenants of earlier deadlines leave less room"),
                (up, "tenants of earlier deadlines leave room"),
            )
        congested = "window p99 or occupancy above the threshold"
        if self.config.signal:
            congested = "more in flight allowed than the budget after congestion"
        return first_that_holds(
            self._scenario.n_tenants,
            (down & high, congested),
            (down, "a slot is worth more to another tenant"),
            (up & waiting, "backlog above the cap"),
            (up & needed, "forecast above the cap"),
            (up, "room left in the budget"),
        )

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
