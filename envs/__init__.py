"""A Gymnasium environment for per-tenant admission concurrency on a shared vLLM server.

Importing this package registers `VLLMTenantTuning-v0`.
"""

from gymnasium.envs.registration import register

from vllm_tenant_tuning.env import VLLMTenantTuningEnv
from vllm_tenant_tuning.family import ScenarioFamily
from vllm_tenant_tuning.scenario import (
    Scenario,
    ScenarioError,
    family_names,
    load_scenario,
    scenario_names,
)
from vllm_tenant_tuning.telemetry import Telemetry
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

__version__ = "0.1.0"

__all__ = [
    "Scenario",
    "ScenarioError",
    "ScenarioFamily",
    "Telemetry",
    "VLLMTenantTuningEnv",
    "VLLMTenantTuningVectorEnv",
    "family_names",
    "load_scenario",
    "scenario_names",
]

register(
    id="VLLMTenantTuning-v0",
    entry_point="vllm_tenant_tuning.env:VLLMTenantTuningEnv",
    vector_entry_point="vllm_tenant_tuning.vector:VLLMTenantTuningVectorEnv",
)
