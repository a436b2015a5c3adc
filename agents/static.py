"""Caps that never change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.policy import as_action
from vllm_tenant_tuning.scenario import Scenario


class StaticPolicy:
    """Starts with the given caps and keeps them.

    Args:
        caps: one cap per tenant; None for the scenario's initial ones.
        name: how tables call it; by default `static`, with the caps where they are given.
    """

    def __init__(self, caps: Sequence[int] | None = None, name: str | None = None) -> None:
        self.caps = None if caps is None else tuple(caps)
        self.name = name or ("static" if caps is None else f"static:{'/'.join(map(str, caps))}")

    def initial_caps(self, scenario: Scenario) -> Sequence[int] | None:
        """The caps, checked against the scenario's bounds.

        Raises:
            ValueError: caps that the scenario does not accept.
        """
        if self.caps is not None:
            scenario.check_caps(self.caps)
        return self.caps

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Prepare the action that changes nothing."""
        self._hold = as_action(np.zeros(scenario.n_tenants), scenario)

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        """Hold every cap."""
        return self._hold
