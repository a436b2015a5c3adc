"""What one control interval showed, per tenant and for the cluster.

Backends fill arrays of the two structured dtypes below; observations, rewards, policies and
records read them by field name. NaN means that a reading is not available (a latency before
the first completion, GPU memory in a simulation); it never reaches an observation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

TENANT_DTYPE = np.dtype(
    [
        # at the end of the interval
        ("cap", "f8"),  # requests the tenant may have in flight
        ("queued", "f8"),  # requests waiting at the gate
        ("in_flight", "f8"),  # requests sent and not finished
        # during the interval
        ("arrived", "f8"),
        ("admitted", "f8"),
        ("completed", "f8"),
        ("good", "f8"),  # completed within the tenant's SLO
        ("dropped", "f8"),  # patience over, or the bounded queue full
        ("failed", "f8"),  # refused or broken by the server
        ("prompt_tokens", "f8"),  # of the requests admitted
        ("output_tokens", "f8"),  # of the requests completed
        ("mean_in_flight", "f8"),  # time average
        # over the sliding window that ends here: sorted[min(int(q * n), n - 1)]; without
        # completions the last value stays, and window_completions says how much to trust it
        ("window_completions", "f8"),
        ("latency_p50_s", "f8"),  # arrival at the gate to the last token
        ("latency_p95_s", "f8"),
        ("latency_p99_s", "f8"),
        ("ttft_p50_s", "f8"),  # arrival at the gate to the first token, of those in the window
        ("ttft_p95_s", "f8"),
        ("ttft_p99_s", "f8"),
        ("itl_p50_s", "f8"),  # between two tokens
        ("itl_p95_s", "f8"),
        ("itl_p99_s", "f8"),
        # since the start of the episode
        ("arrived_total", "f8"),
        ("completed_total", "f8"),
        ("dropped_total", "f8"),
        ("failed_total", "f8"),
    ]
)
"""Per tenant; every field float64, counts in requests unless the name says otherwise."""

CLUSTER_DTYPE = np.dtype(
    [
        ("time_s", "f8"),  # since the start of the episode, in whole control intervals
        ("num_requests_running", "f8"),
        ("num_requests_waiting", "f8"),  # inside the engine, not at the gate
        ("kv_cache_usage", "f8"),  # 0 to 1; in slots fidelity the share of slots in use
        ("gpu_memory_utilization", "f8"),  # 0 to 1
        # during the interval
        ("preemptions", "f8"),
        ("prompt_tokens", "f8"),  # of the requests whose prefill completed
        ("generation_tokens", "f8"),  # emitted
        ("energy_j", "f8"),  # that the GPU drew
        ("mean_running", "f8"),  # time average over the interval
        ("window_completions", "f8"),  # of all tenants, in the sliding window
        ("latency_p50_s", "f8"),  # over all tenants' completions of the window
        ("latency_p95_s", "f8"),
        ("latency_p99_s", "f8"),
    ]
)
"""For the whole cluster; every field float64."""


class Telemetry:
    """What one control interval showed.

    Plain float64 arrays underneath, because copying them is twenty times faster than copying
    structured ones; `tenants` and `cluster` are structured views of them.

    Args:
        tenant_values: (n_tenants, fields of `TENANT_DTYPE`) float64; with a leading (n_envs,)
            in a vector environment.
        cluster_values: (fields of `CLUSTER_DTYPE`,) float64; likewise.
    """

    __slots__ = ("cluster_values", "tenant_values")

    def __init__(
        self, tenant_values: npt.NDArray[np.float64], cluster_values: npt.NDArray[np.float64]
    ) -> None:
        self.tenant_values = tenant_values
        self.cluster_values = cluster_values

    def __eq__(self, other: object) -> bool:
        """Whether all readings are equal; what is unavailable equals what is unavailable."""
        if not isinstance(other, Telemetry):
            return NotImplemented
        return np.array_equal(
            self.tenant_values, other.tenant_values, equal_nan=True
        ) and np.array_equal(self.cluster_values, other.cluster_values, equal_nan=True)

    __hash__ = None  # type: ignore[assignment]

    @property
    def tenants(self) -> npt.NDArray[np.void]:
        """Structured array of `TENANT_DTYPE`, shape (n_tenants,) or (n_envs, n_tenants)."""
        return self.tenant_values.view(TENANT_DTYPE)[..., 0]

    @property
    def cluster(self) -> npt.NDArray[np.void]:
        """Structured array of `CLUSTER_DTYPE`, shape () or (n_envs,)."""
        return self.cluster_values.view(CLUSTER_DTYPE)[..., 0]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists by field name, for records and prompts; NaN becomes None."""

        def plain(value: Any) -> Any:
            if isinstance(value, list):
                return [plain(item) for item in value]
            return None if value != value else value

        return {
            part: {name: plain(array[name].tolist()) for name in array.dtype.names or ()}
            for part, array in (("tenants", self.tenants), ("cluster", self.cluster))
        }


def conservation_error(tenants: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Requests lost (positive) or made up (negative), per tenant; zero when all are accounted.

    arrivals = completed + dropped + failed + queued + in flight, since the episode's start.

    Args:
        tenants: structured array of `TENANT_DTYPE`, any shape.
    """
    accounted = (
        tenants["completed_total"]
        + tenants["dropped_total"]
        + tenants["failed_total"]
        + tenants["queued"]
        + tenants["in_flight"]
    )
    error: npt.NDArray[np.float64] = tenants["arrived_total"] - accounted
    return error
