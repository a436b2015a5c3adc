"""The control loop of one or many clusters: what the scalar and the vector environment share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends import make_backend
from vllm_tenant_tuning.reward import REWARD_TERMS, RewardFunction
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.spaces import ActionDecoder, ObservationLayout
from vllm_tenant_tuning.telemetry import Telemetry
from vllm_tenant_tuning.workload import Workload


class ControlLoop:
    """Scenario, workload and backend behind arrays that `reset` and `step` overwrite.

    Args:
        scenario: a packaged scenario's name, a path, or a `Scenario`.
        backend: the backend's name.
        n_clusters: number of clusters N.
        trace_dir: the folder of the trace files (see `Workload`).
        backend_options: keyword arguments of the backend.

    Attributes:
        telemetry: of all clusters, (N, ...), overwritten like the rest.
        observations: (N, D) float32.
        rewards: (N,) float64; reward_terms: (N, 4) float64.
        caps: (N, n_tenants) int64, in force from the last decision on.
        clipped: (N, n_tenants) int64, what bounds cut off the last decision.
        time_s: (N,) float64, since the start of the episode.
        drawn: what a family drew for each cluster's episode, values by tenant and parameter.
        end_s: when an episode ends, less a hair for the rounding of `time_s`.

    Raises:
        ScenarioError, TraceError, ValueError: a scenario, trace or option that is refused.
    """

    def __init__(
        self,
        scenario: str | Path | Scenario,
        backend: str,
        n_clusters: int,
        trace_dir: str | Path | None,
        backend_options: dict[str, Any],
    ) -> None:
        self.scenario = load_scenario(scenario)
        self.workload = Workload(self.scenario, trace_dir)
        self.backend = make_backend(backend, self.scenario, n_clusters, **backend_options)
        self.layout = ObservationLayout(self.scenario, self.workload)
        self.decoder = ActionDecoder(self.scenario)
        self._reward = RewardFunction(self.scenario, self.workload)
        self.n_clusters = n_clusters

        shape = (n_clusters, self.scenario.n_tenants)
        self._view_telemetry()
        self.drawn: list[Mapping[str, Mapping[str, float]]] = [{}] * n_clusters
        control = self.scenario.control
        self.end_s = control.episode_s - control.control_interval_s / 2
        self.observations = np.zeros((n_clusters, len(self.layout.names)), np.float32)
        self.rewards = np.zeros(n_clusters)
        self.reward_terms = np.zeros((n_clusters, len(REWARD_TERMS)))
        self.caps = np.zeros(shape, np.int64)
        self.clipped = np.zeros(shape, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        # a copied view is an array of its own, that the copied backend would never fill
        return {name: value for name, value in vars(self).items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view_telemetry()

    def caps_of(self, options: dict[str, Any] | None) -> npt.NDArray[np.int64]:
        """The caps to start with, (N, n_tenants) int64.

        Args:
            options: `caps`, one for each tenant or (N, n_tenants); without it the scenario's.

        Raises:
            ValueError: an unknown option, or caps that are out of bounds.
        """
        options = options or {}
        unknown = sorted(set(options) - {"caps"})
        if unknown:
            raise ValueError(f"options: unknown key '{unknown[0]}'; accepted is 'caps'")
        asked = options.get("caps")
        if asked is None:
            return np.broadcast_to(np.array(self.scenario.caps_initial), self.caps.shape)
        caps = np.asarray(asked)
        n_tenants = self.scenario.n_tenants
        if caps.dtype.kind not in "iu" or caps.shape not in ((n_tenants,), self.caps.shape):
            raise ValueError(
                f"options caps: got {asked!r}; accepted is one whole number for each of "
                f"{n_tenants} tenants"
            )
        for row in np.atleast_2d(caps).tolist():
            self.scenario.check_caps(row)
        return np.broadcast_to(caps, self.caps.shape).astype(np.int64)

    def start(self, cluster: int, rng: np.random.Generator, caps: npt.NDArray[np.int64]) -> None:
        """Begin an episode on one cluster; call `observe` after the last of them.

        Args:
            cluster: its index.
            rng: draws the episode's requests.
            caps: (n_tenants,) int64.
        """
        stream = self.workload.sample(rng)
        self.backend.reset(cluster, stream, caps)
        self.drawn[cluster] = stream.drawn
        self.caps[cluster] = caps
        self.clipped[cluster] = 0
        self.rewards[cluster] = 0.0
        self.reward_terms[cluster] = 0.0

    def observe(self) -> None:
        """Encode the observations of all clusters."""
        telemetry = self.telemetry
        self.layout.encode(telemetry.tenant_values, telemetry.cluster_values, self.observations)

    def step(self, action: Any, active: npt.NDArray[np.bool_]) -> None:
        """Apply an action to the active clusters and run them for one control interval.

        Args:
            action: (N, n_tenants) integers.
            active: (N,) bool; the others stand still, their rewards are those of before.

        Raises:
            ActionError: an action that is refused; nothing has run then.
        """
        self.decoder.apply(action, self.caps, self.clipped, active)
        self.backend.advance(self.caps, active)
        self._reward(self._tenants, self._cluster, self.reward_terms, self.rewards)
        self.observe()

    def _view_telemetry(self) -> None:
        self._tenants = self.backend.telemetry_tenants
        self._cluster = self.backend.telemetry_cluster
        self.telemetry = Telemetry(
            self._tenants.view(np.float64).reshape(*self._tenants.shape, -1),
            self._cluster.view(np.float64).reshape(self.n_clusters, -1),
        )
        self.time_s: npt.NDArray[np.float64] = self._cluster["time_s"]


_VIEWS = frozenset({"_tenants", "_cluster", "telemetry", "time_s"})
