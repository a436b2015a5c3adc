"""Arrival processes against their closed forms, exact laws and slow references."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter
from scipy import stats

from vllm_tenant_tuning.scenario import Arrivals, ScenarioError
from vllm_tenant_tuning.workload.arrivals import ArrivalSampler, arrival_sampler

FloatArray = npt.NDArray[np.float64]

Z = 4.5
"""Standard errors allowed: one in 150 thousand correct samplers would miss it."""
P_VALUE = 1e-4

POISSON = {"process": "poisson", "rate_per_s": 0.7}
GAMMA = {"process": "gamma", "rate_per_s": 0.7, "cv": 2.0}
REGULAR = {"process": "gamma", "rate_per_s": 0.7, "cv": 0.2}
PERIODIC = {
    "process": "periodic_bursts",
    "on_rate_per_s": 4.0,
    "off_rate_per_s": 0.3,
    "period_s": 17.0,
    "on_s": 5.0,
    "phase_s": 14.5,
}
RANDOM = {
    "process": "random_bursts",
    "on_rate_per_s": 5.0,
    "off_rate_per_s": 0.4,
    "mean_on_s": 3.0,
    "mean_off_s": 9.0,
}
PIECEWISE = {
    "process": "piecewise",
    "rates_per_s": [1.0, 0.0, 3.0, 0.2],
    "durations_s": [4.0, 6.0, 2.5, 10.0],
}
PROCESSES: dict[str, dict[str, Any]] = {
    "poisson": POISSON,
    "gamma": GAMMA,
    "regular": REGULAR,
    "periodic": PERIODIC,
    "random": RANDOM,
    "piecewise": PIECEWISE,
}


def sampler(spec: dict[str, Any], horizon_s: float) -> ArrivalSampler:
    arrivals = TypeAdapter(Arrivals).validate_python(spec)
    return arrival_sampler(arrivals, horizon_s)  # type: ignore[arg-type]


def episodes(spec: dict[str, Any], horizon_s: float, n: int, seed: int = 0) -> list[FloatArray]:
    rng = np.random.default_rng(seed)
    process = sampler(spec, horizon_s)
    return [process.sample(rng) for _ in range(n)]


def rate_at(spec: dict[str, Any], time_s: float) -> float:
    """The rate as the scenario's docstrings word it."""
    if spec["process"] == "periodic_bursts":
        into_period_s = (time_s - spec["phase_s"]) % spec["period_s"]
        return float(spec["on_rate_per_s" if into_period_s < spec["on_s"] else "off_rate_per_s"])
    time_s %= sum(spec["durations_s"])
    for rate, duration_s in zip(spec["rates_per_s"], spec["durations_s"], strict=True):
        if time_s < duration_s:
            return float(rate)
        time_s -= duration_s
    raise AssertionError


@pytest.mark.parametrize("horizon_s", [0.5, 60.0, 100.0])
@pytest.mark.parametrize("name", PROCESSES)
def test_mean_rate_is_what_is_sampled(name: str, horizon_s: float) -> None:
    process = sampler(PROCESSES[name], horizon_s)
    counts = np.array([times.size for times in episodes(PROCESSES[name], horizon_s, 3000)])
    error = counts.std(ddof=1) / np.sqrt(counts.size)
    assert abs(counts.mean() - process.mean_rate_per_s * horizon_s) < Z * error


@pytest.mark.parametrize("horizon_s", [0.5, 33.0, 100.0])
@pytest.mark.parametrize("spec", [PERIODIC, PIECEWISE], ids=["periodic", "piecewise"])
def test_mean_rate_of_a_step_function_is_its_integral(
    spec: dict[str, Any], horizon_s: float
) -> None:
    grid_s = (np.arange(20_000) + 0.5) * horizon_s / 20_000
    integral = np.mean([rate_at(spec, time_s) for time_s in grid_s.tolist()])
    assert sampler(spec, horizon_s).mean_rate_per_s == pytest.approx(integral, abs=2e-3)


def test_mean_rates_in_closed_form() -> None:
    study_b = {
        "process": "periodic_bursts",
        "on_rate_per_s": 1.5,
        "off_rate_per_s": 0.1,
        "period_s": 180,
        "on_s": 5,
    }
    assert sampler(study_b, 1800).mean_rate_per_s == pytest.approx((5 * 1.5 + 175 * 0.1) / 180)
    assert sampler(RANDOM, 1800).mean_rate_per_s == pytest.approx((3 * 5 + 9 * 0.4) / 12)
    assert sampler(GAMMA, 1800).mean_rate_per_s == 0.7


@pytest.mark.parametrize(
    "spec",
    [
        *PROCESSES.values(),
        {"process": "poisson", "rate_per_s": 0},
        {"process": "gamma", "rate_per_s": 0.5, "cv": 100},
        {**PERIODIC, "on_s": 17.0},
        {**PERIODIC, "phase_s": 1e7},
        {**PERIODIC, "off_rate_per_s": 0, "on_rate_per_s": 0},
        {**PERIODIC, "period_s": 1e6, "phase_s": 5e5},
        {**RANDOM, "mean_on_s": 1e6, "mean_off_s": 1e-3},
        {**RANDOM, "on_rate_per_s": 0, "off_rate_per_s": 0},
        {"process": "piecewise", "rates_per_s": [2.0], "durations_s": [1e6]},
        {"process": "piecewise", "rates_per_s": [0.0, 1.0], "durations_s": [0.1, 0.1]},
    ],
)
@pytest.mark.parametrize("horizon_s", [1.0, 90.0])
def test_arrivals_are_ordered_and_within_the_horizon(
    spec: dict[str, Any], horizon_s: float
) -> None:
    for times in episodes(spec, horizon_s, 50):
        assert times.dtype == np.float64
        assert times.ndim == 1
        assert np.all(np.diff(times) >= 0)
        assert np.all((times >= 0) & (times <= horizon_s))


def test_poisson_counts_and_times() -> None:
    drawn = episodes(POISSON, 50.0, 4000)
    counts = np.array([times.size for times in drawn])
    values = np.arange(20, 52)
    edges = np.concatenate(([-1], values, [10_000]))
    observed = np.histogram(counts, edges + 0.5)[0]
    expected = np.diff(stats.poisson(35).cdf(edges)) * counts.size
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > P_VALUE
    assert stats.kstest(np.concatenate(drawn) / 50.0, "uniform").pvalue > P_VALUE


def test_poisson_gaps_are_exponential() -> None:
    (times,) = episodes(POISSON, 30_000.0, 1)
    assert stats.kstest(np.diff(times), stats.expon(scale=1 / 0.7).cdf).pvalue > P_VALUE


@pytest.mark.parametrize("cv", [0.2, 1.0, 1.094, 3.0])
def test_gamma_gaps_have_the_gamma_law(cv: float) -> None:
    (times,) = episodes({**GAMMA, "cv": cv}, 20_000.0, 1)
    gaps_s = np.diff(times)
    law = stats.gamma(cv**-2, scale=cv**2 / 0.7)
    # Shorter gaps drown in the rounding of times up to 20000 s.
    shortest_s = 1e-9
    long_enough = gaps_s[gaps_s > shortest_s]
    share = float(law.sf(shortest_s))
    error = np.sqrt(share * (1 - share) / gaps_s.size)
    assert abs(long_enough.size / gaps_s.size - share) <= Z * error
    conditional = stats.kstest(law.sf(long_enough) / share, "uniform")
    assert conditional.pvalue > P_VALUE
    kurtosis = float(law.stats(moments="k"))
    # Delta method for the ratio of sample deviation and mean.
    skew = 2 * cv
    error = cv * np.sqrt(((kurtosis + 2) / 4 + cv**2 - cv * skew) / gaps_s.size)
    assert abs(gaps_s.std() / gaps_s.mean() - cv) < Z * error


@pytest.mark.parametrize("cv", [0.2, 2.0])
def test_gamma_starts_in_equilibrium(cv: float) -> None:
    shape, scale_s = cv**-2, cv**2 / 0.7

    def equilibrium_cdf(x: Any) -> Any:
        """Integral of the survival function over the mean, by parts."""
        survival = stats.gamma(shape, scale=scale_s).sf(x)
        return 0.7 * x * survival + stats.gamma(shape + 1, scale=scale_s).cdf(x)

    first = [times[0] for times in episodes({**GAMMA, "cv": cv}, 400.0, 3000)]
    assert stats.kstest(first, equilibrium_cdf).pvalue > P_VALUE


def test_gamma_of_a_large_cv_keeps_its_rate() -> None:
    spec = {"process": "gamma", "rate_per_s": 1.0, "cv": 20.0}
    counts = np.array([times.size for times in episodes(spec, 10.0, 6000)])
    early = np.array([(times < 2.0).sum() for times in episodes(spec, 10.0, 6000, seed=1)])
    late = np.array([(times >= 8.0).sum() for times in episodes(spec, 10.0, 6000, seed=1)])
    for observed, expected in ((counts, 10.0), (early, 2.0), (late, 2.0)):
        error = observed.std(ddof=1) / np.sqrt(observed.size)
        assert abs(observed.mean() - expected) < Z * error
        assert error < 0.25 * expected


def test_bursts_come_at_their_phase() -> None:
    spec = {**PERIODIC, "off_rate_per_s": 0.0, "on_rate_per_s": 20.0}
    (times,) = episodes(spec, 17.0 * 40, 1)
    into_burst_s = (times - 14.5) % 17.0
    # Rounding can put an arrival on either side of an edge.
    assert np.all((into_burst_s < 5.0 + 1e-9) | (into_burst_s > 17.0 - 1e-9))
    assert stats.kstest(into_burst_s % 17.0 / 5.0, "uniform").pvalue > P_VALUE
    # A burst is under way at time 0: it started at 14.5 - 17 and lasts until 2.5.
    assert np.sum(times < 2.5) > 20
    assert not np.any((times > 2.5) & (times < 14.5))
    assert len(np.unique((times - 14.5) // 17.0)) == 41


@pytest.mark.parametrize("spec", [PERIODIC, PIECEWISE], ids=["periodic", "piecewise"])
def test_counts_of_a_step_function_follow_its_rate(spec: dict[str, Any]) -> None:
    n = 3000
    times = np.concatenate(episodes(spec, 50.0, n))
    counts = np.histogram(times, 100, range=(0, 50))[0]
    fine = np.array([rate_at(spec, (i + 0.5) * 0.01) for i in range(5000)])
    expected = fine.reshape(100, 50).sum(axis=1) * 0.01 * n
    silent = expected == 0
    assert np.all(counts[silent] == 0)
    chi2 = np.sum((counts[~silent] - expected[~silent]) ** 2 / expected[~silent])
    assert stats.chi2(np.sum(~silent)).sf(chi2) > P_VALUE


def test_random_bursts_are_stationary_from_the_start() -> None:
    """The counts of ten equal parts of the episode have one mean."""
    parts = np.array(
        [np.histogram(times, 10, range=(0, 5.0))[0] for times in episodes(RANDOM, 5.0, 8000)]
    )
    error = parts.std(axis=0, ddof=1) / np.sqrt(len(parts))
    assert np.all(np.abs(parts.mean(axis=0) - 0.5 * 1.55) < Z * error)


@pytest.mark.parametrize("timescale_s", [0.5, 5.0, 40.0])
def test_random_bursts_have_the_dispersion_of_the_mmpp(timescale_s: float) -> None:
    """Fischer and Meier-Hellstern (1993), variance of the counts of a two-state MMPP."""
    counts = np.array([times.size for times in episodes(RANDOM, timescale_s, 8000)])
    on, off, to_off, to_on = 5.0, 0.4, 1 / 3.0, 1 / 9.0
    mean_rate, decay = 1.55, to_off + to_on
    spread = 2 * (on - off) ** 2 * to_off * to_on / (decay**3 * mean_rate)
    x = decay * timescale_s
    expected = 1 + spread * (1 - (1 - np.exp(-x)) / x)
    variance = counts.var(ddof=1)
    fourth = np.mean((counts - counts.mean()) ** 4)
    error = np.sqrt((fourth - variance**2) / counts.size) / counts.mean()
    assert abs(variance / (mean_rate * timescale_s) - expected) < Z * error


def test_random_bursts_equal_an_event_by_event_reference() -> None:
    rng = np.random.default_rng(5)

    def reference() -> int:
        on = rng.random() < 0.25
        now_s, count = 0.0, 0
        while True:
            arrival_s = rng.exponential(1 / (5.0 if on else 0.4))
            change_s = rng.exponential(3.0 if on else 9.0)
            now_s += min(arrival_s, change_s)
            if now_s > 20.0:
                return count
            if arrival_s < change_s:
                count += 1
            else:
                on = not on

    slow = [reference() for _ in range(3000)]
    fast = [times.size for times in episodes(RANDOM, 20.0, 3000)]
    assert stats.ks_2samp(slow, fast).pvalue > P_VALUE


@pytest.mark.parametrize("name", ["gamma", "random"])
def test_running_out_of_draws_changes_no_law(name: str) -> None:
    """Drawn in lumps of a few gaps or sojourns, so that every episode needs many."""
    rng = np.random.default_rng(9)
    process: Any = sampler(PROCESSES[name], 60.0)
    if name == "gamma":
        process._n_draws = 3
    else:
        process._sojourns_s = [means_s[:2] for means_s in process._sojourns_s]
    lumped = [process.sample(rng) for _ in range(2000)]
    whole = episodes(PROCESSES[name], 60.0, 2000, seed=10)
    for low_s, high_s in ((0.0, 60.0), (0.0, 10.0), (50.0, 60.0)):
        few, many = (
            [int(np.sum((times >= low_s) & (times < high_s))) for times in drawn]
            for drawn in (lumped, whole)
        )
        assert stats.ks_2samp(few, many).pvalue > P_VALUE


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"process": "poisson", "rate_per_s": 1e5}, "requests"),
        ({"process": "gamma", "rate_per_s": 1e5, "cv": 1}, "requests"),
        ({**PERIODIC, "period_s": 1e-6, "on_s": 1e-7}, "changes of rate"),
        ({**RANDOM, "mean_on_s": 1e-9, "mean_off_s": 1e-9}, "changes of rate"),
        ({"process": "piecewise", "rates_per_s": [1], "durations_s": [1e-9]}, "changes of rate"),
    ],
)
def test_an_episode_that_fits_no_memory_is_refused(spec: dict[str, Any], what: str) -> None:
    with pytest.raises(ScenarioError, match=rf"arrivals: .* {what}; at most 20000000"):
        sampler(spec, 1800.0)
