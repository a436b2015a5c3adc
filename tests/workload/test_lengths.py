"""Token lengths against their exact laws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vllm_tenant_tuning.scenario import FixedTokens, LognormalTokens, QuantileTokens
from vllm_tenant_tuning.workload.lengths import TraceLengths, length_sampler

Z = 4.5


def lognormal(median: float, sigma: float, low: int = 1, high: int = 131_072) -> LognormalTokens:
    return LognormalTokens(
        distribution="lognormal",
        median_tokens=median,
        sigma=sigma,
        min_tokens=low,
        max_tokens=high,
    )


def quantiles(probabilities: tuple[float, ...], tokens: tuple[float, ...]) -> QuantileTokens:
    return QuantileTokens(distribution="quantiles", probabilities=probabilities, tokens=tokens)


LAWS = [
    lognormal(300, 1.0),
    lognormal(300, 1.0, 100, 500),
    lognormal(3, 0.5),
    lognormal(1, 2.0, 1, 10),
    lognormal(700, 0.0),
    lognormal(700, 0.0, 1, 600),
    lognormal(20, 1.0, 5, 5),
    quantiles((0, 0.5, 0.9, 1), (1, 4, 4, 60.3)),
    quantiles((0, 1), (1, 1.2)),
    quantiles((0, 0.3, 1), (2.5, 2.5, 1000)),
    FixedTokens(distribution="fixed", tokens=12),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_mean_is_what_is_sampled(law: FixedTokens | LognormalTokens | QuantileTokens) -> None:
    sampler = length_sampler(law)
    tokens = sampler.sample(np.random.default_rng(1), 60_000, None)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 1
    rounding = 0.0
    if isinstance(law, LognormalTokens):
        rounding = 0.5 if law.median_tokens < 5 else 0.05
    error = tokens.std() / np.sqrt(tokens.size)
    assert abs(tokens.mean() - sampler.mean_tokens) <= Z * error + rounding + 1e-9


@pytest.mark.parametrize(("median", "sigma"), [(300, 1.0), (40, 0.3), (3, 0.5)])
def test_lognormal_has_the_rounded_law(median: float, sigma: float) -> None:
    tokens = length_sampler(lognormal(median, sigma)).sample(np.random.default_rng(2), 50_000, None)
    values = np.unique(tokens)
    observed = np.searchsorted(np.sort(tokens), values, side="right") / tokens.size
    expected = stats.lognorm(sigma, scale=median).cdf(values + 0.5)
    # Kolmogorov's bound of probability 1e-4; it is conservative for a discrete law.
    assert np.abs(observed - expected).max() < 2.23 / np.sqrt(tokens.size)


def test_lognormal_is_clipped() -> None:
    sampler = length_sampler(lognormal(300, 1.0, 100, 500))
    tokens = sampler.sample(np.random.default_rng(3), 20_000, None)
    law = stats.lognorm(1.0, scale=300)
    for bound, share in ((100, law.cdf(100.5)), (500, law.sf(499.5))):
        error = np.sqrt(share * (1 - share) / tokens.size)
        assert abs(np.mean(tokens == bound) - share) < Z * error
    assert (tokens.min(), tokens.max()) == (100, 500)


@pytest.mark.parametrize(("median", "sigma", "low", "high"), [(300, 1, 1, 4000), (2, 1.5, 1, 90)])
def test_lognormal_mean_is_within_half_a_token_of_the_exact_sum(
    median: float, sigma: float, low: int, high: int
) -> None:
    values = np.arange(low, high)
    exact = low + stats.lognorm(sigma, scale=median).sf(values + 0.5).sum()
    mean_tokens = length_sampler(lognormal(median, sigma, low, high)).mean_tokens
    assert mean_tokens == pytest.approx(exact, abs=0.5)
    if median > 100:
        assert mean_tokens == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("law", [law for law in LAWS if isinstance(law, QuantileTokens)], ids=str)
def test_quantile_mean_is_exact(law: QuantileTokens) -> None:
    grid = (np.arange(1_000_000) + 0.5) / 1_000_000
    reference = np.rint(np.interp(grid, law.probabilities, law.tokens)).mean()
    assert length_sampler(law).mean_tokens == pytest.approx(reference, rel=1e-5)


def test_quantiles_are_those_given() -> None:
    probabilities, tokens = (0, 0.25, 0.5, 0.9, 1), (10, 500, 800, 2000, 9000)
    drawn = length_sampler(quantiles(probabilities, tokens)).sample(
        np.random.default_rng(4), 40_000, None
    )
    for probability, value in zip(probabilities[1:-1], tokens[1:-1], strict=True):
        error = np.sqrt(probability * (1 - probability) / drawn.size)
        assert abs(np.mean(drawn < value) - probability) < Z * error + 1 / 300
    assert drawn.min() >= 10
    assert drawn.max() <= 9000


def test_trace_lengths_are_the_rows_behind_the_requests() -> None:
    tokens = np.array([5, 6, 9])
    sampler = TraceLengths(tokens, np.array([1.0, 0.0, 3.0]))
    rows = np.array([2, 0, 0, 1])
    drawn = sampler.sample(np.random.default_rng(0), 4, rows)
    np.testing.assert_array_equal(drawn, [9, 5, 5, 6])
    assert sampler.mean_tokens == (5 + 3 * 9) / 4
    assert TraceLengths(tokens, np.zeros(3)).mean_tokens == pytest.approx(20 / 3)
