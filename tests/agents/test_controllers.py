"""The published controllers, each against its source's rule worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from telemetry_cases import changed, observe, step

from vllm_tenant_tuning.agents import Policy, make_policy
from vllm_tenant_tuning.agents.concurrency_limits import (
    Gradient2Config,
    Gradient2Policy,
    VegasConfig,
    VegasPolicy,
)
from vllm_tenant_tuning.agents.envoy_gradient import EnvoyGradientConfig, EnvoyGradientPolicy
from vllm_tenant_tuning.agents.fair_share import FairShareConfig, FairSharePolicy
from vllm_tenant_tuning.agents.quotas import QuotaConfig, QuotaPolicy
from vllm_tenant_tuning.scenario import Scenario, load_scenario

STUDY = load_scenario("study")  # 8 slots, caps 1 to 8, SLO 12 s, interval 3 s
WIDE = changed("study", cap_max=200, max_delta=100)  # steps that no bound cuts
PREMIUM = load_scenario("premium_burst")  # drop weights 5 and 1, 8 slots
RESERVED = load_scenario("reserved")  # total_cap 8


def begin(policy: Policy, scenario: Scenario, seed: int = 0) -> Policy:
    policy.reset(scenario, seed)
    return policy


def finished(caps: tuple[int, int], token_s: float, **readings: Any) -> dict[str, Any]:
    """An interval in which ten requests of 100 tokens completed at `token_s` for a token.

    All in flight together for 3 s: 1000 tokens took `1000 * token_s` seconds in the server.
    """
    return observe(
        caps,
        completed=10,
        output_tokens=1000,
        mean_in_flight=1000 * token_s / 3,
        **({"in_flight": caps} | readings),
    )


# --- AIMD -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caps", "readings", "expected"),
    [
        # int(40 * 0.9) = 36; above the SLO of 12 s
        ((40, 40), {"latency_p99_s": (12.1, 12.0), "in_flight": 40}, (-4, 1)),
        ((10, 11), {"in_flight": (5, 5)}, (1, 0)),  # 2 * 5 >= 10, 2 * 5 < 11
        ((20, 20), {"failed": (1, 0), "in_flight": 0}, (-2, 0)),
        ((20, 20), {"dropped": 9, "in_flight": 20}, (1, 1)),  # at the gate: no congestion
        ((20, 20), {"latency_p99_s": 99.0, "window_completions": 0, "in_flight": 20}, (1, 1)),
    ],
)
def test_aimd(caps: tuple[int, int], readings: dict[str, Any], expected: tuple[int, int]) -> None:
    info = observe(caps, **({"window_completions": 3} | readings))
    assert step(begin(make_policy("aimd"), WIDE), WIDE, info) == list(expected)


def test_aimd_on_the_itl_backs_off_above_a_quarter_more_than_the_fastest() -> None:
    policy = begin(make_policy("aimd:itl"), WIDE)
    assert step(policy, WIDE, observe((20, 20), itl_p50_s=0.02, in_flight=20)) == [1, 1]
    seen = observe((20, 20), itl_p50_s=(0.0251, 0.0249), in_flight=20)
    assert step(policy, WIDE, seen) == [-2, 1]


# --- Vegas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "ratio", "change"),
    [
        # log10 of 50 cut to a whole number is 1: alpha 3, beta 6, threshold 1
        (50, 1.0, 6),  # queue 0: + beta
        (50, 1.02, 6),  # ceil(50 * (1 - 1 / 1.02)) = 1
        (50, 1.04, 1),  # queue 2: below alpha
        (50, 1.1, 0),  # queue 5: between alpha and beta
        (50, 1.2, -1),  # queue 9: above beta
        # log10 of 150 is 2: alpha 6, beta 12, threshold 2
        (150, 1.01, 12),  # queue 2
        (150, 1.03, 2),  # queue 5
        (150, 1.05, 0),  # queue 8
        (150, 1.1, -2),  # queue 14
    ],
)
def test_vegas(limit: int, ratio: float, change: int) -> None:
    scenario = changed("study", {"cap_initial": limit}, cap_max=1000, max_delta=100)
    policy = begin(VegasPolicy(), scenario)
    caps = (limit, limit)
    assert step(policy, scenario, finished(caps, 0.02)) == [0, 0]  # the first is the fastest
    assert step(policy, scenario, finished(caps, 0.02 * ratio)) == [change, change]


def test_vegas_holds_while_less_than_half_is_used_and_shrinks_on_a_failure() -> None:
    policy = begin(VegasPolicy(), WIDE)
    caps = (50, 50)
    step(policy, WIDE, finished(caps, 0.02))
    assert step(policy, WIDE, finished(caps, 0.02, in_flight=(24, 25))) == [0, 6]
    assert step(policy, WIDE, finished(caps, 0.02, failed=(1, 0))) == [-1, 6]


def test_vegas_takes_the_fastest_anew_after_30_samples_for_each_request() -> None:
    # with a jitter of 0.5 to 1 and a limit of 4: after 60 to 120 samples
    scenario = changed("study", cap_max=4)
    policy = begin(VegasPolicy(VegasConfig(probe_multiplier=30)), scenario)
    step(policy, scenario, finished((4, 4), 0.01))
    slow = finished((4, 4), 0.03)  # queue ceil(4 * 2 / 3) = 3: neither below alpha nor above beta
    for _ in range(120):
        step(policy, scenario, slow)
    # the slow round trip is the fastest now, so there is no queue, and the limit grows to the cap
    lower = {"caps": np.array([3, 3]), "telemetry": slow["telemetry"]}
    assert step(policy, scenario, lower) == [1, 1]


def test_a_window_needs_ten_completions() -> None:
    policy = begin(VegasPolicy(), WIDE)
    step(policy, WIDE, finished((50, 50), 0.02))
    part = observe((50, 50), completed=(9, 5), output_tokens=500, mean_in_flight=5, in_flight=50)
    assert step(policy, WIDE, part) == [0, 0]
    # 18 completions, 1000 tokens in 30 s: slower than the fastest (queue 17); 10: the same
    assert step(policy, WIDE, part) == [-1, -1]


# --- Gradient2 ------------------------------------------------------------------------------


def gradient2_by_hand(limit: float, samples: list[float]) -> float:
    """The source's update on a list of round trips, always with the limit in use."""
    long_s, total = 0.0, 0.0
    for k, now_s in enumerate(samples, 1):
        if k <= 10:
            total += now_s
            long_s = total / k
        else:
            long_s = long_s * (1 - 2 / 601) + now_s * 2 / 601
        used = long_s
        if long_s / now_s > 2:
            long_s *= 0.95
        gradient = max(0.5, min(1.0, 1.5 * used / now_s))
        limit = limit * 0.8 + 0.2 * (limit * gradient + 4)
    return limit


@pytest.mark.parametrize(
    "samples", [[0.02] * 5, [0.02, 0.02, 0.02, 0.06, 0.09], [0.02] * 3 + [0.9]]
)
def test_gradient2(samples: list[float]) -> None:
    scenario = changed("study", {"cap_initial": 50}, cap_max=200, max_delta=100)
    policy = begin(Gradient2Policy(), scenario)
    cap = 50
    for k, now_s in enumerate(samples, 1):
        (change, _) = step(policy, scenario, finished((cap, cap), now_s))
        cap += change
        assert cap == math.floor(gradient2_by_hand(50.0, samples[:k]))


def test_gradient2_follows_the_cap_that_a_small_max_delta_allows() -> None:
    policy = begin(Gradient2Policy(Gradient2Config(queue_size=40)), STUDY)
    # the estimate would be 4 * 0.8 + 0.2 * 44 = 12 at once, and 30 after a few more
    for cap in (4, 5, 6):
        assert step(policy, STUDY, finished((cap, cap), 0.02)) == [1, 1]
    # From the cap in force, not from 12: just below 8, times 0.8 + 0.2 * 0.5, is 7.2, then, with a
    # gradient of 1.5 * 0.212 / 0.5, 6.7.
    policy.config = Gradient2Config(queue_size=0)  # type: ignore[attr-defined]
    assert step(policy, STUDY, finished((7, 7), 0.5)) == [0, 0]
    assert step(policy, STUDY, finished((7, 7), 0.5)) == [-1, -1]


# --- Envoy ----------------------------------------------------------------------------------


def test_envoy_measures_at_the_smallest_limit_then_follows_the_gradient() -> None:
    config = EnvoyGradientConfig(interval_s=30.0, jitter=0.0)
    policy = begin(EnvoyGradientPolicy(config), WIDE)
    assert step(policy, WIDE, observe((40, 40), time_s=0.0)) == [-37, -37]
    for k in range(1, 5):  # 50 completions in 5 intervals
        assert step(policy, WIDE, finished((3, 3), 0.02) | {}) == [0, 0], k
    last = finished((3, 3), 0.02)
    last["telemetry"].cluster["time_s"] = 18.0
    assert step(policy, WIDE, last) == [1, 1]  # back to the initial cap of 4
    step(policy, WIDE, finished((4, 4), 0.02))

    def limit(cap: int, ratio: float) -> int:
        scaled = cap * max(0.5, min(2.0, 1.25 / ratio))
        return math.floor(scaled + math.sqrt(scaled))

    for ratio in (1.0, 1.25, 1.7, 3.0, 0.5):
        seen = finished((40, 40), 0.02 * ratio)
        assert step(policy, WIDE, seen) == [limit(40, ratio) - 40] * 2
    again = finished((40, 40), 0.02)
    again["telemetry"].cluster["time_s"] = 48.0
    assert step(policy, WIDE, again) == [-37, -37]


# --- llm-d's gate ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "usage", "saturated"),
    [(5, 0.8, False), (6, 0.1, True), (0, 0.81, True), (math.nan, 0.1, True)],
)
def test_utilization_gate(waiting: float, usage: float, saturated: bool) -> None:
    info = observe(
        (4, 4), queued=(1, 0), cluster_num_requests_waiting=waiting, cluster_kv_cache_usage=usage
    )
    assert step(begin(make_policy("utilization_gate"), STUDY), STUDY, info) == (
        [-1, -1] if saturated else [1, 0]
    )
    # the tenant of weight 5 is critical: it passes a saturated server
    assert step(begin(make_policy("utilization_gate"), PREMIUM), PREMIUM, info) == (
        [1, -1] if saturated else [1, 0]
    )


# --- quotas, token bucket -------------------------------------------------------------------


def settle(policy: Policy, scenario: Scenario, **readings: Any) -> list[int]:
    """The caps to which the policy comes under readings that stay."""
    caps = list(scenario.caps_initial)
    for k in range(20):
        change = step(policy, scenario, observe((caps[0], caps[1]), time_s=3.0 * k, **readings))
        caps = [cap + delta for cap, delta in zip(caps, change, strict=True)]
    return caps


@pytest.mark.parametrize(
    ("demand", "own", "borrowing"),
    [
        ((0, 0), [6, 2], [6, 2]),
        ((2, 20), [6, 2], [2, 6]),  # four are lent
        ((20, 20), [6, 2], [6, 2]),  # taken back
        ((4, 3), [6, 2], [5, 3]),  # one is borrowed, one unused goes back to its owner
    ],
)
def test_quotas(demand: tuple[int, int], own: list[int], borrowing: list[int]) -> None:
    # floors of 1, the other 6 of 8 by weights 5 to 1: nominal quotas 6 and 2
    queued = {"queued": demand}
    assert settle(begin(QuotaPolicy(), PREMIUM), PREMIUM, **queued) == own
    lent = begin(QuotaPolicy(QuotaConfig(borrowing=True)), PREMIUM)
    assert settle(lent, PREMIUM, **queued) == borrowing


def test_quotas_refuse_other_weights() -> None:
    with pytest.raises(ValueError, match="weights: got 3 of them, expected one for each of 2"):
        begin(QuotaPolicy(QuotaConfig(weights=(1, 1, 1))), STUDY)


def test_token_bucket_spends_its_credit_and_earns_it_back() -> None:
    # nominal 4 of 8, 60 s of it are 240 tokens; 8 in flight cost 24 and earn 12 an interval
    policy = begin(make_policy("token_bucket"), STUDY)
    burst = observe((8, 8), mean_in_flight=(8, 0))
    for k in range(19):
        assert step(policy, STUDY, burst) == [0, 0], k
    assert step(policy, STUDY, burst) == [-1, 0]
    assert step(policy, STUDY, observe((4, 8), mean_in_flight=(4, 0))) == [0, 0]
    assert step(policy, STUDY, observe((4, 8), mean_in_flight=(3, 0))) == [1, 0]


# --- PI -------------------------------------------------------------------------------------


def test_slo_pi() -> None:
    policy = begin(make_policy("slo_pi"), WIDE)
    at = {"completed": 5, "output_tokens": 500, "window_completions": 5}
    # errors of 1 - 6 / 12 = 0.5: 40 + 1 * 0.5 + 0.25 * 0.5 = 40.625, then 40.75, 40.875, 41
    output = 40.0
    last = 0.0
    for _ in range(4):
        output += 1.0 * (0.5 - last) + 0.25 * 0.5
        last = 0.5
        change = step(policy, WIDE, observe((40, 40), latency_p99_s=6.0, **at))
        assert change == [math.floor(output) - 40] * 2
    # 18 s: error -0.5, a fall by 1 + 0.125
    output = 41.0 - 1.0 - 0.125
    assert (
        step(policy, WIDE, observe((41, 41), latency_p99_s=18.0, **at))
        == [math.floor(output) - 41] * 2
    )


def test_slo_pi_takes_longer_answers_for_what_they_are() -> None:
    policy = begin(make_policy("slo_pi"), WIDE)
    at = {"completed": 5, "window_completions": 5}
    step(policy, WIDE, observe((40, 40), latency_p99_s=12.0, output_tokens=500, **at))
    # twice as long and as late: usual length 105, error 1 - 24 / 12 * 105 / 200 = -0.05
    seen = observe((40, 40), latency_p99_s=24.0, output_tokens=(1000, 500), **at)
    assert step(policy, WIDE, seen) == [
        math.floor(40 - 1.25 * 0.05) - 40,
        math.floor(40 - 1.25) - 40,
    ]


# --- fair share -----------------------------------------------------------------------------


def test_fair_share_counts_tokens_at_vtcs_prices() -> None:
    policy = FairSharePolicy()
    policy.reset(PREMIUM, 0)  # weights 5 and 1
    step(
        policy,
        PREMIUM,
        observe((4, 4), prompt_tokens=(100, 70), output_tokens=(50, 10), in_flight=4),
    )
    assert policy.counters.tolist() == [(100 + 2 * 50) / 5, 70 + 2 * 10]


def test_fair_share_gives_the_next_slot_to_who_was_served_least() -> None:
    # 8 slots, floor 1; served 400 and 100 a slot alike: a slot's interval costs 500 / 8 = 62.5
    policy = FairSharePolicy(FairShareConfig())
    scenario = changed("reserved", max_delta=8)
    policy.reset(scenario, 0)
    seen = {"in_flight": 4, "mean_in_flight": 4, "queued": 9}
    # counters 400 and 100; each of b's further slots costs 25, so all 6 that are left go there
    info = observe((4, 4), prompt_tokens=(400, 100), **seen)
    assert step(policy, scenario, info) == [-3, 3]
    # without demand the budget is shared evenly
    assert step(policy, scenario, observe((4, 4))) == [0, 0]


def test_fair_share_lifts_who_comes_back() -> None:
    policy = FairSharePolicy()
    policy.reset(RESERVED, 0)
    busy = {"in_flight": (4, 0), "mean_in_flight": (4, 0)}
    for _ in range(5):
        step(policy, RESERVED, observe((4, 4), output_tokens=(100, 0), **busy))
    assert policy.counters.tolist() == [1000, 0]
    step(policy, RESERVED, observe((4, 4), output_tokens=(100, 100), in_flight=4))
    # lifted to 1000 as it comes back, then served 200 like the other
    assert policy.counters.tolist() == [1200, 1200]


# --- the oracle -----------------------------------------------------------------------------

KNEE = load_scenario("moving_knee")  # knee 8 to 150 s, then 4 to 300 s; two tenants, steps of 1


@pytest.mark.parametrize(
    ("time_s", "demand", "expected"),
    [
        (3.0, (9, 9), (4, 4)),
        (3.0, (9, 2), (6, 2)),
        (3.0, (0, 0), (4, 4)),  # what nobody needs is room for what comes
        # 150 s is two falls of 2 away: 8 may run until it begins
        (141.0, (9, 9), (4, 4)),
        (144.0, (9, 9), (4, 4)),
        (147.0, (9, 9), (3, 3)),
        (150.0, (9, 9), (2, 2)),
        (297.0, (9, 9), (2, 2)),
        (300.0, (9, 9), (4, 4)),
    ],
)
def test_the_oracle_keeps_to_the_scheduled_knee(
    time_s: float, demand: tuple[int, int], expected: tuple[int, int]
) -> None:
    wide = KNEE.model_copy(update={"control": KNEE.control.model_copy(update={"max_delta": 11})})
    policy = begin(make_policy("oracle"), KNEE)
    caps = (4, 4)
    wanted = policy.wanted_caps(observe(caps, time_s, queued=demand)["telemetry"], np.array(caps))
    assert tuple(wanted) == expected
    # what may fall at once need not begin early
    policy = begin(make_policy("oracle"), wide)
    wanted = policy.wanted_caps(observe(caps, 147.0, queued=(9, 9))["telemetry"], np.array(caps))
    assert tuple(wanted) == (4, 4)


def test_the_oracle_never_holds_back_in_a_pool_without_a_knee() -> None:
    policy = begin(make_policy("oracle"), STUDY)
    assert step(policy, STUDY, observe((4, 8), queued=0)) == [1, 0]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("h200_chat_batch", "the engine fidelity; accepted is slots"),
        ("reserved", "total_cap 8; accepted is none"),
        ("premium_burst", r"drop weights \[1.0, 5.0\]; accepted are equal ones"),
    ],
)
def test_the_oracle_refuses_what_it_does_not_know(scenario: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"policy 'oracle': got {message}"):
        begin(make_policy("oracle"), load_scenario(scenario))
