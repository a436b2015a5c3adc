"""The study's threshold rules: two signals, for all tenants together or for each alone.

The study compared a coupled rule on the window's p99 (`naive`) with a per-tenant rule on the
backlog (`differentiated`), which changes two things at once; the other two cells of the 2x2
separate them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.policy import as_action, first_that_holds
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

Scope = Literal["coupled", "per_tenant"]


@dataclass(frozen=True)
class WindowP99Thresholds:
    """When the window's p99 and the occupancy ask for a change.

    Throttle by one above `throttle_p99_s` or from `throttle_occupancy` on; else expand by one
    below `expand_p99_s` and `expand_occupancy` while something is queued.
    """

    throttle_p99_s: float = 6.0
    expand_p99_s: float = 3.0
    throttle_occupancy: float = 0.95
    expand_occupancy: float = 0.80


@dataclass(frozen=True)
class BacklogThresholds:
    """When the backlog (queued requests over the cap) asks for a change.

    Expand by one above `expand_above`, reclaim one at or below `reclaim_at_or_below`.
    """

    expand_above: float = 1.5
    reclaim_at_or_below: float = 0.5


class WindowP99Policy:
    """Throttles on a high p99 of the sliding window or a full pool, expands when both are low.

    Coupled, it reads the p99 over all tenants' completions and moves all caps together: the
    study's naive rule. Per tenant, each cap follows its own tenant's p99 and queue; the
    occupancy is the pool's in both. Without completions in the window the p99 counts as 0.

    Args:
        scope: "coupled" or "per_tenant".
        thresholds: see `WindowP99Thresholds`.
        name: how tables call it; by default `naive` or `per_tenant_window_p99`.
    """

    def __init__(
        self,
        scope: Scope = "coupled",
        thresholds: WindowP99Thresholds | None = None,
        name: str | None = None,
    ) -> None:
        self.scope = scope
        self.thresholds = thresholds or WindowP99Thresholds()
        self.name = name or ("naive" if scope == "coupled" else "per_tenant_window_p99")

    def initial_caps(self, scenario: Scenario) -> None:
        """The scenario's."""
        return None

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Read the size of the pool."""
        self._scenario = scenario
        self._max_num_seqs = scenario.max_num_seqs

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        """Compare p99, occupancy and queue with the thresholds."""
        telemetry: Telemetry = info["telemetry"]
        tenants, cluster = telemetry.tenants, telemetry.cluster
        limits = self.thresholds
        occupancy = tenants["in_flight"].sum() / self._max_num_seqs
        if self.scope == "coupled":
            p99_s = np.where(cluster["window_completions"] > 0, cluster["latency_p99_s"], 0.0)
            queued = np.asarray(tenants["queued"].sum())
        else:
            p99_s = np.where(tenants["window_completions"] > 0, tenants["latency_p99_s"], 0.0)
            queued = tenants["queued"]
        slow = p99_s > limits.throttle_p99_s
        throttle = slow | (occupancy >= limits.throttle_occupancy)
        expand = (
            (p99_s < limits.expand_p99_s)
            & (occupancy < limits.expand_occupancy)
            & (queued > 0)
            & ~throttle
        )
        self._told = (slow, throttle, expand)
        delta = expand.astype(np.int64) - throttle.astype(np.int64)
        return as_action(np.broadcast_to(delta, tenants.shape), self._scenario)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Which threshold was crossed."""
        limits = self.thresholds
        slow, throttle, expand = self._told
        return first_that_holds(
            self._scenario.n_tenants,
            (slow, f"window p99 above {limits.throttle_p99_s:g} s"),
            (throttle, f"occupancy at least {limits.throttle_occupancy:g}"),
            (expand, f"queued, p99 below {limits.expand_p99_s:g} s"),
        )


class BacklogPolicy:
    """Expands where the backlog is long against the cap, reclaims where it is short.

    Per tenant it is the study's differentiated rule; coupled, all caps follow the backlog of
    all tenants over the sum of the caps.

    Args:
        scope: "coupled" or "per_tenant".
        thresholds: see `BacklogThresholds`.
        name: how tables call it; by default `differentiated` or `coupled_backlog`.
    """

    def __init__(
        self,
        scope: Scope = "per_tenant",
        thresholds: BacklogThresholds | None = None,
        name: str | None = None,
    ) -> None:
        self.scope = scope
        self.thresholds = thresholds or BacklogThresholds()
        self.name = name or ("differentiated" if scope == "per_tenant" else "coupled_backlog")

    def initial_caps(self, scenario: Scenario) -> None:
        """The scenario's."""
        return None

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Keep the scenario for its bounds."""
        self._scenario = scenario

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        """Compare the backlog with the thresholds."""
        telemetry: Telemetry = info["telemetry"]
        queued, caps = telemetry.tenants["queued"], info["caps"]
        if self.scope == "coupled":
            queued, caps = queued.sum(), caps.sum()
        # A cap of 0 with a queue is an infinite backlog, without one an empty backlog.
        backlog = queued / np.maximum(caps, 1e-9)
        expand = backlog > self.thresholds.expand_above
        reclaim = backlog <= self.thresholds.reclaim_at_or_below
        self._told = (expand, reclaim)
        delta = np.asarray(expand, np.int64) - np.asarray(reclaim, np.int64)
        return as_action(np.broadcast_to(delta, telemetry.tenants.shape), self._scenario)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Which threshold was crossed."""
        expand, reclaim = self._told
        return first_that_holds(
            self._scenario.n_tenants,
            (expand, f"backlog above {self.thresholds.expand_above:g} times the cap"),
            (reclaim, f"backlog at most {self.thresholds.reclaim_at_or_below:g} times the cap"),
        )
