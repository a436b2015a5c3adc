"""llm-d's utilisation gate: no more work for a saturated server.

Source: the saturation detector of the Gateway API inference extension, llm-d's endpoint picker
(`pkg/epp/saturationdetector`: at most 5 requests waiting, at most 0.8 of the KV cache in use).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class UtilizationGateConfig:
    """Parameters of `UtilizationGatePolicy`, the source's defaults."""

    queue_depth_threshold: float = 5.0
    """Requests waiting in the engine up to which it has capacity."""

    kv_cache_util_threshold: float = 0.8
    """Share of the KV cache in use up to which it has capacity."""


class UtilizationGatePolicy(CapPolicy):
    """While the server is saturated, sheddable tenants lose caps; else who waits gets more.

    A server is saturated above either threshold, or when a reading is missing. The source lets
    critical requests pass a saturated server and sheds the others; here the tenants of the
    largest `drop_weight` are critical where weights differ, and none is where they do not.
    Assumes that KV usage tells saturation: in the slots fidelity it is the share of busy slots.
    """

    def __init__(self, config: UtilizationGateConfig | None = None) -> None:
        self.config = config or UtilizationGateConfig()
        self.name = "utilization_gate"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Read who is critical."""
        weights = np.array([tenant.drop_weight for tenant in scenario.tenants])
        self._critical = (weights == weights.max()) & (weights.min() < weights.max())
        self._step = scenario.control.max_delta

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Compare the two gauges with their thresholds."""
        cluster = telemetry.cluster
        # A missing reading is NaN, and the comparisons false.
        has_capacity = (
            cluster["num_requests_waiting"] <= self.config.queue_depth_threshold
            and cluster["kv_cache_usage"] <= self.config.kv_cache_util_threshold
        )
        waits = reading(telemetry.tenants["queued"]) > 0
        expand = waits & (has_capacity | self._critical)
        shed = ~self._critical & (not has_capacity)
        wanted: Integers = caps + self._step * (expand.astype(np.int64) - shed.astype(np.int64))
        return wanted
