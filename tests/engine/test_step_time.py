"""The law of the step time and its integer tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tenant_tuning.backends.sim.step_time import step_tables, step_time_ms
from vllm_tenant_tuning.profile import StepTimeCoefficients, load_profile, profile_names

COEFFICIENTS = StepTimeCoefficients(
    base_ms=1.5,
    weights_ms=3.0,
    dense_ms_per_token=0.02,
    sequence_ms=0.01,
    kv_read_ms_per_token=3e-5,
    prefill_attention_ms_per_pair=1e-6,
)


def test_the_law_term_by_term() -> None:
    # 200 tokens take 4 ms of compute beside 3 ms of weights: 5 ms, as in the triangle.
    assert step_time_ms(COEFFICIENTS, 200, 0, 0, 0) == pytest.approx(1.5 + 5.0)
    assert step_time_ms(COEFFICIENTS, 150, 50, 0, 0) == pytest.approx(1.5 + 5.0 + 0.5)
    assert step_time_ms(COEFFICIENTS, 150, 50, 1e5, 0) == pytest.approx(1.5 + 5.0 + 0.5 + 3.0)
    assert step_time_ms(COEFFICIENTS, 150, 50, 1e5, 2e6) == pytest.approx(12.0)


def test_the_roofline_has_its_two_sides() -> None:
    one, many = step_time_ms(COEFFICIENTS, [1, 1_000_000], 0, 0, 0)
    assert one == pytest.approx(1.5 + 3.0, rel=1e-4)  # reading the weights
    assert many == pytest.approx(1.5 + 20_000.0, rel=1e-6)  # computing the tokens


def test_arguments_broadcast() -> None:
    times = step_time_ms(COEFFICIENTS, np.zeros((3, 1)), [1, 2, 4, 8], 1000, 0)
    assert times.shape == (3, 4)
    assert (np.diff(times, axis=1) > 0).all()


@pytest.mark.parametrize("name", profile_names())
def test_the_tables_are_the_law(name: str) -> None:
    profile = load_profile(name)
    limits = profile.scheduler
    tables = step_tables(profile.step_time, limits.max_num_batched_tokens, limits.max_num_seqs)
    assert tables.dense_ps.shape == (limits.max_num_batched_tokens + 1,)
    assert tables.sequence_ps.shape == tables.kv_ps.shape == (limits.max_num_seqs + 1,)
    assert tables.dense_ps.dtype == tables.sequence_ps.dtype == tables.kv_ps.dtype == np.int64
    # Two chunks, 700 tokens after 1000 computed ones and 300 of a fresh prompt, beside n
    # sequences of 2000 tokens: token j of a chunk attends to what was computed and j more.
    pairs = sum(1000 + j for j in range(1, 701)) + sum(range(1, 301))
    doubled_pairs = 700 * (2 * 1000 + 700 + 1) + 300 * (300 + 1)
    assert doubled_pairs == 2 * pairs
    for n in (0, 1, limits.max_num_seqs // 4, limits.max_num_seqs):
        step_ps = (
            tables.dense_ps[1000 + n]
            + tables.sequence_ps[n]
            + tables.kv_ps[n] * 2000 * n
            + tables.prefill_pair_fs * doubled_pairs // 1000
        )
        expected_ms = step_time_ms(profile.step_time, 1000, n, 2000 * n, pairs)
        assert step_ps * 1e-9 == pytest.approx(float(expected_ms), rel=1e-4)


coefficient = st.floats(0, 50, allow_nan=False)


@given(
    base=st.floats(0.01, 50),
    weights=coefficient,
    dense=st.floats(0, 0.5),
    sequence=st.floats(0, 0.5),
)
def test_more_work_never_takes_less_time(
    base: float, weights: float, dense: float, sequence: float
) -> None:
    coefficients = StepTimeCoefficients(
        base_ms=base,
        weights_ms=weights,
        dense_ms_per_token=dense,
        sequence_ms=sequence,
        kv_read_ms_per_token=0,
        prefill_attention_ms_per_pair=0,
    )
    tables = step_tables(coefficients, 300, 40)
    assert tables.dense_ps[0] >= math.floor(base * 1e9)
    assert (np.diff(tables.dense_ps) >= 0).all()
    assert (np.diff(tables.sequence_ps) >= 0).all()
    assert tables.sequence_ps[0] == 0


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token"),
    # layers x KV heads x head dimension x 2 (keys and values) x 2 bytes
    [("h200-llama-3.1-8b", 32 * 8 * 128 * 4), ("h200-qwen3-8b", 36 * 8 * 128 * 4)],
)
def test_the_packaged_kv_cache_is_read_at_memory_speed(name: str, kv_bytes_per_token: int) -> None:
    read_s = load_profile(name).step_time.kv_read_ms_per_token * 1e-3
    assert 0.85 < kv_bytes_per_token / read_s / 4.8e12 < 1.0
