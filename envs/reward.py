"""The reward of one control interval, term by term.

    reward = w_throughput * completed / offered
             - w_slo  * sum_i slo_weight_i * clip(max(p99_i / slo_i) - 1, 0, slo_clip)
             - w_drop * sum_i drop_weight_i * (dropped_i + failed_i) / offered_i
             - w_cost * mean_running / max_num_seqs

`offered` is what all tenants offer on average in an interval, in requests or output tokens as
`completed` is; `offered_i` is tenant i's, in requests; p99_i is that of the sliding window, of
latency, time to the first token and inter-token latency, wherever the tenant has an SLO on it.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import Workload

REWARD_TERMS = ("throughput", "slo", "drop", "cost")
"""The terms in order; their sum, signs included, is the reward."""


class RewardFunction:
    """The reward of N clusters from the telemetry of one control interval.

    Args:
        scenario: the task.
        workload: gives the offered rates and mean output lengths.
    """

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        weights = scenario.reward
        interval_s = scenario.control.control_interval_s
        offered = np.asarray(workload.offered_rate_per_s) * interval_s
        work = offered
        if weights.throughput_unit == "output_tokens":
            work = offered * workload.mean_output_tokens
        self._in_tokens = weights.throughput_unit == "output_tokens"
        self._throughput_scale = weights.w_throughput / (work.sum() or 1.0)
        self._slo_s = np.array(
            [
                (
                    tenant.slo_latency_p99_s,
                    tenant.slo_ttft_p99_s or np.inf,
                    tenant.slo_itl_p99_s or np.inf,
                )
                for tenant in scenario.tenants
            ]
        )
        self._slo_scale = weights.w_slo * np.array(
            [tenant.slo_weight for tenant in scenario.tenants]
        )
        self._slo_clip = weights.slo_clip
        self._drop_scale = (
            weights.w_drop
            * np.array([tenant.drop_weight for tenant in scenario.tenants])
            / np.where(offered > 0, offered, 1.0)
        )
        self._cost_scale = weights.w_cost / scenario.max_num_seqs

    def __call__(
        self,
        tenants: npt.NDArray[np.void],
        cluster: npt.NDArray[np.void],
        terms: npt.NDArray[np.float64],
        rewards: npt.NDArray[np.float64],
    ) -> None:
        """Write terms and rewards of N clusters.

        Args:
            tenants: structured (N, n_tenants) of `TENANT_DTYPE`.
            cluster: structured (N,) of `CLUSTER_DTYPE`.
            terms: (N, 4) float64, overwritten, in the order of `REWARD_TERMS`.
            rewards: (N,) float64, overwritten.
        """
        _reward(
            tenants,
            cluster,
            self._in_tokens,
            self._throughput_scale,
            self._slo_s,
            self._slo_scale,
            self._slo_clip,
            self._drop_scale,
            self._cost_scale,
            terms,
            rewards,
        )


@nb.njit(nogil=True, cache=True)
def _reward(
    tenants: Any,
    cluster: Any,
    in_tokens: bool,
    throughput_scale: float,
    slo_s: Any,
    slo_scale: Any,
    slo_clip: float,
    drop_scale: Any,
    cost_scale: float,
    terms: Any,
    rewards: Any,
) -> None:
    for c in range(tenants.shape[0]):
        throughput = 0.0
        slo = 0.0
        drop = 0.0
        for t in range(tenants.shape[1]):
            seen = tenants[c, t]
            throughput += seen.output_tokens if in_tokens else seen.completed
            # A reading that is not available is NaN, and the comparisons false.
            ratio = 0.0
            if seen.latency_p99_s / slo_s[t, 0] > ratio:
                ratio = seen.latency_p99_s / slo_s[t, 0]
            if seen.ttft_p99_s / slo_s[t, 1] > ratio:
                ratio = seen.ttft_p99_s / slo_s[t, 1]
            if seen.itl_p99_s / slo_s[t, 2] > ratio:
                ratio = seen.itl_p99_s / slo_s[t, 2]
            violation = ratio - 1.0
            if violation > 0.0:
                slo += slo_scale[t] * min(violation, slo_clip)
            drop += drop_scale[t] * (seen.dropped + seen.failed)
        terms[c, 0] = throughput_scale * throughput
        terms[c, 1] = -slo
        terms[c, 2] = -drop
        terms[c, 3] = -cost_scale * cluster[c].mean_running
        rewards[c] = terms[c, 0] + terms[c, 1] + terms[c, 2] + terms[c, 3]
