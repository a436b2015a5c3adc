"""Known behaviours of vLLM's engine, seen through the gate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from twins.engine_cases import STEP_TIME, make_scenario, make_stream, play

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.profile import StepTimeCoefficients

LAW = StepTimeCoefficients(**STEP_TIME)


def play_beside_a_long_prompt(budget: int, long_prompt: int) -> tuple[Any, RequestOutcomes]:
    tenants: list[dict[str, Any]] = [{}, {}, {}]
    scenario = make_scenario(
        tenants=tenants, num_gpu_blocks=2000, max_num_batched_tokens=budget, interval_s=4.0
    )
    chat = (0.0, 64, 80)
    return play(scenario, make_stream([chat], [chat], [(0.2, long_prompt, 1)]), [[1, 1, 1]])


@pytest.mark.parametrize(
    ("budget", "first_chunk"),
    [(8192, 8190), (2048, 2046)],  # two decode: a chunk is what they leave of the budget
)
def test_a_long_prompt_stretches_every_other_tenants_next_token_by_its_chunk(
    budget: int, first_chunk: int
) -> None:
    backend, outcomes = play_beside_a_long_prompt(budget, 8192)
    seen = backend.telemetry_tenants[0]
    # the longest of 79 gaps is the 99th percentile; the histogram has 32 bins an octave
    mean_context = first_chunk / 2 if budget == 8192 else 8192 - 2 * first_chunk / 3
    least_ms = float(step_time_ms(LAW, first_chunk, 2, 128, 0))
    chunk_ms = float(step_time_ms(LAW, first_chunk, 2, 300, first_chunk * mean_context))
    for chat in seen[:2]:
        assert 1e-3 * least_ms / 1.022 <= chat["itl_p99_s"] <= 1.022e-3 * chunk_ms
        assert chat["itl_p50_s"] < 0.01
    # and by no more: the prompt's time in all is what the others end later
    _, alone = play_beside_a_long_prompt(budget, 1)
    later_s = outcomes.finished_s[:2] - alone.finished_s[:2]
    pairs = 8192 * 8193 / 2
    assert np.all(later_s < 1e-3 * (8192 * LAW.dense_ms_per_token + 1e-6 * pairs + 5 * 1.0))
    assert np.all(later_s > 0.9e-3 * (8192 * LAW.dense_ms_per_token + 1e-6 * pairs - 5 * 5.0))


def test_a_smaller_budget_shortens_the_stall_and_delays_the_long_prompt() -> None:
    large, large_outcomes = play_beside_a_long_prompt(8192, 8192)
    small, small_outcomes = play_beside_a_long_prompt(2048, 8192)
    worst_large = large.telemetry_tenants["itl_p99_s"][0, 0]
    worst_small = small.telemetry_tenants["itl_p99_s"][0, 0]
    assert worst_small < 0.4 * worst_large
    assert small_outcomes.ttft_s[2] > large_outcomes.ttft_s[2]


@pytest.mark.parametrize("seconds", [5e6, 9.2e6, 1e7])  # 2^62 and 2^63 ps are 4.6e6 and 9.2e6 s
def test_promises_and_patience_beyond_any_episode_are_as_none(seconds: float) -> None:
    tenant = {"slo_latency_p99_s": seconds, "slo_ttft_p99_s": seconds, "patience_s": seconds}
    scenario = make_scenario(tenants=[tenant], interval_s=500_000.0)
    stream = make_stream([(0.0, 64, 8), (400_000.0, 64, 8)])
    backend, outcomes = play(scenario, stream, [[0], [1]])
    assert (outcomes.outcome == Outcome.COMPLETED).all()
    assert backend.telemetry_tenants[0, 0]["good"] == 2


def test_a_request_larger_than_the_cache_is_refused_and_holds_nobody_up() -> None:
    scenario = make_scenario(num_gpu_blocks=100, block_size=16, interval_s=10.0)
    # 1600 tokens of cache; the last token of an output is not stored
    stream = make_stream([(0.0, 1590, 12), (0.0, 1590, 11), (0.0, 100, 10)])
    backend, outcomes = play(scenario, stream, [[1]])
    assert outcomes.outcome.tolist() == [Outcome.FAILED, Outcome.COMPLETED, Outcome.COMPLETED]
    assert outcomes.finished_s[0] == 0.0
    assert np.isnan(outcomes.scheduled_s[0])
    assert backend.telemetry_tenants["failed_total"][0, 0] == 1


def test_a_request_longer_than_max_model_len_is_refused() -> None:
    scenario = make_scenario(max_model_len=512, interval_s=10.0)
    stream = make_stream([(0.0, 500, 13), (0.0, 500, 12)])
    _, outcomes = play(scenario, stream, [[1]])
    assert outcomes.outcome.tolist() == [Outcome.FAILED, Outcome.COMPLETED]


def test_max_num_queued_reqs_refuses_what_comes_beyond() -> None:
    scenario = make_scenario(max_num_seqs=2, max_num_queued_reqs=5, interval_s=10.0)
    stream = make_stream([(0.0, 10, 50)] * 8)
    backend, outcomes = play(scenario, stream, [[8]])
    assert outcomes.outcome.tolist() == [Outcome.COMPLETED] * 5 + [Outcome.FAILED] * 3
    assert backend.telemetry_tenants["failed_total"][0, 0] == 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("max_num_seqs", [4, 64])
def test_every_request_that_fits_finishes_with_bounded_preemptions(
    policy: str, max_num_seqs: int
) -> None:
    rng = np.random.default_rng(0)
    tenants: list[dict[str, Any]] = [{"priority": 1}, {"priority": 0}]
    scenario = make_scenario(
        tenants=tenants,
        num_gpu_blocks=60,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        scheduling_policy=policy,
        interval_s=100.0,
    )
    requests = [
        [(0.0, int(rng.integers(1, 120)), int(rng.integers(1, 120))) for _ in range(60)]
        for _ in tenants
    ]
    backend, outcomes = play(scenario, make_stream(*requests), [[60, 60]])
    assert np.all(outcomes.outcome == Outcome.COMPLETED)
    assert outcomes.preemptions.sum() > 0
    # whoever pushes a request out is ahead of it and finishes first: once for each is the most
    assert outcomes.preemptions.max() <= 119
    assert backend.telemetry_cluster["kv_cache_usage"][0] == 0


def test_a_full_running_set_is_not_preempted_by_a_waiting_request_of_higher_priority() -> None:
    tenants: list[dict[str, Any]] = [{"priority": 5}, {"priority": 0}]
    scenario = make_scenario(
        tenants=tenants, max_num_seqs=2, scheduling_policy="priority", interval_s=10.0
    )
    low = [(0.0, 20, 100), (0.0, 20, 120), (0.0, 20, 100)]
    stream = make_stream(low, [(0.3, 20, 10)])
    _, outcomes = play(scenario, stream, [[3, 1]])
    assert not outcomes.preemptions.any()
    first_done_s = outcomes.finished_s[:2].min()
    assert first_done_s > 0.3
    assert outcomes.scheduled_s[3] == first_done_s  # as soon as there is room,
    assert outcomes.scheduled_s[2] > first_done_s  # and before the low one that waited longer


def test_priority_takes_memory_from_the_lowest() -> None:
    """Where blocks run out, the highest value goes first, though it runs ahead in the list."""
    tenants: list[dict[str, Any]] = [{"priority": 5}, {"priority": 0}]
    common: dict[str, Any] = {
        "tenants": tenants,
        "num_gpu_blocks": 8,
        "block_size": 4,
        "interval_s": 5.0,
    }
    stream = make_stream([(0.0, 13, 14)], [(0.0, 13, 14)])
    _, by_priority = play(make_scenario(**common, scheduling_policy="priority"), stream, [[1, 1]])
    _, by_order = play(make_scenario(**common), stream, [[1, 1]])
    assert by_priority.preemptions.tolist() == [1, 0]
    assert by_order.preemptions.tolist() == [0, 1]


def test_goodput_falls_beyond_some_admission_level_when_memory_is_tight() -> None:
    """Outputs are long against prompts, so that what is admitted does not fit for long."""
    good, preemptions, busy = {}, {}, {}
    caps = (2, 4, 8, 16, 32, 64)
    for cap in caps:
        scenario = make_scenario(
            tenants=[{"slo_latency_p99_s": 16.0, "slo_itl_p99_s": 0.012, "patience_s": 6.0}],
            num_gpu_blocks=200,
            block_size=16,
            interval_s=60.0,
        )
        rng = np.random.default_rng(1)
        arrivals = np.sort(rng.uniform(0, 60, 180))
        backend, outcomes = play(scenario, make_stream([(t, 40, 600) for t in arrivals]), [[cap]])
        good[cap] = float(backend.telemetry_tenants["good"][0, 0])
        preemptions[cap] = float(backend.telemetry_cluster["preemptions"][0])
        busy[cap] = int(outcomes.preemptions.sum())
    assert busy == preemptions
    best = max(caps, key=lambda cap: good[cap])
    assert 2 < best < 64
    assert good[64] < 0.8 * good[best]
    assert preemptions[best] < preemptions[64]
