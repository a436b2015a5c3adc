"""Kueue-style quotas: a nominal share of the pool each, lent out while it is not used.

Source: Kueue's ClusterQueue (kueue.sigs.k8s.io, concepts: `nominalQuota`, `borrowingLimit`,
cohorts, fair sharing's `weight`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers, fill
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class QuotaConfig:
    """Parameters of `QuotaPolicy`."""

    borrowing: bool = False
    """Whether unused nominal quota is lent (one cohort), or every tenant keeps to its own."""

    weights: tuple[float, ...] | None = None
    """The tenants' shares of the pool, of the nominal quota and of what is borrowed; None: their
    drop weights."""


class QuotaPolicy(CapPolicy):
    """Nominal quotas in proportion to weights; with borrowing, the unused part follows demand.

    The pool is `total_cap` where the scenario has one, else the sequences that the engine runs at
    once. Demand is what a tenant has queued and in flight. A lender takes its quota back as soon
    as it needs it (Kueue's `reclaimWithinCohort: Any`), as fast as caps move. Assumes that the
    pool is what is scarce: an engine that slows down before it is full goes unnoticed.

    Attributes:
        nominal: (n_tenants,) int64, the nominal quotas, known from `reset` on.
    """

    def __init__(self, config: QuotaConfig | None = None) -> None:
        self.config = config or QuotaConfig()
        self.name = "quotas:borrowing" if self.config.borrowing else "quotas"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Divide the pool.

        Raises:
            ValueError: weights for another number of tenants.
        """
        weights = self.config.weights
        if weights is not None and len(weights) != scenario.n_tenants:
            raise ValueError(
                f"weights: got {len(weights)} of them, expected one for each of "
                f"{scenario.n_tenants} tenants"
            )
        self._weights = np.array(weights or [tenant.drop_weight for tenant in scenario.tenants])
        control = scenario.control
        self._pool = pool_size(scenario)
        # The floor of every cap is taken off first: it cannot be lent.
        spare = self._pool - control.cap_min * scenario.n_tenants
        most = np.full(scenario.n_tenants, control.cap_max - control.cap_min)
        self.nominal = control.cap_min + fill(most, self._weights, max(spare, 0))

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """The nominal quotas, or what demand makes of them."""
        if not self.config.borrowing:
            return self.nominal
        control = self._scenario.control
        tenants = telemetry.tenants
        demand = reading(tenants["queued"]) + reading(tenants["in_flight"])
        demand = np.clip(demand, control.cap_min, control.cap_max).astype(np.int64)
        own = np.minimum(demand, self.nominal)
        borrowed = fill(demand - own, self._weights, max(self._pool - int(own.sum()), 0))
        # What nobody needs goes back to its owner.
        unused = max(self._pool - int((own + borrowed).sum()), 0)
        return own + borrowed + fill(self.nominal - own, self._weights, unused)


def pool_size(scenario: Scenario) -> int:
    """Requests that the tenants may have in flight together.

    `total_cap` where the scenario has one, else the sequences that the engine runs at once, and
    never more than the caps can reach.
    """
    if scenario.control.total_cap is not None:
        return scenario.total_cap
    return min(scenario.total_cap, scenario.max_num_seqs)
