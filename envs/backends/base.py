"""The Backend protocol: the one thing that the environments know of simulation or HTTP."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import RequestStream

BACKENDS = ("sim", "live")


class BackendError(RuntimeError):
    """What a backend stands on is not there: no episode can begin until it is."""


class Outcome(enum.IntEnum):
    """What has become of a request."""

    PENDING = 0  # not arrived yet
    QUEUED = 1
    IN_FLIGHT = 2
    COMPLETED = 3
    DROPPED = 4
    FAILED = 5


@dataclass(frozen=True, eq=False)
class RequestOutcomes:
    """What has become of every request of an episode, in the order of its `RequestStream`.

    Attributes:
        tenant: (R,) int64, whose request it is.
        prompt_tokens, output_tokens: (R,) int64, what it asks for (output tokens of a request
            that a live server completed: what it generated, by its own usage).
        outcome: (R,) int8, values of `Outcome`.
        arrival_s: (R,) float64, when the gate saw the request (a simulator with a clock
            stamps arrivals on its ticks).
        admitted_s: (R,) float64, when it was sent; NaN before.
        scheduled_s: (R,) float64, when the engine first scheduled it; NaN before, or where the
            backend cannot tell.
        first_token_s: (R,) float64, when its first token came; NaN before, or where the
            backend has no tokens.
        finished_s: (R,) float64, when it completed, was dropped or failed; NaN before.
        preemptions: (R,) int64, how often the engine took its KV cache away.
    """

    tenant: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    outcome: npt.NDArray[np.int8]
    arrival_s: npt.NDArray[np.float64]
    admitted_s: npt.NDArray[np.float64]
    scheduled_s: npt.NDArray[np.float64]
    first_token_s: npt.NDArray[np.float64]
    finished_s: npt.NDArray[np.float64]
    preemptions: npt.NDArray[np.int64]

    @property
    def latency_s(self) -> npt.NDArray[np.float64]:
        """(R,) float64, arrival at the gate to the last token; NaN unless completed."""
        return np.where(self.outcome == Outcome.COMPLETED, self.finished_s - self.arrival_s, np.nan)

    @property
    def ttft_s(self) -> npt.NDArray[np.float64]:
        """(R,) float64, arrival at the gate to the first token; NaN without one."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> npt.NDArray[np.float64]:
        """(R,) float64, mean inter-token latency; NaN unless completed with two tokens or more."""
        decoded = np.where(self.output_tokens > 1, self.output_tokens - 1.0, np.nan)
        completed = self.outcome == Outcome.COMPLETED
        return np.where(completed, (self.finished_s - self.first_token_s) / decoded, np.nan)


class Backend(Protocol):
    """One or more clusters that play request streams, a control interval at a time.

    A simulation may hold any number of clusters; a live server is one. `telemetry_tenants`
    and `telemetry_cluster` are overwritten in place by `reset` and `advance`.

    Attributes:
        n_clusters: number of clusters.
        telemetry_tenants: structured (n_clusters, n_tenants) of `telemetry.TENANT_DTYPE`.
        telemetry_cluster: structured (n_clusters,) of `telemetry.CLUSTER_DTYPE`.
    """

    n_clusters: int
    telemetry_tenants: npt.NDArray[np.void]
    telemetry_cluster: npt.NDArray[np.void]

    def reset(self, cluster: int, stream: RequestStream, caps: npt.NDArray[np.int64]) -> None:
        """Start an episode on one cluster, empty, and observe it at time 0."""

    def advance(self, caps: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]) -> None:
        """Run one control interval under the given caps.

        Args:
            caps: (n_clusters, n_tenants) int64.
            active: (n_clusters,) bool; the other clusters stand still.
        """

    def faults(self) -> dict[int, str]:
        """The clusters whose episode cannot go on (a dead server), each with the reason."""

    def outcomes(self, cluster: int) -> RequestOutcomes:
        """What has become of every request of the cluster's episode so far."""

    def extra_info(self, cluster: int) -> dict[str, Any]:
        """What only this backend can tell of its last interval, for the environment's `info`."""

    def close(self) -> None:
        """Release what the backend holds; further calls are an error."""


def make_backend(name: str, scenario: Scenario, n_clusters: int = 1, **options: Any) -> Backend:
    """Build the backend of that name for the scenario.

    Args:
        name: one of `BACKENDS`.
        scenario: the task; its engine section chooses the simulator's fidelity.
        n_clusters: how many clusters to hold.
        options: keyword arguments of the backend (sim: `n_threads`; live:
            `backends.live.options.LiveOptions`).

    Raises:
        ValueError: an unknown name, or options that are refused.
        ModuleNotFoundError: the backend's packages are not installed.
    """
    if name == "sim":
        from vllm_tenant_tuning.backends.sim.engine import EngineBackend
        from vllm_tenant_tuning.backends.sim.slots import SlotsBackend

        unknown = sorted(set(options) - {"n_threads"})
        if unknown:
            raise ValueError(f"{unknown[0]}: the sim backend has no such option, only n_threads")
        if scenario.engine.fidelity == "slots":
            return SlotsBackend(scenario, n_clusters, **options)
        return EngineBackend(scenario, n_clusters, **options)
    if name == "live":
        from vllm_tenant_tuning.backends.live.backend import LiveBackend

        return LiveBackend(scenario, n_clusters, **options)
    raise ValueError(f"backend: got {name!r}; accepted are {', '.join(BACKENDS)}")
