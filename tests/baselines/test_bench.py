"""The measurements of speed measure the load that they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tenant_tuning.baselines.bench_engine import engine_real_time_ratio, plot_engine_scaling


def test_the_measured_load_is_the_stated_one() -> None:
    measured = engine_real_time_ratio(5.0, 300.0, n_tenants=2)
    # Little's law: the mean number running is the rate times the mean time in the engine
    in_engine_s = measured["mean_ttft_s"] + 255 * measured["mean_tpot_s"]
    rate_per_s = measured["completed"] / 300.0
    assert rate_per_s == pytest.approx(5.0, rel=0.1)
    assert measured["mean_running"] == pytest.approx(rate_per_s * in_engine_s, rel=0.05)
    assert measured["real_time_ratio"] > 0


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    rows = [{"x": 1, "microseconds": 2.0}, {"x": 2, "microseconds": 3.0}]
    plot_engine_scaling(dict.fromkeys("abcd", rows), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
