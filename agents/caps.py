"""From the caps that a rule wants to an action: bounds, steps and the total, in one place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.policy import as_action
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class CapPolicy(ABC):
    """A rule that says in every interval which caps it wants; `move_caps` makes the action.

    Starts with the scenario's caps. A rule keeps what it remembers in attributes that `start`
    sets anew, so that nothing is carried from one episode to the next.

    Attributes:
        name: how tables call it.
    """

    name: str

    def initial_caps(self, scenario: Scenario) -> None:
        """The scenario's."""
        return None

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Forget the last episode; `seed` is of the rule's own random numbers, if it draws any."""
        self._scenario = scenario
        self.start(scenario, np.random.default_rng(seed))

    def act(self, observation: npt.NDArray[np.float32], info: dict[str, Any]) -> Integers:
        """Move the caps towards those that the rule wants, as far as the bounds allow."""
        caps = np.asarray(info["caps"], np.int64)
        return move_caps(caps, self.wanted_caps(info["telemetry"], caps), self._scenario)

    @abstractmethod
    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Set the memory of an episode.

        Args:
            scenario: the task.
            rng: seeded for the episode.
        """

    @abstractmethod
    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """The caps that the rule wants, whatever the bounds.

        Args:
            telemetry: of the last interval.
            caps: (n_tenants,) those in force.

        Returns:
            (n_tenants,) requests; fractions are cut off, NaN holds the cap.
        """


def move_caps(caps: Integers, wanted: npt.ArrayLike, scenario: Scenario) -> Integers:
    """The action that moves the caps towards `wanted` and loses nothing to a bound.

    Every cap moves by at most `max_delta` and stays in `[cap_min, cap_max]`. Under a `total_cap`
    all decreases come first, then the increases one by one, each to the tenant that is farthest
    below what it wants (the smallest cap, then the first, of equals).

    Args:
        caps: (n_tenants,) in force.
        wanted: (n_tenants,) requests; fractions are cut off, NaN holds the cap.
        scenario: gives the bounds.

    Returns:
        (n_tenants,) int64, an action of the environment's space.
    """
    control = scenario.control
    asked = np.asarray(wanted, np.float64)
    asked = np.where(np.isnan(asked), caps, np.clip(asked, control.cap_min, control.cap_max))
    delta = np.clip(np.floor(asked).astype(np.int64) - caps, -control.max_delta, control.max_delta)
    room = scenario.total_cap - int((caps + np.minimum(delta, 0)).sum())
    if np.maximum(delta, 0).sum() > room:
        granted = np.minimum(delta, 0)
        for _ in range(max(room, 0)):
            short = np.where(granted < delta, delta - granted, 0)
            neediest = np.lexsort((caps + granted, -short))[0]
            granted[neediest] += 1
        delta = granted
    return as_action(delta, scenario)


def fill(demand: npt.ArrayLike, weights: npt.ArrayLike, total: int) -> Integers:
    """Share `total` by weighted max-min fairness, in whole requests.

    The level rises for all in proportion to their weights; who has what it demands leaves the
    rest to the others (progressive filling; Bertsekas and Gallager, Data Networks, 6.5.2). What
    rounding leaves over goes, one each, to the largest fractions, the first of equals.

    Args:
        demand: (n,) whole numbers from 0 on.
        weights: (n,) from 0 on; who has none is served last.
        total: what there is, from 0 on.

    Returns:
        (n,) int64, at most `demand`, with the sum `min(total, sum of demand)`.
    """
    wanted = np.asarray(demand, np.float64)
    weight = np.maximum(np.asarray(weights, np.float64), 1e-9)
    if wanted.sum() <= total:
        return wanted.astype(np.int64)
    share = np.zeros(wanted.size)
    open_ = wanted > 0
    while True:
        left = total - share[~open_].sum()
        level = left / weight[open_].sum()
        full = open_ & (wanted <= level * weight)
        if not full.any():
            break
        share[full] = wanted[full]
        open_ &= ~full
    share[open_] = level * weight[open_]
    whole = np.floor(share + 1e-9).astype(np.int64)
    missing = total - int(whole.sum())
    for i in np.argsort(whole - share, kind="stable")[:missing]:
        whole[i] += 1
    return whole
