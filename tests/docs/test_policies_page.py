"""docs/policies.md says all that the registry and the configurations have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_tenant_tuning.agents import POLICY_FORMS, BacklogThresholds, WindowP99Thresholds
from vllm_tenant_tuning.agents.concurrency_limits import AIMDConfig, Gradient2Config, VegasConfig
from vllm_tenant_tuning.agents.envoy_gradient import EnvoyGradientConfig
from vllm_tenant_tuning.agents.fair_share import FairShareConfig
from vllm_tenant_tuning.agents.llm.config import LLMConfig
from vllm_tenant_tuning.agents.quotas import QuotaConfig
from vllm_tenant_tuning.agents.registry import _RULES, make_policy
from vllm_tenant_tuning.agents.robust_config import REQUIREMENTS, RobustConfig
from vllm_tenant_tuning.agents.slo_pi import SloPiConfig
from vllm_tenant_tuning.agents.token_bucket import TokenBucketConfig
from vllm_tenant_tuning.agents.utilization_gate import UtilizationGateConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
CONFIGS = (
    WindowP99Thresholds,
    BacklogThresholds,
    AIMDConfig,
    VegasConfig,
    Gradient2Config,
    EnvoyGradientConfig,
    UtilizationGateConfig,
    QuotaConfig,
    TokenBucketConfig,
    SloPiConfig,
    FairShareConfig,
    RobustConfig,
    LLMConfig,
)
NO_DEFAULT = object()


def defaults(config: Any) -> dict[str, Any]:
    """Every parameter with its default; `NO_DEFAULT` where there is none, or a made one."""
    if config is LLMConfig:
        return {
            name: NO_DEFAULT if field.is_required() or field.default_factory else field.default
            for name, field in LLMConfig.model_fields.items()
        }
    return {
        field.name: NO_DEFAULT if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config)
    }


def table(config: type) -> dict[str, list[str]]:
    """The rows of the table that is headed by the configuration, by the parameter."""
    head = f"| `{config.__name__}` | default | unit | meaning |\n"
    assert PAGE.count(head) == 1, f"no table of {config.__name__}"
    rows = {}
    for line in PAGE.partition(head)[2].splitlines()[1:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0].strip("`")] = cells[1:]
    return rows


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_parameter_is_there_with_its_default(config: type) -> None:
    rows = table(config)
    known = defaults(config)
    assert list(rows) == list(known)
    for name, default in known.items():
        if default is not NO_DEFAULT:
            shown = "none" if default is None else str(default)
            assert rows[name][0] == f"`{shown}`", f"{config.__name__}.{name}"


@pytest.mark.parametrize("text", [*_RULES, "best_static"])
def test_every_registered_policy_is_on_the_command_line_of_a_section(text: str) -> None:
    lines = [
        part.partition("**Class:**")[0] for part in SECTIONS if part.count("**Command line:**") == 1
    ]
    assert sum(f"`{text}`" in line for line in lines) == 1


def test_every_form_is_in_the_first_table() -> None:
    overview = PAGE.partition("| on the command line |")[2].partition("\n\n")[0]
    for form in POLICY_FORMS:
        assert f"`{form}`" in overview, form


def test_every_policys_configuration_is_one_of_these() -> None:
    """A rule of a new configuration must get a table."""
    for text in _RULES:
        policy = make_policy(text)
        for name in ("config", "thresholds"):
            if hasattr(policy, name):
                assert type(getattr(policy, name)) in CONFIGS


@pytest.mark.parametrize("text", _RULES)
def test_every_rules_class_is_named(text: str) -> None:
    assert f"`{type(make_policy(text)).__name__}`" in PAGE


def test_every_section_says_where_it_comes_from_and_what_it_assumes() -> None:
    for section in SECTIONS:
        assert "**Source:**" in section, section[:40]
        assert re.search(r"^\*\*Assumes\*\*", section, re.MULTILINE), section[:40]


def test_the_requirements_that_can_be_left_out_are_there() -> None:
    for name in REQUIREMENTS:
        assert f"`robust:-{name}`" in PAGE
