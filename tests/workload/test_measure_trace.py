"""Measurements of traces whose properties are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from vllm_tenant_tuning.baselines import measure_trace
from vllm_tenant_tuning.scenario import RandomBurstArrivals, load_scenario
from vllm_tenant_tuning.workload import TraceError
from vllm_tenant_tuning.workload.arrivals import arrival_sampler
from vllm_tenant_tuning.workload.traces import Trace


def test_dispersion_of_known_counts() -> None:
    # Counts 3, 0 and 1 in whole intervals of 2 s; the last arrival closes none.
    times_s = np.array([0.0, 0.5, 1.9, 4.5, 6.1])
    assert measure_trace.index_of_dispersion(times_s, 2.0) == pytest.approx(
        np.var([3, 0, 1], ddof=1) / np.mean([3, 0, 1]), rel=1e-12
    )
    assert np.isnan(measure_trace.index_of_dispersion(times_s, 4.0))


def test_burst_dispersion_has_its_limits() -> None:
    assert measure_trace.burst_dispersion(2.0, 5.0, 20.0, 1e-7) == pytest.approx(1.0, abs=1e-4)
    # Inter-arrivals of an interrupted Poisson process are hyperexponential: on rate 10,
    # switching off at 0.2 and on at 0.05, its squared CV is 1 + 2 * 10 * 0.2 / 0.25**2.
    assert measure_trace.burst_dispersion(2.0, 5.0, 20.0, 1e9) == pytest.approx(65.0, rel=1e-6)


def test_fit_recovers_bursts() -> None:
    scales = measure_trace.TIMESCALES_S
    exact = [measure_trace.burst_dispersion(2.0, 4.0, 30.0, scale) for scale in scales]
    assert measure_trace.fit_bursts(2.0, exact) == pytest.approx((4.0, 30.0), rel=1e-3)


def test_measures_what_was_sampled() -> None:
    arrivals = RandomBurstArrivals(
        process="random_bursts", on_rate_per_s=8, off_rate_per_s=0, mean_on_s=4, mean_off_s=12
    )
    times_s = arrival_sampler(arrivals, 60_000.0).sample(np.random.default_rng(0))
    tokens = np.arange(times_s.size) % 101 + 1
    trace = Trace(Path("t"), times_s - times_s[0], tokens, 2 * tokens, 0)
    measured = measure_trace.measure(trace)
    assert measured["rate_per_s"] == pytest.approx(2.0, rel=0.05)
    assert measured["random_bursts"]["mean_on_s"] == pytest.approx(4.0, rel=0.15)
    assert measured["random_bursts"]["mean_off_s"] == pytest.approx(12.0, rel=0.15)
    # Squared CV of the hyperexponential gaps: 1 + 2 * 8 * (1/4) / (1/4 + 1/12)**2 = 37.
    assert measured["interarrival_cv"] == pytest.approx(np.sqrt(37.0), rel=0.05)
    output = dict(
        zip(
            measured["output_tokens"]["probabilities"],
            measured["output_tokens"]["tokens"],
            strict=True,
        )
    )
    assert (output[0], output[0.5], output[1]) == (2, 102, 202)


def test_regular_arrivals_have_no_bursts() -> None:
    times_s = np.arange(0, 300, 0.5)
    tokens = np.ones(600, np.int64)
    measured = measure_trace.measure(Trace(Path("t"), times_s, tokens, tokens, 0))
    assert measured["random_bursts"] is None
    assert measured["dispersion"] == {"1s": 0.0, "10s": 0.0, "60s": 0.0}


def test_a_short_trace_is_refused() -> None:
    tokens = np.ones(3, np.int64)
    with pytest.raises(TraceError, match="at least 3 in 120 s"):
        measure_trace.measure(Trace(Path("t"), np.array([0.0, 1, 2]), tokens, tokens, 0))


def test_command_line_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        measure_trace.main(["absent.csv", "--format", "azure", "--trace-dir", str(tmp_path)])
    assert caught.value.code == 2
    assert "absent.csv" in capsys.readouterr().err


@pytest.mark.shared
@pytest.mark.parametrize(("tenant", "file"), [(0, "conv"), (1, "code")])
def test_azure_like_holds_what_the_command_prints(
    shared: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tenant: int, file: str
) -> None:
    path = shared(f"traces/AzureLLMInferenceTrace_{file}.csv")
    measure_trace.main([str(path), "--format", "azure"])
    printed = yaml.safe_load(capsys.readouterr().out)
    described = load_scenario("azure_like").tenants[tenant]
    for field in ("prompt_tokens", "output_tokens"):
        lengths = getattr(described, field)
        assert list(lengths.probabilities) == printed[field]["probabilities"]
        assert list(lengths.tokens) == printed[field]["tokens"]
    if described.arrivals.process == "gamma":
        assert described.arrivals.rate_per_s == printed["rate_per_s"]
        assert described.arrivals.cv == printed["interarrival_cv"]
    else:
        assert isinstance(described.arrivals, RandomBurstArrivals)
        for name in ("on_rate_per_s", "off_rate_per_s", "mean_on_s", "mean_off_s"):
            assert getattr(described.arrivals, name) == printed["random_bursts"][name]
