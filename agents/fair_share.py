"""Demand under a total budget, shared fairly in tokens.

Source: the virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024, arXiv 2401.00588): prices of 1 for a prompt token and 2 for an output token.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers, fill
from vllm_tenant_tuning.agents.quotas import pool_size
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class FairShareConfig:
    """Parameters of `FairSharePolicy`."""

    prompt_token_price: float = 1.0
    """Cost of a prompt token (VTC)."""

    output_token_price: float = 2.0
    """Cost of an output token (VTC)."""

    weights: tuple[float, ...] | None = None
    """Service is fair in proportion to these; None: the tenants' drop weights."""

    budget: int | None = None
    """Requests in flight together; None: `total_cap`, or the sequences that the engine runs."""


class FairSharePolicy(CapPolicy):
    """Gives the budget's slots to demand, always next to the tenant that was served least.

    Each tenant has a counter of the service it received, prompt tokens admitted and output
    tokens completed at their prices, over its weight. A tenant that comes back from idleness is
    lifted to the smallest counter of those that have work, so that it cannot save up. The budget
    is dealt slot by slot to the smallest counter with unmet demand (queued and in flight), which
    then rises by what a slot serves in an interval. What demand leaves over is shared evenly, by
    weight, as room for what will arrive. VTC dispatches single requests; here the same order
    decides over caps, as fast as they move. Assumes a known budget.
    """

    def __init__(self, config: FairShareConfig | None = None) -> None:
        self.config = config or FairShareConfig()
        self.name = "fair_share"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """All counters at zero.

        Raises:
            ValueError: weights for another number of tenants.
        """
        weights = self.config.weights
        if weights is not None and len(weights) != scenario.n_tenants:
            raise ValueError(
                f"weights: got {len(weights)} of them, expected one for each of "
                f"{scenario.n_tenants} tenants"
            )
        given = weights or [tenant.drop_weight for tenant in scenario.tenants]
        self._weights = np.maximum(np.array(given, np.float64), 1e-9)
        self._budget = min(self.config.budget or pool_size(scenario), scenario.total_cap)
        self._counters = np.zeros(scenario.n_tenants)
        self._served = np.zeros(scenario.n_tenants)
        self._slot_intervals = np.zeros(scenario.n_tenants)
        self._active = np.zeros(scenario.n_tenants, np.bool_)

    @property
    def counters(self) -> npt.NDArray[np.float64]:
        """(n_tenants,) service received over weight, lifts included."""
        return self._counters.copy()

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Count the service, then deal the budget."""
        config, control, tenants = self.config, self._scenario.control, telemetry.tenants
        service = config.prompt_token_price * reading(tenants["prompt_tokens"])
        service += config.output_token_price * reading(tenants["output_tokens"])
        self._served += service
        self._slot_intervals += reading(tenants["mean_in_flight"])
        demand = reading(tenants["queued"]) + reading(tenants["in_flight"])
        active = demand > 0
        back = active & ~self._active
        if (active & self._active).any():
            least = self._counters[active & self._active].min()
            self._counters[back] = np.maximum(self._counters[back], least)
        self._active = active
        self._counters += service / self._weights

        # The floor is everyone's, whatever the counters say.
        shares = np.full(caps.size, control.cap_min)
        demand = np.minimum(demand, control.cap_max)
        per_slot = self._served / np.maximum(self._slot_intervals, 1e-9)
        known = self._slot_intervals > 0
        typical = self._served.sum() / max(float(self._slot_intervals.sum()), 1e-9)
        cost = np.where(known, per_slot, typical) / self._weights
        left = self._budget - int(shares.sum())
        order = [(float(self._counters[i]), i) for i in range(caps.size) if demand[i] > shares[i]]
        heapq.heapify(order)
        while left > 0 and order:
            counter, i = heapq.heappop(order)
            shares[i] += 1
            left -= 1
            if demand[i] > shares[i]:
                heapq.heappush(order, (counter + max(float(cost[i]), 1e-9), i))
        return shares + fill(control.cap_max - shares, self._weights, max(left, 0))
