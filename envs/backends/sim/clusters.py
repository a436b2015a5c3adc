"""What all simulated fidelities share: clusters in one process, spread over threads."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE

MIN_CLUSTERS_PER_THREAD = 32
"""Below this many clusters a thread costs more than it saves."""


class SimulatedClusters:
    """`n_clusters` independent simulated clusters, the common part of a `Backend`.

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
        if n_clusters < 1:
            raise ValueError(f"n_clusters: got {n_clusters}; at least 1 is accepted")
        if n_threads is not None and n_threads < 1:
            raise ValueError(f"n_threads: got {n_threads}; at least 1 is accepted")
        self._scenario = scenario
        self.n_clusters = n_clusters
        self.telemetry_tenants = np.zeros((n_clusters, scenario.n_tenants), TENANT_DTYPE)
        self.telemetry_cluster = np.zeros(n_clusters, CLUSTER_DTYPE)
        n_threads = n_threads or os.cpu_count() or 1
        n_chunks = max(1, min(n_threads, n_clusters // MIN_CLUSTERS_PER_THREAD))
        bounds = np.linspace(0, n_clusters, n_chunks + 1).astype(int).tolist()
        self._chunks = list(itertools.pairwise(bounds))
        self._start_threads()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_threads()

    def advance(self, caps: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]) -> None:
        """Run one control interval under the given caps (see `Backend.advance`)."""
        if self._pool is None:
            self._advance(0, self.n_clusters, caps, active)
            return
        jobs = [
            self._pool.submit(self._advance, first, last, caps, active)
            for first, last in self._chunks
        ]
        for job in jobs:
            job.result()

    def faults(self) -> dict[int, str]:
        """A simulation has no faults: always empty."""
        return {}

    def extra_info(self, cluster: int) -> dict[str, Any]:
        """A simulation tells nothing more: always empty."""
        return {}

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _start_threads(self) -> None:
        n_chunks = len(self._chunks)
        self._pool = ThreadPoolExecutor(n_chunks) if n_chunks > 1 else None

    def _advance(
        self, first: int, last: int, caps: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]
    ) -> None:
        """Run one control interval on the active clusters of `[first, last)`."""
        raise NotImplementedError


def unavailable(dtype: np.dtype[np.void], *prefixes: str) -> npt.NDArray[np.void]:
    """A record of zeros, with NaN in the fields whose names start so."""
    start = np.zeros((), dtype)
    for name in dtype.names or ():
        if name.startswith(prefixes):
            start[name] = np.nan
    return start
