"""What control could win if it knew what no controller is told: the slots engine's moving knee."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers, fill
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.engine import SlotsEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


class OraclePolicy(CapPolicy):
    """Keeps what is in flight at the knee that the scenario's file schedules, and no policy sees.

    A yardstick, not a controller: it reads the schedule, begins to shrink as many intervals before
    the knee falls as `max_delta` takes, and shares the knee by demand (queued and in flight). In a
    pool without a knee no cap is worth having, and everyone gets `cap_max`: a request that is held
    back never speeds another up. It knows the engine, not the arrivals to come, so that it bounds
    what tracking the engine can win rather than what any policy can.
    """

    def __init__(self) -> None:
        self.name = "oracle"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Read the schedule.

        Raises:
            ValueError: an engine whose capacity is no schedule, tenants that a shared pool does
                not treat alike (drop weights), or a `total_cap`.
        """
        engine, tenants = scenario.engine, scenario.tenants
        if not isinstance(engine, SlotsEngine):
            raise ValueError("policy 'oracle': got the engine fidelity; accepted is slots")
        if scenario.control.total_cap is not None:
            raise ValueError(
                f"policy 'oracle': got total_cap {scenario.control.total_cap}; accepted is none"
            )
        weights = {tenant.drop_weight for tenant in tenants}
        if len(weights) > 1:
            raise ValueError(
                f"policy 'oracle': got drop weights {sorted(weights)}; accepted are equal ones"
            )
        segments = engine.knee.segments if engine.knee else ()
        self._knees = [segment.knee for segment in segments]
        self._ends_s = list(accumulate(segment.duration_s for segment in segments))

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """The coming interval's knee, dealt by demand."""
        control = self._scenario.control
        if not self._knees:
            return np.full(caps.size, control.cap_max)
        now_s = float(telemetry.cluster["time_s"])
        # caps fall together by this much an interval
        fall = control.max_delta * caps.size
        ahead = int(np.ceil((max(self._knees) - min(self._knees)) / fall))
        total = min(
            self._knee(now_s + i * control.control_interval_s) + fall * i for i in range(ahead + 1)
        )
        floor = np.full(caps.size, control.cap_min)
        demand = reading(telemetry.tenants["queued"]) + reading(telemetry.tenants["in_flight"])
        demand = np.clip(demand, control.cap_min, control.cap_max).astype(np.int64) - floor
        left = max(int(total) - int(floor.sum()), 0)
        share = fill(demand, np.ones(caps.size), left)
        spare = fill(control.cap_max - floor - share, np.ones(caps.size), left - int(share.sum()))
        return floor + share + spare

    def _knee(self, time_s: float) -> float:
        within_s = time_s % self._ends_s[-1]
        return self._knees[int(np.searchsorted(self._ends_s, within_s, side="right"))]
