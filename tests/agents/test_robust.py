"""The robust controller: each requirement by what it does, its formulas by other ways to them."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
from scipy import stats
from telemetry_cases import changed, observe, step

from vllm_tenant_tuning.agents import Policy, make_policy
from vllm_tenant_tuning.agents.demand_forecast import DemandForecast, erlang_b, lost_share
from vllm_tenant_tuning.agents.engine_judge import EngineJudge
from vllm_tenant_tuning.agents.robust import RobustPolicy
from vllm_tenant_tuning.agents.robust_config import RobustConfig
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.scenario import Scenario, load_scenario

STUDY = load_scenario("study")
KNEE = load_scenario("moving_knee")
PREMIUM = load_scenario("premium_burst")
RESERVED = load_scenario("reserved")


def caps_of(policy: Policy, scenario: Scenario, seed: int) -> list[list[int]]:
    env = gym.make("VLLMTenantTuning-v0", scenario=scenario)
    policy.reset(scenario, seed)
    observation, info = env.reset(seed=seed)
    path, truncated = [], False
    while not truncated:
        observation, _, _, truncated, info = env.step(policy.act(observation, info))
        path.append(info["caps"].tolist())
    env.close()
    return path


@pytest.mark.parametrize(
    "name", ["study", "reserved", "premium_burst", "moving_knee", "h200_four_slos"]
)
def test_without_any_requirement_it_is_the_naive_rule(name: str) -> None:
    bare = make_policy("robust:-signal-scope-asymmetry-context")
    scenario = changed(name, episode_s=600)
    assert caps_of(bare, scenario, 10_000) == caps_of(make_policy("naive"), scenario, 10_000)


def test_without_asymmetry_context_and_signal_it_is_the_naive_rule_for_each_tenant() -> None:
    bare = make_policy("robust:-signal-asymmetry-context")
    scenario = changed("study", episode_s=600)
    expected = caps_of(make_policy("per_tenant_window_p99"), scenario, 10_000)
    assert caps_of(bare, scenario, 10_000) == expected


# --- signal ---------------------------------------------------------------------------------


def judge(scenario: Scenario = KNEE) -> EngineJudge:
    return EngineJudge(RobustConfig(), scenario)


def seen(running: float, slowdown: float, **readings: object) -> object:
    return observe((4, 4), mean_in_flight=running / 2, itl_p50_s=0.025 * slowdown, **readings)[
        "telemetry"
    ]


def test_a_slowed_engine_lowers_the_budget_by_the_slowdown() -> None:
    engine = judge()
    for _ in range(5):
        engine.learn(seen(4, 1.0), exhausted=True)
    assert engine.budget == math.inf
    for _ in range(2):  # the second window is all of 8: 8 at a third of the speed are 2.7 of 4
        engine.learn(seen(8, 3.0), exhausted=True)
    assert engine.budget == pytest.approx(6 / 3**0.3) or engine.budget == pytest.approx(8 / 3**0.3)


def test_noise_within_its_confidence_is_not_congestion() -> None:
    # Twelve tokens a reading: a slowdown of 1.5 in one of them has a bound of
    # ln 1.5 - 2 / sqrt(12) < ln 1.1
    engine = judge()
    for k in range(60):
        slowdown = 1.5 if k % 12 == 11 else 1.0
        engine.learn(seen(0.1, slowdown), exhausted=True)
    assert engine.budget == math.inf


def test_a_slowdown_that_pays_is_not_congestion() -> None:
    # As in continuous batching: twice as many sequences, tokens a quarter later.
    engine = judge()
    for running, slowdown in ((2, 1.0), (4, 1.1), (8, 1.25), (16, 1.6), (32, 2.2)):
        for _ in range(5):
            engine.learn(seen(running, slowdown, completed=2, good=2), exhausted=True)
    assert engine.budget == math.inf
    # The same, but requests miss their SLOs for it.
    for _ in range(5):
        engine.learn(seen(32, 2.2, completed=10, good=8), exhausted=True)
    assert engine.budget < 32


def test_the_intrinsic_tail_is_no_congestion() -> None:
    # A tenth of the requests miss the SLO whatever the engine does.
    engine = judge()
    for _ in range(50):
        engine.learn(seen(2, 1.0, completed=10, good=9), exhausted=True)
    for _ in range(50):
        engine.learn(seen(8, 1.3, completed=10, good=9), exhausted=True)
    assert engine.budget == math.inf


@pytest.mark.parametrize(
    "reading", [{"cluster_preemptions": 1}, {"cluster_num_requests_waiting": 6}]
)
def test_a_full_kv_cache_is_congestion(reading: dict[str, float]) -> None:
    engine = judge()
    engine.learn(seen(8, 1.0), exhausted=True)
    engine.learn(seen(8, 1.0), exhausted=True)
    assert engine.budget == math.inf
    engine.learn(seen(8, 1.0, **reading), exhausted=True)
    assert engine.budget == pytest.approx(8 / 1.1**0.3)


def test_the_budget_grows_back_only_when_it_is_used_up() -> None:
    engine = judge()
    engine.learn(seen(8, 1.0), exhausted=True)
    engine.learn(seen(8, 1.0, cluster_preemptions=1), exhausted=True)
    low = engine.budget
    for _ in range(5):
        engine.learn(seen(6, 1.0), exhausted=False)
    assert engine.budget == low
    engine.learn(seen(6, 1.0), exhausted=True)
    assert engine.budget == low + 1


@pytest.mark.parametrize(("n", "beyond"), [(50, 1), (50, 6), (400, 4), (400, 12)])
def test_violations_are_judged_by_wilsons_interval(n: int, beyond: int) -> None:
    engine = judge()
    engine._done = np.array([float(n), float(beyond)])
    level = 2 * stats.norm.cdf(2.0) - 1
    low = stats.binomtest(beyond, n).proportion_ci(level, method="wilson").low
    assert engine._violated() == (low > 0.01)


# --- asymmetry ------------------------------------------------------------------------------


def test_an_idle_tenant_keeps_its_cap_and_a_waiting_one_gains() -> None:
    policy = RobustPolicy()
    policy.reset(STUDY, 0)
    # a p99 and an occupancy at which the naive rule throttles both
    info = observe(
        (4, 4),
        latency_p99_s=11.0,
        window_completions=3,
        completed=3,
        good=3,
        in_flight=(0, 4),
        mean_in_flight=(0, 4),
        queued=(0, 4),
        itl_p50_s=0.025,
    )
    assert step(policy, STUDY, info) == [0, 1]


def test_with_the_naive_signal_a_waiting_tenant_is_not_throttled() -> None:
    policy = make_policy("robust:-signal-context")
    policy.reset(STUDY, 0)
    info = observe((4, 4), latency_p99_s=9.0, window_completions=3, queued=(0, 4), in_flight=1)
    assert step(policy, STUDY, info) == [-1, 0]


def test_a_reservation_moves_to_who_needs_it() -> None:
    policy = RobustPolicy()
    policy.reset(RESERVED, 0)
    info = observe((4, 4), queued=(0, 5), in_flight=(0, 4), mean_in_flight=(0, 4))
    assert step(policy, RESERVED, info) == [-1, 1]


# --- context --------------------------------------------------------------------------------


def test_a_weighty_tenant_gets_the_slots_and_may_use_the_others() -> None:
    policy = RobustPolicy()
    policy.reset(PREMIUM, 0)
    caps = [4, 4]
    for k in range(1, 21):
        info = observe(
            (caps[0], caps[1]),
            time_s=3.0 * k,
            arrived=(5, 6),
            completed=(4, 3),
            mean_in_flight=(4, 3),
            in_flight=(4, 3),
            queued=(2, 9),
        )
        caps = [cap + d for cap, d in zip(caps, step(policy, PREMIUM, info), strict=True)]
    assert caps[0] == 8  # its own share and the batch tenant's
    assert caps[1] <= 3


def forecast() -> DemandForecast:
    return DemandForecast(RobustConfig(), STUDY)


def test_the_rate_is_that_since_the_last_change() -> None:
    demand = forecast()
    for k in range(1, 41):
        demand.learn(observe((4, 4), time_s=3.0 * k, arrived=(3, 1))["telemetry"])
    np.testing.assert_allclose(demand.rate_per_s, [1.0, 1 / 3])
    # 12 in 3 s where 1 is expected: 12 ln 12 - 11 = 18.8 > 2.5^2 / 2; 4 where 3 are: 0.15
    demand.learn(observe((4, 4), time_s=123.0, arrived=(4, 12))["telemetry"])
    assert demand.rate_per_s[1] == pytest.approx(4.0)
    assert demand.rate_per_s[0] == pytest.approx(1.0, abs=0.05)
    # and the end of it: 0 where 12 are expected is a ratio of 12
    demand.learn(observe((4, 4), time_s=126.0, arrived=(3, 0))["telemetry"])
    assert demand.rate_per_s[1] == 0.0


def test_the_service_time_is_littles() -> None:
    demand = forecast()
    for k in range(1, 31):
        info = observe((4, 4), time_s=3.0 * k, mean_in_flight=(2.5, 5), completed=(3, 0))
        demand.learn(info["telemetry"])
    np.testing.assert_allclose(demand.service_s, [2.5, 0.0])


@pytest.mark.parametrize(("load", "slots"), [(0.25, 1), (4.0, 4), (4.0, 7), (30.0, 20)])
def test_erlang_b_and_the_queue_that_turns_away(load: float, slots: int) -> None:
    weights = [load**k / math.factorial(k) for k in range(slots + 1)]
    assert erlang_b(load, slots) == pytest.approx(weights[-1] / sum(weights))
    # M/M/c/K by its balance equations, 2 waiting places for each slot
    chain = list(weights)
    for _ in range(2 * slots):
        chain.append(chain[-1] * load / slots)
    lost = lost_share(load, slots, erlang_b(load, slots), 2.0)
    assert lost == pytest.approx(chain[-1] / sum(chain), rel=1e-4)


def test_slots_go_where_they_save_most_as_by_exhaustive_search() -> None:
    demand = DemandForecast(RobustConfig(urgency=0.0), PREMIUM)
    for k in range(1, 41):
        info = observe((4, 4), time_s=3.0 * k, arrived=(3, 6), mean_in_flight=2.5, completed=3)
        demand.learn(info["telemetry"])
    load = demand.rate_per_s * demand.service_s

    def lost(split: int) -> float:
        total = 0.0
        for i, slots in enumerate((split, 8 - split)):
            places = 3.0 / float(demand.service_s[i])
            share = lost_share(float(load[i]), slots, erlang_b(float(load[i]), slots), places)
            total += (5.0, 1.0)[i] * float(demand.rate_per_s[i]) * share
        return total

    shares = demand.deal(8, np.array([1, 1]), np.zeros(2), np.array([5.0, 1.0]))
    assert shares[0] == min(range(1, 8), key=lost)


# --- in the scenarios -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "static", "field"),
    [
        ("reserved", "static:4/4", "drops"),
        ("premium_burst", "static:8/8", "weighted_drops"),
        ("moving_knee", "static:3/3", "drops"),
    ],
)
def test_it_beats_the_best_static_caps_where_control_can_win(
    name: str, static: str, field: str
) -> None:
    env = make_env(load_scenario(name))
    differences = [
        getattr(play(env, RobustPolicy(), seed)[0], field)
        - getattr(play(env, make_policy(static), seed)[0], field)
        for seed in range(10_500, 10_504)
    ]
    env.close()
    assert max(differences) < 0


@pytest.mark.parametrize(
    "text", ["robust:", "robust:signal", "robust:-speed", "robust:-signal-signal", "robust:-"]
)
def test_unknown_requirements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted"):
        make_policy(text)
