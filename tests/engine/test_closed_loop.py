"""Closed loops: against calculations by hand, and beside AIConfigurator's mean-field estimate."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.profile import EngineProfile, Frontend, load_profile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module


@pytest.fixture(scope="module")
def player(scripts: Callable[[str], ModuleType]) -> Any:
    return scripts("closed_loop").play_closed_loop


@pytest.fixture(scope="module")
def script(scripts: Callable[[str], ModuleType]) -> ModuleType:
    return scripts("h200_closed_loop")


@pytest.fixture(scope="module")
def kernels(script: ModuleType, shared: Callable[[str], Path]) -> EngineProfile:
    profile: EngineProfile = script.kernels_profile(shared("h200"))
    return profile


@pytest.fixture(scope="module")
def compared(
    script: ModuleType, shared: Callable[[str], Path], kernels: EngineProfile
) -> list[Any]:
    return [script.compare(row, kernels) for row in script.read_reference(shared("h200"))]


def integers(value: int, n: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.full(n, value, np.int64)


def test_one_request_at_a_time_takes_the_sum_of_its_steps(player: Any) -> None:
    served = load_profile("h200-llama-3.1-8b")
    profile = served.model_copy(update={"frontend": Frontend()})
    loop = player(profile, integers(1000, 3), integers(50, 3), 1)
    prefill_ms = step_time_ms(profile.step_time, 1000, 0, 0, 1000 * 1001 / 2)
    # The prompt's step gives the first token; 49 decodes read 1001 to 1049 tokens of context.
    decode_ms = step_time_ms(profile.step_time, 0, 1, np.arange(1001, 1050), 0)
    assert loop.ttft_s == pytest.approx([float(prefill_ms) / 1e3] * 3, rel=1e-3)
    assert loop.tpot_s == pytest.approx([float(decode_ms.mean()) / 1e3] * 3, rel=1e-3)
    request_s = float(prefill_ms + decode_ms.sum()) / 1e3
    assert loop.finished_s == pytest.approx([request_s, 2 * request_s, 3 * request_s], rel=1e-3)
    assert loop.output_tokens_per_s == pytest.approx(50 / request_s, rel=1e-3)


def test_no_more_than_the_connections_are_served_and_waiting_for_one_counts(player: Any) -> None:
    profile = load_profile("h200-llama-3.1-8b")
    n = 40
    loop = player(profile, integers(100, n), integers(20, n), 8, connections=4)
    alone = player(profile, integers(100, n), integers(20, n), 4)
    np.testing.assert_array_equal(loop.finished_s, alone.finished_s)
    # Requests 4 to 7 are submitted at once but wait for the first four to end.
    assert (loop.ttft_s[4:8] > loop.finished_s[:4].min()).all()
    # Little: of 8 submitted at any time 4 are served, so a request lasts twice as long.
    middle = slice(8, n - 8)
    duration_s = loop.ttft_s + loop.finished_s - loop.first_token_s
    alone_s = alone.ttft_s + alone.finished_s - alone.first_token_s
    assert duration_s[middle].mean() == pytest.approx(2 * alone_s[middle].mean(), rel=0.02)


def test_a_ramp_spreads_the_first_requests(player: Any) -> None:
    profile = load_profile("h200-llama-3.1-8b")
    served = profile.model_copy(update={"frontend": Frontend()})
    loop = player(served, integers(16, 8), integers(20, 8), 4, ramp_s=8.0)
    submitted_s = loop.first_token_s - loop.ttft_s
    assert submitted_s[:4] == pytest.approx([0, 2, 4, 6])
    assert (loop.ttft_s > 0).all()


@pytest.mark.shared
def test_tpot_and_throughput_are_within_15_percent_where_the_estimate_applies(
    compared: list[Any],
) -> None:
    applying = [one for one in compared if not one.not_applying]
    assert len(applying) == 20
    for one in applying:
        assert abs(one.tpot_error) < 0.15, one
        assert abs(one.requests_error) < 0.15, one
        # Started at once, prompts fill whole steps, which is what the estimate assumes.
        assert abs(one.at_once_requests_error) < 0.05, one
        assert one.preemptions == 0


@pytest.mark.shared
def test_the_reported_throughput_is_littles_law_with_a_ttft_of_its_own(
    compared: list[Any], kernels: EngineProfile
) -> None:
    # One full step of 8192 prompt tokens and 32 layers x 0.8 ms of dispatch, whatever the prompt,
    # times 1 + log2(c) / 8.
    full_step_ms = float(step_time_ms(kernels.step_time, 8192, 0, 0, 8192 * 1025 / 2))
    for one in compared:
        estimate = one.estimate
        factor = 1 + math.log2(estimate.concurrency) / 8
        if estimate.concurrency <= 32:
            assert one.implied_ttft_ms / factor == pytest.approx(full_step_ms + 25.6, rel=0.1)
        assert estimate.requests_per_s < estimate.steps_requests_per_s


@pytest.mark.shared
def test_where_prompts_do_not_fill_a_step_the_estimate_charges_a_full_one(
    compared: list[Any], kernels: EngineProfile
) -> None:
    def step_ms(prompt: int, context: int, c: int) -> float:
        pairs = prompt * (context + 1) / 2
        return float(step_time_ms(kernels.step_time, prompt, c, c * context, pairs))

    # Over 1024 output tokens the error of the decode steps would hide a prompt's step.
    short = [
        one.estimate
        for one in compared
        if one.not_applying == "prompts do not fill a step"
        and one.estimate.concurrency > 1
        and one.estimate.output_tokens <= 256
    ]
    assert len(short) == 3
    for estimate in short:
        c, prompt, output = estimate.concurrency, estimate.input_tokens, estimate.output_tokens
        decode_ms = (output - 1) * step_ms(0, prompt + output // 2, c)
        charged_ms = 1e3 * estimate.cycle_s - decode_ms
        assert charged_ms == pytest.approx(step_ms(8192, prompt, c), rel=0.2)
        assert charged_ms > 1.5 * step_ms(c * prompt, prompt, c)


@pytest.mark.shared
def test_with_room_for_all_the_largest_batch_agrees_too(
    script: ModuleType, compared: list[Any], kernels: EngineProfile
) -> None:
    (small,) = [one for one in compared if one.not_applying == "KV cache too small"]
    assert small.preemptions > 0
    blocks = 2 * kernels.kv_cache.num_gpu_blocks
    roomy = kernels.model_copy(
        update={"kv_cache": kernels.kv_cache.model_copy(update={"num_gpu_blocks": blocks})}
    )
    found = script.compare(small.estimate, roomy)
    assert found.preemptions == 0
    assert not found.not_applying
    assert abs(found.tpot_error) < 0.05
    assert abs(found.requests_error) < 0.05


@pytest.mark.shared
def test_the_committed_result_is_what_the_command_writes(compared: list[Any]) -> None:
    committed = json.loads((BENCHMARKS / "results" / "h200_closed_loop.json").read_text())
    names = ("tpot_ms", "requests_per_s", "implied_ttft_ms", "at_once_requests_error")
    for one, other in zip(compared, committed, strict=True):
        assert asdict(one.estimate) == other["estimate"]
        assert one.not_applying == other["not_applying"]
        for name in names:
            assert getattr(one, name) == pytest.approx(other[name], rel=1e-6)


def test_the_reasons_for_not_applying(script: ModuleType) -> None:
    row = script.Estimate(1024, 256, 8, 5.77, 4.574)
    assert row.not_applying(kv_tokens=8 * 1280) == ""
    assert row.not_applying(kv_tokens=8 * 1280 - 1) == "KV cache too small"
    assert replace(row, concurrency=7).not_applying(10**6) == "prompts do not fill a step"
    assert row.steps_requests_per_s == pytest.approx(8 / (256 * 5.77e-3))
