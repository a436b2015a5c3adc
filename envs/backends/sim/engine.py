"""The engine fidelity: vLLM's continuous batching at token level, for any number of clusters.

What happens, and in which order, is written in `engine_kernel.py`; the time of a step in
`step_time.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.sim import engine_kernel as kernel
from vllm_tenant_tuning.backends.sim.clusters import SimulatedClusters, unavailable
from vllm_tenant_tuning.backends.sim.step_time import step_tables
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE
from vllm_tenant_tuning.workload import RequestStream


class EngineBackend(SimulatedClusters):
    """`n_clusters` independent vLLM servers of the engine fidelity (a `Backend`).

    Args:
        scenario: the task, with an engine section of fidelity "engine".
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
        assert isinstance(engine, ContinuousBatchingEngine)
        profile, limits = engine.profile, engine.scheduler
        n_window = round(control.window_s / control.control_interval_s)

        row = np.zeros(1, kernel.ENGINE_PARAMETERS)
        row["interval_ps"] = _picoseconds(control.control_interval_s)
        row["window_ps"] = row["interval_ps"] * n_window
        row["max_num_seqs"] = limits.max_num_seqs
        row["max_num_batched_tokens"] = limits.max_num_batched_tokens
        row["max_model_len"] = limits.max_model_len
        row["num_gpu_blocks"] = engine.num_gpu_blocks
        row["block_size"] = profile.kv_cache.block_size
        row["priority_scheduling"] = engine.scheduling_policy == "priority"
        row["reserve_full_isl"] = engine.scheduler_reserve_full_isl
        row["long_prefill_token_threshold"] = engine.long_prefill_token_threshold
        row["max_num_queued_reqs"] = engine.max_num_queued_reqs or kernel.NEVER
        row["request_ps"] = _picoseconds(profile.frontend.request_s)
        row["prompt_token_ps"] = _picoseconds(profile.frontend.prompt_token_s)
        row["delay_ps"] = _picoseconds(profile.frontend.delay_s)
        row["idle_w"] = profile.power.idle_w if profile.power else np.nan
        row["busy_w"] = profile.power.busy_w if profile.power else np.nan
        tables = step_tables(profile.step_time, limits.max_num_batched_tokens, limits.max_num_seqs)
        row["prefill_pair_fs"] = tables.prefill_pair_fs

        tenants = np.zeros(scenario.n_tenants, kernel.TENANT_PARAMETERS)
        for record, tenant in zip(tenants, scenario.tenants, strict=True):
            record["queue_limit"] = tenant.queue_limit or kernel.NEVER
            record["priority"] = tenant.priority
            record["slo_latency_ps"] = _picoseconds(tenant.slo_latency_p99_s)
            record["slo_ttft_ps"] = _picoseconds(tenant.slo_ttft_p99_s)
            record["slo_itl_ps"] = _picoseconds(tenant.slo_itl_p99_s)

        shape = (n_clusters, scenario.n_tenants)
        self._constants = (
            row,
            tables.dense_ps,
            tables.sequence_ps,
            tables.kv_ps,
            itl_edges_ps(),
            tenants,
        )
        self._cluster_state = np.zeros(n_clusters, kernel.CLUSTER_STATE)
        self._tenant_state = np.zeros(shape, kernel.TENANT_STATE)
        self._running = np.zeros((n_clusters, limits.max_num_seqs), kernel.RUNNING)
        self._prefilling = np.zeros((n_clusters, limits.max_num_seqs), np.int32)
        self._heap = np.zeros((n_clusters, limits.max_num_seqs), kernel.FINISH)
        self._residues = np.zeros((n_clusters, profile.kv_cache.block_size), np.int64)
        self._itl = np.zeros((n_clusters, n_window, scenario.n_tenants, kernel.ITL_BINS), np.int64)
        self._itl_window = np.zeros((*shape, kernel.ITL_BINS), np.int64)
        self._itl_range = np.zeros((n_clusters, n_window, 2), np.int64)
        self._requests = np.zeros((n_clusters, 0), kernel.REQUEST)
        self._logs = np.zeros((n_clusters, 0), kernel.LOG)
        self._start_cluster = unavailable(CLUSTER_DTYPE, "latency_")
        self._start_cluster["gpu_memory_utilization"] = profile.gpu_memory_utilization
        self._allocate_requests(0)

    @property
    def bytes_per_cluster(self) -> int:
        """Memory that a cluster takes, with room for the longest episode so far."""
        return sum(int(array.nbytes) for array in self._arrays) // self.n_clusters

    def reset(self, cluster: int, stream: RequestStream, caps: npt.NDArray[np.int64]) -> None:
        """Start an episode on one cluster, empty, and observe it at time 0."""
        n = len(stream)
        if n > self._requests.shape[1]:
            self._allocate_requests(n + n // 4)
        requests = self._requests[cluster, :n]
        requests["arrival_ps"] = np.rint(stream.arrival_s * kernel.PS)
        for name in ("sent_ps", "ready_ps", "scheduled_ps", "first_token_ps", "finished_ps"):
            requests[name] = -1
        requests["prompt"] = stream.prompt_tokens
        requests["output"] = stream.output_tokens
        requests["generated"] = 0
        requests["preemptions"] = 0
        requests["tenant"] = stream.tenant
        requests["outcome"] = Outcome.PENDING
        # tenant by tenant as they are, a stable sort puts the lower tenant first
        self._logs[cluster, :n]["arrival"] = np.argsort(requests["arrival_ps"], kind="stable")

        self._cluster_state[cluster] = 0
        self._cluster_state[cluster]["n_requests"] = n
        self._tenant_state[cluster] = 0
        self._tenant_state[cluster]["first_request"] = stream.offsets[:-1]
        self._tenant_state[cluster]["n_requests"] = np.diff(stream.offsets)
        self._tenant_state[cluster]["patience_ps"] = [
            _picoseconds(patience_s) for patience_s in stream.patience_under(self._scenario)
        ]
        self._tenant_state[cluster]["cap"] = caps
        self.telemetry_tenants[cluster] = _START_TENANT
        self.telemetry_tenants[cluster]["cap"] = caps
        self.telemetry_cluster[cluster] = self._start_cluster
        kernel.start(cluster, self._arrays)

    def outcomes(self, cluster: int) -> RequestOutcomes:
        """What has become of every request of the cluster's episode so far."""
        n = int(self._cluster_state[cluster]["n_requests"])
        requests = self._requests[cluster, :n]
        return RequestOutcomes(
            tenant=requests["tenant"].astype(np.int64),
            prompt_tokens=requests["prompt"].astype(np.int64),
            output_tokens=requests["output"].astype(np.int64),
            outcome=requests["outcome"].astype(np.int8),
            arrival_s=requests["arrival_ps"] / kernel.PS,
            admitted_s=_seconds(requests["sent_ps"]),
            scheduled_s=_seconds(requests["scheduled_ps"]),
            first_token_s=_seconds(requests["first_token_ps"]),
            finished_s=_seconds(requests["finished_ps"]),
            preemptions=requests["preemptions"].astype(np.int64),
        )

    def _advance(
        self, first: int, last: int, caps: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]
    ) -> None:
        kernel.advance(first, last, active, caps, self._arrays)

    def _allocate_requests(self, capacity: int) -> None:
        """Make room for `capacity` requests in every cluster, keeping what is there."""
        before = self._requests.shape[1]
        for name in ("_requests", "_logs"):
            old = getattr(self, name)
            grown = np.zeros((self.n_clusters, capacity), old.dtype)
            grown[:, :before] = old
            setattr(self, name, grown)
        self._arrays = kernel.Arrays(
            *self._constants,
            self._cluster_state,
            self._tenant_state,
            self._requests,
            self._logs,
            self._running,
            self._prefilling,
            self._heap,
            self._residues,
            self._itl,
            self._itl_window,
            self._itl_range,
            self.telemetry_tenants,
            self.telemetry_cluster,
        )


def itl_edges_ps() -> npt.NDArray[np.int64]:
    """(ITL_BINS + 1,) edges of the histogram of inter-token latencies, 0.1 ms to 105 s."""
    octaves = np.arange(kernel.ITL_BINS + 1) / kernel.ITL_BINS_PER_OCTAVE
    return np.rint(kernel.ITL_FIRST_EDGE_PS * 2.0**octaves).astype(np.int64)


def _picoseconds(duration_s: float | None) -> int:
    # what is beyond the longest episode never comes; more would not fit the clock either
    return kernel.NEVER if duration_s is None else min(round(duration_s * kernel.PS), kernel.NEVER)


def _seconds(times_ps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.where(times_ps < 0, np.nan, times_ps / kernel.PS)


_START_TENANT = unavailable(TENANT_DTYPE, "latency_", "ttft_", "itl_")
