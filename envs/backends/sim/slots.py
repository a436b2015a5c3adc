"""The slots fidelity: the study's queue, for any number of tenants and clusters at once.

Every tenant has a gate with a FIFO queue, a cap and a patience; all tenants share
`max_num_seqs` slots, and a request holds one until its service demand is served. What happens
in a tick, and in which order, is written in `slots_kernel.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.sim import slots_kernel as kernel
from vllm_tenant_tuning.backends.sim.clusters import SimulatedClusters, unavailable
from vllm_tenant_tuning.engine import SlotsEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE
from vllm_tenant_tuning.workload import RequestStream

NEVER_TICKS = np.iinfo(np.int32).max


class SlotsBackend(SimulatedClusters):
    """`n_clusters` independent clusters of the slots fidelity (a `Backend`).

    Args:
        scenario: the task.
        n_clusters: number of clusters, at least 1.
        n_threads: threads that share the clusters (none: one for each core). The result does
            not depend on it.

    Raises:
        ValueError: `n_clusters` or `n_threads` below 1.
    """

    def __init__(
        self, scenario: Scenario, n_clusters: int = 1, n_threads: int | None = None
    ) -> None:
        super().__init__(scenario, n_clusters, n_threads)
        engine, control = scenario.engine, scenario.control
        assert isinstance(engine, SlotsEngine)
        n_tenants = scenario.n_tenants
        self._tick_s = engine.tick_s
        window_ticks = round(control.window_s / engine.tick_s)

        self._parameters = np.zeros(1, kernel.ENGINE_PARAMETERS)
        self._parameters["tick_s"] = engine.tick_s
        self._parameters["max_num_seqs"] = engine.max_num_seqs
        self._parameters["ticks_per_interval"] = round(control.control_interval_s / engine.tick_s)
        self._parameters["window_ticks"] = window_ticks
        self._parameters["inter_token_latency_s"] = engine.inter_token_latency_s
        segments = engine.knee.segments if engine.knee else ()
        self._knee_segments = np.zeros(len(segments), kernel.KNEE_SEGMENT)
        self._knee_segments["until_s"] = np.cumsum([segment.duration_s for segment in segments])
        self._knee_segments["knee"] = [segment.knee for segment in segments]
        if engine.knee:
            self._parameters["slowdown"] = engine.knee.slowdown
            self._parameters["knee_period_s"] = self._knee_segments["until_s"][-1]

        self._tenant_parameters = np.zeros(n_tenants, kernel.TENANT_PARAMETERS)
        for row, tenant in zip(self._tenant_parameters, scenario.tenants, strict=True):
            row["queue_limit"] = NEVER_TICKS if tenant.queue_limit is None else tenant.queue_limit
            row["slo_ticks"] = self._whole_ticks(tenant.slo_latency_p99_s)

        shape = (n_clusters, n_tenants)
        self._cluster_state = np.zeros(n_clusters, kernel.CLUSTER_STATE)
        self._tenant_state = np.zeros(shape, kernel.TENANT_STATE)
        self._running = np.zeros((n_clusters, engine.max_num_seqs), kernel.RUNNING)
        self._itl_history = np.full((*shape, window_ticks if engine.knee else 0), np.nan)
        self._requests = np.zeros((n_clusters, 0), kernel.REQUEST)
        self._logs = np.zeros((n_clusters, 0), kernel.LOG)
        self._allocate_requests(0)

    def reset(self, cluster: int, stream: RequestStream, caps: npt.NDArray[np.int64]) -> None:
        """Start an episode on one cluster, empty, and observe it at time 0."""
        n = len(stream)
        if n > self._requests.shape[1]:
            self._allocate_requests(n + n // 4)
        self._tenant_state[cluster]["first_request"] = stream.offsets[:-1]
        self._tenant_state[cluster]["n_requests"] = np.diff(stream.offsets)
        self._tenant_state[cluster]["patience_ticks"] = [
            self._whole_ticks(patience_s) for patience_s in stream.patience_under(self._scenario)
        ]
        requests = self._requests[cluster, :n]
        requests["service_s"] = stream.service_s
        # An arrival on a tick's boundary belongs to that tick, whatever its last bit says.
        requests["arrival_tick"] = np.ceil(stream.arrival_s / self._tick_s - 1e-9)
        requests["admitted_tick"] = -1
        requests["finished_tick"] = -1
        requests["prompt_tokens"] = stream.prompt_tokens
        requests["output_tokens"] = stream.output_tokens
        requests["outcome"] = Outcome.PENDING

        self.telemetry_tenants[cluster] = _START_TENANT
        self.telemetry_tenants[cluster]["cap"] = caps
        self.telemetry_cluster[cluster] = _START_CLUSTER
        kernel.start(cluster, *self._arrays)

    def outcomes(self, cluster: int) -> RequestOutcomes:
        """What has become of every request of the cluster's episode so far."""
        n_requests = self._tenant_state[cluster]["n_requests"]
        n = int(n_requests.sum())
        requests = self._requests[cluster, :n]
        return RequestOutcomes(
            tenant=np.repeat(np.arange(n_requests.size), n_requests),
            prompt_tokens=requests["prompt_tokens"].astype(np.int64),
            output_tokens=requests["output_tokens"].astype(np.int64),
            outcome=requests["outcome"].astype(np.int8),
            arrival_s=requests["arrival_tick"] * self._tick_s,
            admitted_s=self._seconds(requests["admitted_tick"]),
            scheduled_s=np.full(n, np.nan),
            first_token_s=np.full(n, np.nan),
            finished_s=self._seconds(requests["finished_tick"]),
            preemptions=np.zeros(n, np.int64),
        )

    def _advance(
        self, first: int, last: int, caps: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]
    ) -> None:
        kernel.advance(first, last, active, caps, *self._arrays)

    def _allocate_requests(self, capacity: int) -> None:
        """Make room for `capacity` requests in every cluster, keeping what is there."""
        before = self._requests.shape[1]
        for name in ("_requests", "_logs"):
            old = getattr(self, name)
            grown = np.zeros((self.n_clusters, capacity), old.dtype)
            grown[:, :before] = old
            setattr(self, name, grown)
        self._arrays = (
            self._parameters,
            self._tenant_parameters,
            self._knee_segments,
            self._cluster_state,
            self._tenant_state,
            self._requests,
            self._logs,
            self._running,
            self._itl_history,
            self.telemetry_tenants,
            self.telemetry_cluster,
        )

    def _whole_ticks(self, duration_s: float | None) -> int:
        if duration_s is None:
            return int(NEVER_TICKS)
        return min(int(duration_s / self._tick_s + 1e-9), int(NEVER_TICKS))

    def _seconds(self, ticks: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        return np.where(ticks < 0, np.nan, ticks * self._tick_s)


_START_TENANT = unavailable(TENANT_DTYPE, "latency_", "ttft_", "itl_")
_START_CLUSTER = unavailable(
    CLUSTER_DTYPE, "latency_", "gpu_memory_", "prompt_", "generation_", "energy_"
)
