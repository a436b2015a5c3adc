"""Policies: what sets the caps, behind one protocol."""

from vllm_tenant_tuning.agents.policy import (
    ExplainedPolicy,
    Policy,
    TranscribedPolicy,
    as_action,
)
from vllm_tenant_tuning.agents.registry import POLICY_FORMS, make_policy
from vllm_tenant_tuning.agents.static import StaticPolicy
from vllm_tenant_tuning.agents.threshold import (
    BacklogPolicy,
    BacklogThresholds,
    WindowP99Policy,
    WindowP99Thresholds,
)

__all__ = [
    "POLICY_FORMS",
    "BacklogPolicy",
    "BacklogThresholds",
    "ExplainedPolicy",
    "Policy",
    "StaticPolicy",
    "TranscribedPolicy",
    "WindowP99Policy",
    "WindowP99Thresholds",
    "as_action",
    "make_policy",
]
