"""The engine against calculations by hand: one request, saturation, what the cache holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from twins.engine_cases import STEP_TIME, make_scenario, make_stream, play

from vllm_tenant_tuning.backends.base import Outcome

MICROSECOND = 1e-6


def step_s(prefill: int = 0, decodes: int = 0, context: int = 0, pairs: float = 0) -> float:
    """The law of the step time with the coefficients of `STEP_TIME`, written out."""
    compute_ms = STEP_TIME["dense_ms_per_token"] * (prefill + decodes)
    return 1e-3 * (
        STEP_TIME["base_ms"]
        + math.hypot(STEP_TIME["weights_ms"], compute_ms)
        + STEP_TIME["sequence_ms"] * decodes
        + STEP_TIME["kv_read_ms_per_token"] * context
        + STEP_TIME["prefill_attention_ms_per_pair"] * pairs
    )


def prefill_s(prompt: int) -> float:
    return step_s(prefill=prompt, pairs=prompt * (prompt + 1) / 2)


def decodes_s(prompt: int, output: int) -> float:
    """All tokens of a request alone but the first one: with i tokens out, prompt + i are read."""
    return sum(step_s(decodes=1, context=prompt + i) for i in range(1, output))


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (1, 2), (700, 1), (1000, 250), (8192, 40)])
def test_one_request_alone(prompt: int, output: int) -> None:
    frontend = {"request_s": 0.004, "prompt_token_s": 2e-6, "delay_s": 0.011}
    scenario = make_scenario(frontend=frontend, num_gpu_blocks=600, interval_s=30.0)
    backend, outcomes = play(scenario, make_stream([(0.123, prompt, output)]), [[1]])
    before_s = 0.004 + 2e-6 * prompt + 0.011
    assert outcomes.outcome[0] == Outcome.COMPLETED
    assert outcomes.scheduled_s[0] == pytest.approx(0.123 + before_s, abs=MICROSECOND)
    ttft_s = before_s + prefill_s(prompt)
    assert outcomes.ttft_s[0] == pytest.approx(ttft_s, abs=MICROSECOND)
    latency_s = ttft_s + decodes_s(prompt, output)
    assert outcomes.latency_s[0] == pytest.approx(latency_s, abs=MICROSECOND)
    if output > 1:
        tpot_s = decodes_s(prompt, output) / (output - 1)
        assert outcomes.tpot_s[0] == pytest.approx(tpot_s, abs=MICROSECOND)
        # the window's histogram has 32 bins an octave
        itl_s = backend.telemetry_tenants["itl_p50_s"][0, 0]
        assert itl_s == pytest.approx(step_s(decodes=1, context=prompt + output // 2), rel=0.022)


def test_a_prompt_longer_than_the_budget_goes_in_chunks() -> None:
    scenario = make_scenario(max_num_batched_tokens=512, num_gpu_blocks=200, interval_s=10.0)
    _, outcomes = play(scenario, make_stream([(0.0, 1300, 1)]), [[1]])
    chunks = [(512, 0), (512, 512), (276, 1024)]
    expected_s = sum(
        step_s(prefill=tokens, pairs=tokens * before + tokens * (tokens + 1) / 2)
        for tokens, before in chunks
    )
    assert outcomes.ttft_s[0] == pytest.approx(expected_s, abs=MICROSECOND)


def test_preempted_work_is_recomputed() -> None:
    """Two prompts fit, the second's growth does not: it goes, waits, and is computed again."""
    # 8 blocks of 4; each request takes ceil((prompt + output - 1) / 4) = 7 in the end
    scenario = make_scenario(
        num_gpu_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, interval_s=5.0
    )
    stream = make_stream([(0.0, 13, 14), (0.0, 13, 14)])
    backend, outcomes = play(scenario, stream, [[2]])
    # both prefill: 4 blocks each; three tokens later the first needs a fifth block
    now_s = step_s(prefill=26, pairs=2 * 13 * 14 / 2)
    for i in range(1, 4):
        now_s += step_s(decodes=2, context=2 * (13 + i))
    # the first goes on alone to its last token; 13 + 4 tokens of the second were forgotten
    for i in range(4, 14):
        now_s += step_s(decodes=1, context=13 + i)
    assert outcomes.finished_s[0] == pytest.approx(now_s, abs=MICROSECOND)
    now_s += prefill_s(13 + 4)
    for i in range(5, 14):
        now_s += step_s(decodes=1, context=13 + i)
    assert outcomes.finished_s[1] == pytest.approx(now_s, abs=MICROSECOND)
    assert outcomes.preemptions.tolist() == [0, 1]
    cluster = backend.telemetry_cluster[0]
    assert cluster["preemptions"] == 1
    assert cluster["generation_tokens"] == 28
    assert cluster["prompt_tokens"] == 26


def test_saturation_throughput() -> None:
    """With all sequences busy on long outputs, tokens come at n to a step."""
    n, prompt, output = 32, 16, 2000
    scenario = make_scenario(max_num_seqs=n, num_gpu_blocks=10_000, interval_s=5.0)
    stream = make_stream([(0.0, prompt, output)] * (2 * n))
    backend, _ = play(scenario, stream, [[2 * n]])
    tokens = backend.telemetry_cluster["generation_tokens"][0]
    # steps of 32 sequences whose context grows by one each, from the first tokens on
    now_s, steps = (
        prefill_s(0) - step_s() + step_s(prefill=n * prompt, pairs=n * prompt * 17 / 2),
        0,
    )
    while now_s <= 5.0:
        steps += 1
        now_s += step_s(decodes=n, context=n * (prompt + steps))
    assert tokens == n * steps
    assert backend.telemetry_cluster["num_requests_running"][0] == n
    assert backend.telemetry_cluster["num_requests_waiting"][0] == n


def test_the_cache_bounds_how_many_run() -> None:
    """Prompts of 10 blocks and short outputs: 25 of them fill 250 blocks, whatever the caps."""
    tenants: list[dict[str, Any]] = [{}]
    scenario = make_scenario(
        tenants=tenants, num_gpu_blocks=250, max_num_seqs=64, interval_s=0.1, block_size=16
    )
    stream = make_stream([(0.0, 155, 6)] * 200)
    backend, outcomes = play(scenario, stream, [[200]] * 3)
    seen = []
    for _ in range(10):
        backend.advance(np.array([[200]]), np.ones(1, dtype=bool))
        seen.append(float(backend.telemetry_cluster["num_requests_running"][0]))
    assert max(seen) == 25
    assert not outcomes.preemptions.any()


def test_patience_ends_at_the_gate_only() -> None:
    """A request that was sent is not dropped, however long the engine lets it wait."""
    scenario = make_scenario(tenants=[{"patience_s": 0.05}], max_num_seqs=1, interval_s=20.0)
    stream = make_stream([(0.0, 10, 100), (0.0, 10, 100), (0.0, 10, 100)])
    _, outcomes = play(scenario, stream, [[2]])
    assert outcomes.outcome.tolist() == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.DROPPED]
    assert outcomes.finished_s[2] == pytest.approx(0.05, abs=MICROSECOND)
    assert outcomes.ttft_s[1] > 0.05
