"""Policies by the words of the command line."""

from __future__ import annotations

from collections.abc import Callable

from vllm_tenant_tuning.agents.policy import Policy
from vllm_tenant_tuning.agents.static import StaticPolicy
from vllm_tenant_tuning.agents.threshold import BacklogPolicy, WindowP99Policy

_RULES: dict[str, Callable[[], Policy]] = {
    "static": StaticPolicy,
    "naive": WindowP99Policy,
    "differentiated": BacklogPolicy,
    "per_tenant_window_p99": lambda: WindowP99Policy("per_tenant"),
    "coupled_backlog": lambda: BacklogPolicy("coupled"),
}

POLICY_FORMS = {
    "static": "the scenario's initial caps, held",
    "static:A/B/...": "the given caps, held",
    "naive": "the study's coupled rule on the window's p99 and the occupancy",
    "differentiated": "the study's per-tenant rule on the backlog",
    "per_tenant_window_p99": "the naive signal, for each tenant alone",
    "coupled_backlog": "the differentiated signal, for all tenants together",
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
    if kind == "model" and rest:
        from vllm_tenant_tuning.agents.rl import ModelPolicy

        return ModelPolicy(rest)
    if kind == "llm":
        from vllm_tenant_tuning.agents.llm import LLMPolicy

        return LLMPolicy(text)
    raise ValueError(f"policy: got '{text}'; accepted are {', '.join(POLICY_FORMS)}")
