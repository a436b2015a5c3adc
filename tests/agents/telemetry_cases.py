"""Synthetic telemetry for the rules: every reading 0 unless it is given."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_tenant_tuning import Telemetry
from vllm_tenant_tuning.agents import Policy
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE


def changed(name: str, tenant: dict[str, Any] | None = None, **control: Any) -> Scenario:
    """A packaged scenario with other control bounds, or other fields for all its tenants."""
    content = load_scenario(name).model_dump()
    content["control"] |= control
    for entry in content["tenants"]:
        entry |= tenant or {}
    return Scenario.model_validate(content)


def observe(caps: tuple[int, ...], time_s: float = 3.0, **readings: Any) -> dict[str, Any]:
    """An `info` of two tenants; keys that begin with `cluster_` are the cluster's."""
    telemetry = Telemetry(np.zeros((len(caps), len(TENANT_DTYPE))), np.zeros(len(CLUSTER_DTYPE)))
    telemetry.tenants["cap"] = caps
    telemetry.cluster["time_s"] = time_s
    for key, value in readings.items():
        if key.startswith("cluster_"):
            telemetry.cluster[key.removeprefix("cluster_")] = value
        else:
            telemetry.tenants[key] = value
    return {"telemetry": telemetry, "caps": np.array(caps)}


def step(policy: Policy, scenario: Scenario, info: dict[str, Any]) -> list[int]:
    """The changes of the caps that the policy asks for, one for each tenant."""
    action = policy.act(np.zeros(1, np.float32), info)
    assert action.dtype == np.int64
    assert action.shape == (scenario.n_tenants,)
    assert ((action >= 0) & (action <= 2 * scenario.control.max_delta)).all()
    changes: list[int] = (action - scenario.control.max_delta).tolist()
    return changes
