"""Builders of small scenarios for the workload tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_tenant_tuning.scenario import Scenario, parse_scenario

ScenarioBuilder = Callable[..., Scenario]


def tenant(name: str = "a", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "arrivals": {"process": "poisson", "rate_per_s": 1.0},
        "prompt_tokens": {"distribution": "lognormal", "median_tokens": 300, "sigma": 1.0},
        "output_tokens": {"distribution": "fixed", "tokens": 7},
        "service": {"model": "exponential", "mean_s": 2.5},
        "cap_initial": 4,
        "slo_latency_p99_s": 6.0,
        **changes,
    }


@pytest.fixture
def make_scenario() -> ScenarioBuilder:
    """A scenario of the given tenants, each the changes to an ordinary one."""

    def build(*tenants: dict[str, Any], episode_s: float = 600.0) -> Scenario:
        return parse_scenario(
            {
                "name": "test",
                "question": "?",
                "tenants": [tenant(**changes) for changes in tenants],
                "engine": {"fidelity": "slots", "max_num_seqs": 8},
                "control": {"cap_max": 8, "episode_s": episode_s},
            }
        )

    return build
