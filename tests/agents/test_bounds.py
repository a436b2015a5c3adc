"""Every policy, whatever it sees: bounds, determinism, nothing kept between episodes."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from telemetry_cases import changed, observe

from vllm_tenant_tuning import Telemetry
from vllm_tenant_tuning.agents import Policy, make_policy
from vllm_tenant_tuning.agents.caps import fill, move_caps
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.spaces import ActionDecoder
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE

CONTROLLERS = (
    "aimd",
    "aimd:itl",
    "vegas",
    "vegas:itl",
    "gradient2",
    "gradient2:itl",
    "envoy_gradient",
    "envoy_gradient:itl",
    "utilization_gate",
    "quotas",
    "quotas:borrowing",
    "token_bucket",
    "slo_pi",
    "fair_share",
    "robust",
    "robust:-signal",
    "robust:-scope",
    "robust:-asymmetry",
    "robust:-context",
    "robust:-signal-scope-asymmetry-context",
)

SCENARIOS = (
    changed("premium_burst", cap_max=8),
    changed("reserved", max_delta=3),
    changed("reserved", {"cap_initial": 2}, cap_min=0, total_cap=5, max_delta=2),
    changed("premium_burst", cap_max=64, total_cap=30, max_delta=16),
)

READINGS = st.one_of(
    st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e9, 5e-324, 1e-300]),
    st.floats(0, 50),
    st.integers(0, 20).map(float),
)


def apply(scenario: Scenario, caps: Any, action: Any) -> tuple[Any, Any]:
    after, clipped = caps[None].copy(), np.zeros((1, caps.size), np.int64)
    ActionDecoder(scenario).apply(action[None], after, clipped, np.ones(1, np.bool_))
    return after[0], clipped[0]


@pytest.mark.parametrize("text", CONTROLLERS)
@settings(max_examples=40)
@given(data=st.data(), scenario=st.sampled_from(SCENARIOS))
def test_caps_stay_in_bounds_and_nothing_is_clipped(
    text: str, data: st.DataObject, scenario: Scenario
) -> None:
    policy = make_policy(text)
    policy.reset(scenario, 0)
    caps = np.array(scenario.caps_initial)
    control = scenario.control
    for k in range(6):
        tenants = data.draw(st.lists(READINGS, min_size=10, max_size=10))
        cluster = data.draw(st.lists(READINGS, min_size=5, max_size=5))
        telemetry = Telemetry(
            np.resize(tenants, (2, len(TENANT_DTYPE))), np.resize(cluster, len(CLUSTER_DTYPE))
        )
        if data.draw(st.booleans()):
            telemetry.cluster["time_s"] = 3.0 * k
        action = policy.act(np.zeros(1, np.float32), {"telemetry": telemetry, "caps": caps})
        caps, clipped = apply(scenario, caps, action)
        assert (caps >= control.cap_min).all()
        assert (caps <= control.cap_max).all()
        assert caps.sum() <= scenario.total_cap
        assert not clipped.any()


@pytest.mark.parametrize("text", CONTROLLERS)
def test_the_same_seed_gives_the_same_episode_also_after_another(text: str) -> None:
    scenario = changed("moving_knee", episode_s=150)
    env = gym.make("VLLMTenantTuning-v0", scenario=scenario)

    def caps_of(policy: Policy, seed: int) -> list[list[int]]:
        policy.reset(scenario, seed)
        observation, info = env.reset(seed=seed)
        path, truncated = [], False
        while not truncated:
            action = policy.act(observation, info)
            observation, _, _, truncated, info = env.step(action)
            path.append(info["caps"].tolist())
        return path

    used = make_policy(text)
    caps_of(used, 10_001)
    assert caps_of(used, 10_000) == caps_of(make_policy(text), 10_000)
    env.close()


# --- the shared helper ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((8, 8), (0, 0)),  # the total of 8 is spent
        ((8, 1), (1, -1)),  # lowered first, then raised
        ((math.nan, 2.9), (0, -1)),
        ((math.inf, -math.inf), (1, -1)),
        ((4.99, 4.0), (0, 0)),
    ],
)
def test_move_caps(wanted: tuple[float, float], expected: tuple[int, int]) -> None:
    scenario = changed("reserved")
    action = move_caps(np.array([4, 4]), np.array(wanted), scenario)
    assert (action - 1).tolist() == list(expected)


def test_room_goes_to_who_is_farthest_below() -> None:
    scenario = changed("reserved", {"cap_initial": 2}, max_delta=3, total_cap=7)
    # a step of 1 and one of 3, room for 3: b, b, then of equals the smaller cap, a
    assert (move_caps(np.array([2, 2]), [3, 8], scenario) - 3).tolist() == [1, 2]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.floats(0.1, 9)), min_size=1, max_size=6),
    st.integers(0, 90),
)
def test_fill_is_weighted_max_min_fair(entries: list[tuple[int, float]], total: int) -> None:
    demand = np.array([d for d, _ in entries])
    weights = np.array([w for _, w in entries])
    shares = fill(demand, weights, total)
    assert shares.sum() == min(total, demand.sum())
    assert (shares <= demand).all()
    # nobody who lacks has, by weight, more than a request less than anybody else
    for i in np.flatnonzero(shares < demand):
        for j in range(demand.size):
            assert (shares[j] - 1) / weights[j] <= (shares[i] + 1) / weights[i] + 1e-6


def test_observe_is_what_policies_read() -> None:
    info = observe((3, 5), queued=(1, 2), cluster_preemptions=4)
    assert info["telemetry"].tenants["queued"].tolist() == [1, 2]
    assert float(info["telemetry"].cluster["preemptions"]) == 4
