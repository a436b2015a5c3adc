"""Policies by the words of the command line."""

from __future__ import annotations

from collections.abc import Callable

from vllm_tenant_tuning.agents.concurrency_limits import (
    AIMDConfig,
    AIMDPolicy,
    Gradient2Config,
    Gradient2Policy,
    VegasConfig,
    VegasPolicy,
)
from vllm_tenant_tuning.agents.envoy_gradient import EnvoyGradientConfig, EnvoyGradientPolicy
from vllm_tenant_tuning.agents.fair_share import FairSharePolicy
from vllm_tenant_tuning.agents.oracle import OraclePolicy
from vllm_tenant_tuning.agents.policy import Policy
from vllm_tenant_tuning.agents.quotas import QuotaConfig, QuotaPolicy
from vllm_tenant_tuning.agents.robust import RobustPolicy
from vllm_tenant_tuning.agents.robust_config import parse_requirements
from vllm_tenant_tuning.agents.slo_pi import SloPiPolicy
from vllm_tenant_tuning.agents.static import StaticPolicy
from vllm_tenant_tuning.agents.threshold import BacklogPolicy, WindowP99Policy
from vllm_tenant_tuning.agents.token_bucket import TokenBucketPolicy
from vllm_tenant_tuning.agents.utilization_gate import UtilizationGatePolicy

_RULES: dict[str, Callable[[], Policy]] = {
    "static": StaticPolicy,
    "naive": WindowP99Policy,
    "differentiated": BacklogPolicy,
    "per_tenant_window_p99": lambda: WindowP99Policy("per_tenant"),
    "coupled_backlog": lambda: BacklogPolicy("coupled"),
    "aimd": AIMDPolicy,
    "aimd:itl": lambda: AIMDPolicy(AIMDConfig(signal="itl")),
    "vegas": VegasPolicy,
    "vegas:itl": lambda: VegasPolicy(VegasConfig(token_time="itl")),
    "gradient2": Gradient2Policy,
    "gradient2:itl": lambda: Gradient2Policy(Gradient2Config(token_time="itl")),
    "envoy_gradient": EnvoyGradientPolicy,
    "envoy_gradient:itl": lambda: EnvoyGradientPolicy(EnvoyGradientConfig(token_time="itl")),
    "utilization_gate": UtilizationGatePolicy,
    "quotas": QuotaPolicy,
    "quotas:borrowing": lambda: QuotaPolicy(QuotaConfig(borrowing=True)),
    "token_bucket": TokenBucketPolicy,
    "slo_pi": SloPiPolicy,
    "fair_share": FairSharePolicy,
    "robust": RobustPolicy,
    "oracle": OraclePolicy,
}

POLICY_FORMS = {
    "static": "the scenario's initial caps, held",
    "static:A/B/...": "the given caps, held",
    "naive": "the study's coupled rule on the window's p99 and the occupancy",
    "differentiated": "the study's per-tenant rule on the backlog",
    "per_tenant_window_p99": "the naive signal, for each tenant alone",
    "coupled_backlog": "the differentiated signal, for all tenants together",
    "aimd": "per tenant: times 0.9 when an SLO is violated, else one more while used",
    "aimd:itl": "the same on the inter-token latency against the fastest",
    "vegas": "Netflix's Vegas on the server's time per output token (vegas:itl: on the ITL)",
    "gradient2": "Netflix's Gradient2, likewise (gradient2:itl)",
    "envoy_gradient": "Envoy's gradient controller, likewise (envoy_gradient:itl)",
    "utilization_gate": "llm-d's gate on requests waiting and KV-cache usage",
    "quotas": "Kueue-style quotas by drop weight",
    "quotas:borrowing": "the same, unused quota lent to who needs it",
    "token_bucket": "a sustained share each, and credit for bursts",
    "slo_pi": "a PI controller on the SLO of each tenant's tail",
    "fair_share": "demand under a total budget, fair in tokens (VTC's prices)",
    "robust": "the study's four requirements together",
    "robust:-signal-scope-asymmetry-context": "the same without those that are named",
    "oracle": "a yardstick: follows the knee that a slots scenario schedules and no policy sees",
    "llm:CONFIG": "an LLM: a packaged configuration or a YAML file; llm alone is llm:default",
    "model:PATH": "a trained model: the folder of a training run, or its model.zip",
}
"""Every form that `make_policy` accepts, with what it means."""


def make_policy(text: str) -> Policy:
    """The policy that the text names, in one of `POLICY_FORMS`.

    Raises:
        ValueError: an unknown policy, caps that are not whole numbers, or a model or an LLM's
            configuration that cannot be read.
    """
    if text in _RULES:
        return _RULES[text]()
    kind, _, rest = text.partition(":")
    if kind == "static" and rest:
        try:
            return StaticPolicy([int(cap) for cap in rest.split("/")])
        except ValueError:
            raise ValueError(
                f"policy '{text}': caps must be whole numbers, such as static:4/4"
            ) from None
    if kind == "robust" and rest:
        return RobustPolicy(parse_requirements(rest))
    if kind == "model" and rest:
        from vllm_tenant_tuning.agents.rl import ModelPolicy

        return ModelPolicy(rest)
    if kind == "llm":
        from vllm_tenant_tuning.agents.llm import LLMPolicy

        return LLMPolicy(text)
    raise ValueError(f"policy: got '{text}'; accepted are {', '.join(POLICY_FORMS)}")
