"""The robust controller on continuous batching: harm, headroom and room by hand, and scenarios."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from telemetry_cases import changed, observe

from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.agents.deadline_judge import DeadlineJudge
from vllm_tenant_tuning.agents.demand_forecast import DemandForecast
from vllm_tenant_tuning.agents.robust_config import RobustConfig
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.scenario import Scenario, load_scenario

CHAT_BATCH = load_scenario("h200_chat_batch")  # chat: TTFT 1 s; batch: patience 90 s, E2E 120 s
CAPS = (64, 8)


class Judged:
    """A judge and its forecast, fed the same telemetry; harmless unless readings say otherwise."""

    def __init__(self, scenario: Scenario = CHAT_BATCH, **config: Any) -> None:
        self.config = RobustConfig(**config)
        self.demand = DemandForecast(self.config, scenario)
        self.judge = DeadlineJudge(self.config, scenario, self.demand)
        self.time_s = 0.0

    def see(self, **readings: Any) -> list[float]:
        self.time_s += 1.0
        quiet: dict[str, Any] = {
            "admitted": (10, 1),
            "prompt_tokens": (10_000, 12_000),
            "completed": (10, 1),
            "good": (10, 1),
            "output_tokens": (1500, 250),
            "arrived": (10, 1),
            "in_flight": CAPS,
            "mean_in_flight": CAPS,
            "window_completions": (50, 5),
            "latency_p99_s": 5.0,
            "ttft_p99_s": (0.85, 10.0),
        }
        telemetry = observe(CAPS, time_s=self.time_s, **(quiet | readings))["telemetry"]
        self.demand.learn(telemetry)
        self.judge.learn(telemetry, np.array(CAPS))
        caps: list[float] = self.judge.caps.tolist()
        return caps


def test_who_comes_first_gets_all_and_between_headroom_and_harm_the_other_holds() -> None:
    assert Judged().see() == [256, 8]


def test_harm_cuts_by_the_share_of_work_and_by_what_is_lost() -> None:
    judged = Judged()
    caps = judged.see(ttft_p99_s=(1.5, 10.0))
    law = CHAT_BATCH.engine.profile.step_time  # type: ignore[union-attr]
    work = [
        n * (law.dense_ms_per_token * p + law.prefill_attention_ms_per_pair * p * p / 2)
        for n, p in zip(CAPS, (1000, 12_000), strict=True)
    ]
    assert judged.judge.harm.tolist() == [False, True]
    assert caps[1] == pytest.approx(8 * 0.4 ** (work[1] / sum(work)))
    # half a window later at the earliest it is cut again
    assert judged.see(ttft_p99_s=(1.5, 10.0))[1] == caps[1]
    assert judged.see(ttft_p99_s=(1.5, 10.0))[1] == caps[1]
    assert judged.see(ttft_p99_s=(1.5, 10.0))[1] < caps[1]


def test_a_tenant_that_loses_more_by_weight_grows_instead() -> None:
    # chat 4 % beyond its promise at weight 1; batch twice beyond at weight 0.2
    judged = Judged()
    assert judged.see(ttft_p99_s=(1.04, 10.0), latency_p99_s=(5.0, 240.0))[1] > 8
    judged = Judged()
    assert judged.see(ttft_p99_s=(1.5, 10.0), latency_p99_s=(5.0, 240.0))[1] < 8


def test_prompts_that_wait_inside_the_engine_are_harm() -> None:
    judged = Judged()
    assert judged.see(cluster_num_requests_waiting=40)[1] < 8
    judged = Judged()
    assert judged.see(cluster_num_requests_waiting=2)[1] == 8


def test_while_the_others_are_quiet_what_is_past_does_no_harm() -> None:
    late = {"ttft_p99_s": (1.5, 10.0), "queued": (0, 9), "in_flight": (64, 8)}
    judged = Judged(gpu_share=1e6)
    for _ in range(120):
        judged.see(queued=(0, 9), in_flight=(64, 8))
    mean = 64 * (1 - np.exp(-120 / 60))
    # 0.4 of the mean backlog: the same percentile is harm above it and past below it
    assert judged.see(**late | {"in_flight": (np.ceil(0.4 * mean) + 1, 8)})[1] < 8
    caps = judged.judge.caps.copy()
    quiet = judged.see(**late | {"in_flight": (np.floor(0.4 * mean) - 1, 8)})
    assert not judged.judge.harm[1]
    assert quiet[1] == pytest.approx(caps[1] + 2 * 0.4)
    # the engine's own queue is no memory
    judged.see(**late | {"in_flight": (1, 8), "cluster_num_requests_waiting": 40})
    assert judged.judge.harm[1]


def test_headroom_is_filled_with_as_much_prompt_work() -> None:
    judged = Judged(gpu_share=1e6)
    caps = judged.see(ttft_p99_s=(0.2, 10.0))
    law = CHAT_BATCH.engine.profile.step_time  # type: ignore[union-attr]
    prompt_ms = law.dense_ms_per_token * 12_000
    prompt_ms += law.prefill_attention_ms_per_pair * 12_000**2 / 2
    assert caps[1] == pytest.approx(8 + 0.5 * (0.7 - 0.2) * 1000 / prompt_ms)
    # no more than is needed
    judged = Judged(gpu_share=1e6)
    assert judged.see(ttft_p99_s=(0.2, 10.0), in_flight=(64, 3))[1] == 8


def test_room_bounds_the_later_tenant() -> None:
    # Chat's prompts alone take 40 * 1000 tokens a second: nothing is left, cap_min remains.
    busy = {
        "arrived": (60, 1),
        "admitted": (60, 1),
        "prompt_tokens": (60_000, 12_000),
        "completed": (60, 1),
    }
    judged = Judged()
    for _ in range(3):
        caps = judged.see(**busy)
    assert caps[1] == 1


def test_without_context_everyone_is_protected_from_everyone() -> None:
    judged = Judged(context=False)
    caps = judged.see(latency_p99_s=(5.0, 200.0), ttft_p99_s=(0.5, 10.0))
    assert judged.judge.harm.tolist() == [True, False]
    assert caps[0] < 64


@pytest.mark.parametrize(
    ("name", "static", "field", "sign"),
    [
        ("h200_long_context", "static:64/6", "weighted_drops", -1),
        ("h200_long_context", "static:64/6", "return_", 1),
        ("h200_flash_crowd", "static:224/96/4", "weighted_drops", -1),
    ],
)
def test_it_beats_the_best_static_caps_on_an_h200(
    name: str, static: str, field: str, sign: int
) -> None:
    env = make_env(load_scenario(name))
    differences = [
        getattr(play(env, make_policy("robust"), seed)[0], field)
        - getattr(play(env, make_policy(static), seed)[0], field)
        for seed in range(10_500, 10_504)
    ]
    env.close()
    assert min(sign * np.array(differences)) > 0


def test_it_tells_why_it_moves() -> None:
    policy: Any = make_policy("robust")
    env = make_env(changed("h200_chat_batch", episode_s=300))
    policy.reset(env.unwrapped.scenario, 10_000)  # type: ignore[attr-defined]
    observation, info = env.reset(seed=10_000)
    told: set[str] = set()
    truncated = False
    while not truncated:
        action = policy.act(observation, info)
        told |= set(policy.reasons)
        observation, _, _, truncated, info = env.step(action)
    env.close()
    assert "harms tenants of earlier deadlines" in told
    assert "tenants of earlier deadlines leave room" in told
