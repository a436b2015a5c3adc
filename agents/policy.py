"""The one protocol of everything that sets caps: rules, trained models and LLM agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import Scenario


class Policy(Protocol):
    """Decides, once in a control interval, how each tenant's cap changes.

    Attributes:
        name: how tables and records call it.
    """

    name: str

    def initial_caps(self, scenario: Scenario) -> Sequence[int] | None:
        """The caps to start an episode with; None for the scenario's."""

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Forget the last episode.

        Args:
            scenario: the task of the episode that begins.
            seed: for a policy that draws random numbers.
        """

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        """Choose an action of the environment's space.

        Args:
            observation: (D,) float32.
            info: what `reset` or `step` gave beside it: `telemetry`, `caps`, `clipped`.

        Returns:
            (n_tenants,) int64, 0 to `2 * max_delta`; `max_delta` holds the cap.
        """


@runtime_checkable
class ExplainedPolicy(Policy, Protocol):
    """A policy that tells why it moves the caps."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Of the last action, a phrase a tenant; empty where there is nothing to tell."""


def first_that_holds(n_tenants: int, *cases: tuple[npt.ArrayLike, str]) -> tuple[str, ...]:
    """For each tenant the phrase of the first case that holds, or nothing.

    Args:
        n_tenants: how many.
        cases: (n_tenants,) or one for all, and the phrase.
    """
    masks = [np.broadcast_to(np.asarray(mask, np.bool_), n_tenants) for mask, _ in cases]
    phrases = [phrase for _, phrase in cases]
    return tuple(
        next((phrase for mask, phrase in zip(masks, phrases, strict=True) if mask[i]), "")
        for i in range(n_tenants)
    )


@runtime_checkable
class TranscribedPolicy(Policy, Protocol):
    """A policy whose decisions come from elsewhere, cost time and money, and are kept."""

    def record_to(self, folder: str | Path) -> None:
        """Keep the transcripts of the episodes to come in a folder."""

    def replay_from(self, folder: str | Path) -> None:
        """Take the decisions from such a folder."""

    def run_in_real_time(self) -> None:
        """Let decisions take effect by the wall clock."""

    def decision_summary(self) -> dict[str, Any]:
        """What the last episode's decisions came to: the fields of a `DecisionRecord`."""

    def close(self) -> None:
        """Release connections and files."""


def as_action(deltas: Any, scenario: Scenario) -> npt.NDArray[np.int64]:
    """The action that changes the caps by `deltas`, each cut to `max_delta` either way.

    Args:
        deltas: (n_tenants,) whole numbers.
        scenario: gives `max_delta`.
    """
    max_delta = scenario.control.max_delta
    bounded = np.clip(np.asarray(deltas, np.int64), -max_delta, max_delta)
    action: npt.NDArray[np.int64] = bounded + max_delta
    return action
