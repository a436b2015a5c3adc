"""What the robust controller expects of the tenants: how many slots each will need."""

from __future__ import annotations

import heapq
import math
from collections import deque

import numpy as np

from vllm_tenant_tuning.agents.caps import Floats, Integers
from vllm_tenant_tuning.agents.robust_config import RobustConfig
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


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
    def peak_per_s(self) -> Floats:
        """(n_tenants,) the highest of the rates that lasted, slowly forgotten, or the present."""
        return np.maximum(self._peak, self.rate_per_s)

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
        peak = self.peak_per_s.tolist()
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
