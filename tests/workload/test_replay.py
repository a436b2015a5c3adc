"""Replay of trace windows against slow references and exact expectations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vllm_tenant_tuning.scenario import ScenarioError, TraceArrivals
from vllm_tenant_tuning.workload import TraceError
from vllm_tenant_tuning.workload.replay import TraceReplay
from vllm_tenant_tuning.workload.traces import Trace

FloatArray = npt.NDArray[np.float64]

Z = 4.5
TIMES_S = np.array([0.0, 1.0, 1.0, 4.0, 9.0, 10.0])


def trace(times_s: FloatArray = TIMES_S) -> Trace:
    n = len(times_s)
    return Trace(Path("t.csv"), times_s, np.arange(n) + 100, np.arange(n) + 1, 0)


def replay(horizon_s: float, times_s: FloatArray = TIMES_S, **changes: Any) -> TraceReplay:
    arrivals = TraceArrivals(process="trace", format="azure", file="t.csv", **changes)
    return TraceReplay(arrivals, trace(times_s), horizon_s)


def test_first_without_loop_plays_the_window_once() -> None:
    times, rows = replay(100.0, start="first", loop=False).sample(np.random.default_rng(0))
    np.testing.assert_array_equal(times, TIMES_S)
    np.testing.assert_array_equal(rows, np.arange(6))
    times, rows = replay(4.5, start="first", loop=False).sample(np.random.default_rng(0))
    np.testing.assert_array_equal(times, [0, 1, 1, 4])


def test_window_and_speedup() -> None:
    episode = replay(
        100.0, start="first", loop=False, window_start_s=1.0, window_s=8.0, speedup=4.0
    )
    times, rows = episode.sample(np.random.default_rng(0))
    # 9.0 is the first time that the window leaves out.
    np.testing.assert_array_equal(times, [0, 0, 0.75])
    np.testing.assert_array_equal(episode.output_tokens[rows], [2, 3, 4])
    np.testing.assert_array_equal(episode.prompt_tokens[rows], [101, 102, 103])


def test_loop_repeats_the_window() -> None:
    times, rows = replay(12.0, start="first", window_start_s=0.5, window_s=4.0, speedup=1.0).sample(
        np.random.default_rng(0)
    )
    np.testing.assert_allclose(times, [0.5, 0.5, 3.5, 4.5, 4.5, 7.5, 8.5, 8.5, 11.5])
    np.testing.assert_array_equal(rows, [0, 1, 2] * 3)


def test_window_without_an_end_lasts_one_mean_gap_longer_than_the_trace() -> None:
    times, _ = replay(30.0, start="first").sample(np.random.default_rng(0))
    np.testing.assert_allclose(times, np.concatenate((TIMES_S, TIMES_S + 12, [24, 25, 25, 28])))
    assert replay(30.0).mean_rate_per_s == pytest.approx(6 / 12)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("horizon_s", [3.0, 17.0, 60.0])
def test_random_start_shifts_the_repeated_window(horizon_s: float, loop: bool) -> None:
    window_s = 11.0
    episode = replay(horizon_s, window_s=window_s, loop=loop)
    repeats = 8 if loop else 1
    timeline = np.concatenate([TIMES_S + window_s * i for i in range(repeats)])
    row_of = np.tile(np.arange(6), repeats)
    for seed in range(60):
        times, rows = episode.sample(np.random.default_rng(seed))
        start_s = np.random.default_rng(seed).random() * window_s
        inside = (timeline >= start_s) & (timeline < start_s + horizon_s)
        np.testing.assert_allclose(times, timeline[inside] - start_s, atol=1e-12)
        np.testing.assert_array_equal(rows, row_of[inside])
        assert np.all((times >= 0) & (times <= horizon_s))


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("start", ["first", "random"])
@pytest.mark.parametrize("horizon_s", [2.0, 13.0, 30.0])
@pytest.mark.parametrize("sample_fraction", [1.0, 0.4])
def test_expected_uses_of_every_row(
    horizon_s: float, start: str, loop: bool, sample_fraction: float
) -> None:
    episode = replay(
        horizon_s,
        start=start,
        loop=loop,
        sample_fraction=sample_fraction,
        window_s=10.5,
        speedup=1.5,
    )
    n = 4000
    rng = np.random.default_rng(3)
    uses = np.array([np.bincount(episode.sample(rng)[1], minlength=TIMES_S.size) for _ in range(n)])
    error = uses.std(axis=0, ddof=1) / np.sqrt(n)
    assert np.all(np.abs(uses.mean(axis=0) - episode.expected_uses) <= Z * error + 1e-12)
    assert episode.mean_rate_per_s == pytest.approx(episode.expected_uses.sum() / horizon_s)


def test_sampling_is_reproducible_and_new_in_every_repetition() -> None:
    times_s = np.linspace(0, 99, 100)
    episode = replay(300.0, times_s, start="first", sample_fraction=0.5, window_s=100.0)
    first, again = (episode.sample(np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    kept = [set(first[1][first[0] // 100 == i].tolist()) for i in range(3)]
    assert kept[0] != kept[1] != kept[2]
    other, _ = episode.sample(np.random.default_rng(8))
    assert not np.array_equal(first[0], other)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"no request from window_start_s 5 on for 3 s.*lasts 10 s"
    ):
        replay(10.0, window_start_s=5.0, window_s=3.0)
    with pytest.raises(TraceError, match="no request from window_start_s 50"):
        replay(10.0, window_start_s=50.0)


def test_a_trace_of_one_time_needs_a_window() -> None:
    with pytest.raises(TraceError, match="a window_s is needed"):
        replay(10.0, np.zeros(3))
    assert replay(10.0, np.zeros(3), window_s=5.0).mean_rate_per_s == pytest.approx(3 / 5)


def test_too_many_requests_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"arrivals: .* requests; at most"):
        replay(1e7, speedup=1e4)
