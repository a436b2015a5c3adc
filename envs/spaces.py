"""Observation layout and encoding, action decoding and masks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.engine import Engine, SlotsEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE
from vllm_tenant_tuning.workload import Workload


class ActionError(ValueError):
    """An action that is not in the action space."""


class Feature(NamedTuple):
    """One feature of the observation: a telemetry field over a reference, clipped to `high`."""

    name: str
    field: str
    reference: str
    high: float


TENANT_FEATURES = (
    Feature("queued", "queued", "cap_max", 10),
    Feature("in_flight", "in_flight", "cap_max", 10),
    Feature("cap", "cap", "cap_max", 1),
    Feature("arrival_rate", "arrived", "offered_in_interval", 10),
    Feature("drop_rate", "dropped", "offered_in_interval", 10),
    Feature("latency_p50", "latency_p50_s", "slo_latency_p99_s", 10),
    Feature("latency_p95", "latency_p95_s", "slo_latency_p99_s", 10),
    Feature("latency_p99", "latency_p99_s", "slo_latency_p99_s", 10),
    Feature("window_completions", "window_completions", "offered_in_window", 10),
    Feature("itl_p50", "itl_p50_s", "itl_s", 10),
    Feature("itl_p95", "itl_p95_s", "itl_s", 10),
    Feature("itl_p99", "itl_p99_s", "itl_s", 10),
)
"""Per tenant, in this order."""

TTFT_FEATURES = (
    Feature("ttft_p50", "ttft_p50_s", "ttft_s", 10),
    Feature("ttft_p95", "ttft_p95_s", "ttft_s", 10),
    Feature("ttft_p99", "ttft_p99_s", "ttft_s", 10),
)
"""After these for each tenant, where the engine has tokens (fidelity "engine")."""

CLUSTER_FEATURES = (
    Feature("gpu_memory_utilization", "gpu_memory_utilization", "one", 1),
    Feature("kv_cache_usage", "kv_cache_usage", "one", 1),
    Feature("num_requests_running", "num_requests_running", "max_num_seqs", 1),
    Feature("num_requests_waiting", "num_requests_waiting", "max_num_seqs", 10),
    Feature("preemptions", "preemptions", "max_num_seqs", 10),
)
"""After the tenants', in this order."""


def tenant_features(scenario: Scenario) -> tuple[Feature, ...]:
    """The features of each tenant of a scenario, in order."""
    if isinstance(scenario.engine, SlotsEngine):
        return TENANT_FEATURES
    return TENANT_FEATURES + TTFT_FEATURES


class ObservationLayout:
    """What stands where in an observation, and how telemetry becomes one.

    An entry is `clip(reading / reference, 0, high)`; a reading that is not available is 0.
    References: `cap_max`, `max_num_seqs`, the tenant's SLOs, and the requests that a tenant
    offers on average in a control interval or in the sliding window. Without an SLO on them,
    inter-token latencies are held against that of one sequence alone, times to the first token
    against the SLO of the latency.

    Args:
        scenario: the task.
        workload: gives the offered rates.

    Attributes:
        names: (D,) names of the entries, `TENANT.FEATURE` and `cluster.FEATURE`.
        space: Box of shape (D,), float32, with D = 12 * n_tenants + 5 (fidelity "engine":
            15 * n_tenants + 5).
    """

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        control, engine = scenario.control, scenario.engine
        per_tenant = tenant_features(scenario)
        self.names = [
            f"{tenant}.{feature.name}" for tenant in scenario.tenant_names for feature in per_tenant
        ] + [f"cluster.{feature.name}" for feature in CLUSTER_FEATURES]
        high = [feature.high for _ in scenario.tenants for feature in per_tenant]
        high += [feature.high for feature in CLUSTER_FEATURES]
        self._high = np.array(high, np.float32)
        self.space = spaces.Box(np.zeros_like(self._high), self._high, dtype=np.float32)

        shared = {
            "one": 1.0,
            "cap_max": float(control.cap_max),
            "max_num_seqs": float(scenario.max_num_seqs),
        }
        alone_s = _itl_alone_s(engine)
        offered = [rate if rate > 0 else 1.0 for rate in workload.offered_rate_per_s]
        references = [
            shared
            | {
                "slo_latency_p99_s": tenant.slo_latency_p99_s,
                "ttft_s": tenant.slo_ttft_p99_s or tenant.slo_latency_p99_s,
                "itl_s": tenant.slo_itl_p99_s or alone_s,
                "offered_in_interval": rate * control.control_interval_s,
                "offered_in_window": rate * control.window_s,
            }
            for tenant, rate in zip(scenario.tenants, offered, strict=True)
        ]
        self._tenant_references = np.array(
            [[known[feature.reference] for feature in per_tenant] for known in references]
        )
        self._cluster_references = np.array(
            [shared[feature.reference] for feature in CLUSTER_FEATURES]
        )
        self._tenant_columns = _columns(per_tenant, TENANT_DTYPE)
        self._cluster_columns = _columns(CLUSTER_FEATURES, CLUSTER_DTYPE)

    def encode(
        self,
        tenants: npt.NDArray[np.float64],
        cluster: npt.NDArray[np.float64],
        out: npt.NDArray[np.float32],
    ) -> None:
        """Write the observations of N clusters.

        Args:
            tenants: (N, n_tenants, fields of `TENANT_DTYPE`) float64.
            cluster: (N, fields of `CLUSTER_DTYPE`) float64.
            out: (N, D) float32, overwritten.
        """
        _encode(
            tenants,
            cluster,
            self._tenant_columns,
            self._cluster_columns,
            self._tenant_references,
            self._cluster_references,
            self._high,
            out,
        )


class ActionDecoder:
    """What an action does to the caps: one bounded change per tenant.

    Entry i of an action, 0 to `2 * max_delta`, moves tenant i's cap by `entry - max_delta`.
    Caps stay in `[cap_min, cap_max]`. Under a `total_cap` all decreases are applied first;
    then the increases are granted one by one, each to the tenant that asks and has the
    smallest cap (the first of equals), while the sum stays within the bound.

    Args:
        scenario: the task.

    Attributes:
        space: `MultiDiscrete([2 * max_delta + 1] * n_tenants)`, int64.
    """

    def __init__(self, scenario: Scenario) -> None:
        control = scenario.control
        self._names = scenario.tenant_names
        self._max_delta = control.max_delta
        self._n_choices = 2 * control.max_delta + 1
        self._cap_min, self._cap_max = control.cap_min, control.cap_max
        self._total_cap = scenario.total_cap
        self.space = spaces.MultiDiscrete([self._n_choices] * scenario.n_tenants)

    def apply(
        self,
        action: Any,
        caps: npt.NDArray[np.int64],
        clipped: npt.NDArray[np.int64],
        active: npt.NDArray[np.bool_],
    ) -> None:
        """Change the caps of N clusters in place.

        Args:
            action: (N, n_tenants) integers.
            caps: (N, n_tenants) int64, changed.
            clipped: (N, n_tenants) int64, overwritten with the part of each change that a
                bound cut off (asked minus granted).
            active: (N,) bool; the other clusters' caps stay, and nothing is clipped.

        Raises:
            ActionError: a wrong shape or type, NaN, or an entry out of range; no cap is
                changed then.
        """
        if not (
            type(action) is np.ndarray and action.dtype == np.int64 and action.shape == caps.shape
        ):
            action = self._as_integers(action, caps.shape)
        wrong: int = _apply(
            action,
            active,
            caps,
            clipped,
            self._max_delta,
            self._cap_min,
            self._cap_max,
            self._total_cap,
        )
        if wrong >= 0:
            row, tenant = divmod(wrong, caps.shape[1])
            where = f"action for tenant '{self._names[tenant]}'"
            if caps.shape[0] > 1:
                where += f" of environment {row}"
            raise ActionError(
                f"{where}: got {action[row, tenant]}; accepted are whole numbers from 0 to "
                f"{self._n_choices - 1} (a change of -{self._max_delta} to +{self._max_delta})"
            )

    def mask(self, caps: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which choices a bound would not cut, in sb3-contrib's convention.

        Under a `total_cap` an increase is masked when it would be cut whatever the other
        tenants do; a change of 0 never is.

        Args:
            caps: (N, n_tenants) int64.

        Returns:
            (N, n_tenants * (2 * max_delta + 1)) bool, tenant after tenant.
        """
        delta = np.arange(-self._max_delta, self._max_delta + 1)
        after = caps[:, :, None] + delta
        allowed = (after >= self._cap_min) & (after <= self._cap_max)
        lowest = np.maximum(caps - self._max_delta, self._cap_min)
        others = lowest.sum(axis=1, keepdims=True) - lowest
        allowed &= (delta <= 0) | (after + others[:, :, None] <= self._total_cap)
        mask: npt.NDArray[np.bool_] = allowed.reshape(len(caps), -1)
        return mask

    def _as_integers(self, action: Any, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        try:
            array = np.asarray(action)
        except ValueError as error:
            raise ActionError(f"action: not an array: {error}") from error
        expected = f"integers of shape {shape[1:] if shape[0] == 1 else shape}"
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ActionError(f"action: got NaN; accepted are {expected}")
        if array.dtype.kind not in "iu":
            raise ActionError(f"action: got dtype {array.dtype}; accepted are {expected}")
        if array.shape != shape:
            got = array.shape[1:] if shape[0] == 1 and array.ndim > 0 else array.shape
            raise ActionError(f"action: got shape {got}; accepted are {expected}")
        return array.astype(np.int64)


def _itl_alone_s(engine: Engine) -> float:
    """Time between two tokens of one sequence alone, at the start of its context."""
    if isinstance(engine, SlotsEngine):
        return engine.inter_token_latency_s
    return float(step_time_ms(engine.profile.step_time, 0, 1, 0, 0)) / 1000


def _columns(features: tuple[Feature, ...], dtype: np.dtype[np.void]) -> npt.NDArray[np.int64]:
    names = list(dtype.names or ())
    return np.array([names.index(feature.field) for feature in features])


@nb.njit(nogil=True, cache=True)
def _encode(
    tenants: Any,
    cluster: Any,
    tenant_columns: Any,
    cluster_columns: Any,
    tenant_references: Any,
    cluster_references: Any,
    high: Any,
    out: Any,
) -> None:
    n_features = tenant_columns.shape[0]
    for c in range(tenants.shape[0]):
        entry = 0
        for t in range(tenants.shape[1]):
            for i in range(n_features):
                value = tenants[c, t, tenant_columns[i]] / tenant_references[t, i]
                # The first comparison is false for NaN too.
                out[c, entry] = min(value, high[entry]) if value > 0.0 else 0.0
                entry += 1
        for i in range(cluster_columns.shape[0]):
            value = cluster[c, cluster_columns[i]] / cluster_references[i]
            out[c, entry] = min(value, high[entry]) if value > 0.0 else 0.0
            entry += 1


@nb.njit(nogil=True, cache=True)
def _apply(
    action: Any,
    active: Any,
    caps: Any,
    clipped: Any,
    max_delta: int,
    cap_min: int,
    cap_max: int,
    total_cap: int,
) -> int:
    n_clusters, n_tenants = caps.shape
    for c in range(n_clusters):
        for t in range(n_tenants):
            if active[c] and not 0 <= action[c, t] <= 2 * max_delta:
                return int(c * n_tenants + t)
    for c in range(n_clusters):
        total = 0
        for t in range(n_tenants):
            clipped[c, t] = 0
            if not active[c]:
                continue
            delta = action[c, t] - max_delta
            if delta < 0:
                after = max(caps[c, t] + delta, cap_min)
                clipped[c, t] = delta - (after - caps[c, t])
                caps[c, t] = after
            else:
                clipped[c, t] = delta
            total += caps[c, t]
        if not active[c]:
            continue
        while total < total_cap:
            chosen = -1
            for t in range(n_tenants):
                if (
                    clipped[c, t] > 0
                    and caps[c, t] < cap_max
                    and (chosen < 0 or caps[c, t] < caps[c, chosen])
                ):
                    chosen = t
            if chosen < 0:
                break
            caps[c, chosen] += 1
            clipped[c, chosen] -= 1
            total += 1
    return -1
