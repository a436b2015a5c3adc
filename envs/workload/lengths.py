"""Samplers of prompt and output lengths in tokens: whole numbers of at least 1."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import FixedTokens, LognormalTokens, QuantileTokens

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class LengthSampler(Protocol):
    """Draws the lengths of a tenant's requests.

    Attributes:
        mean_tokens: expected length.
    """

    mean_tokens: float

    def sample(self, rng: np.random.Generator, n: int, rows: IntArray | None) -> IntArray:
        """Lengths of `n` requests: (n,) int64, at least 1.

        Args:
            rng: source of randomness.
            n: number of requests.
            rows: (n,) int64, the row of the trace behind each request; none without a trace.
        """


def length_sampler(lengths: FixedTokens | LognormalTokens | QuantileTokens) -> LengthSampler:
    """Prepare the sampler of a distribution (lengths of a trace: see `TraceLengths`)."""
    match lengths:
        case FixedTokens():
            return FixedLengths(lengths.tokens)
        case LognormalTokens():
            return LognormalLengths(lengths)
        case QuantileTokens():
            return QuantileLengths(lengths)


class FixedLengths:
    """Every request has the same number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.mean_tokens = float(tokens)
        self._tokens = tokens

    def sample(self, rng: np.random.Generator, n: int, rows: IntArray | None) -> IntArray:
        """Lengths of `n` requests (see `LengthSampler.sample`)."""
        return np.full(n, self._tokens, np.int64)


class LognormalLengths:
    """Lognormal lengths, rounded to whole tokens and clipped.

    `mean_tokens` is the closed form of the clipped law before rounding, which moves a mean by
    at most half a token and by much less unless most of the law lies on a few tokens.
    """

    def __init__(self, lengths: LognormalTokens) -> None:
        self._mu = math.log(lengths.median_tokens)
        self._sigma = lengths.sigma
        self._bounds = (lengths.min_tokens, lengths.max_tokens)
        self.mean_tokens = self._mean()

    def sample(self, rng: np.random.Generator, n: int, rows: IntArray | None) -> IntArray:
        """Lengths of `n` requests (see `LengthSampler.sample`)."""
        tokens = rng.standard_normal(n)
        tokens *= self._sigma
        tokens += self._mu
        np.exp(tokens, out=tokens)
        np.rint(tokens, out=tokens)
        np.maximum(tokens, self._bounds[0], out=tokens)
        np.minimum(tokens, self._bounds[1], out=tokens)
        return tokens.astype(np.int64)

    def _mean(self) -> float:
        low, high = self._bounds
        if self._sigma == 0:
            return float(min(max(round(math.exp(self._mu)), low), high))
        cdf = NormalDist().cdf
        z_low = (math.log(low) - self._mu) / self._sigma
        z_high = (math.log(high) - self._mu) / self._sigma
        between = cdf(z_high - self._sigma) - cdf(z_low - self._sigma)
        return (
            low * cdf(z_low)
            + math.exp(self._mu + self._sigma**2 / 2) * between
            + high * cdf(-z_high)
        )


class QuantileLengths:
    """Lengths drawn by inverting an empirical quantile function, rounded to whole tokens.

    `mean_tokens` is exact, rounding included.
    """

    def __init__(self, lengths: QuantileTokens) -> None:
        self._probabilities = np.array(lengths.probabilities)
        self._tokens = np.array(lengths.tokens)
        low, high = self._tokens[:-1], self._tokens[1:]
        width = high - low
        flat = width == 0
        # Between two points the length is uniform, so the mean of its rounding is an integral.
        rise = _integral_of_rounding(high) - _integral_of_rounding(low)
        means = np.where(flat, np.rint(low), rise / np.where(flat, 1, width))
        self.mean_tokens = float(np.diff(self._probabilities) @ means)

    def sample(self, rng: np.random.Generator, n: int, rows: IntArray | None) -> IntArray:
        """Lengths of `n` requests (see `LengthSampler.sample`)."""
        tokens: FloatArray = np.rint(np.interp(rng.random(n), self._probabilities, self._tokens))
        return tokens.astype(np.int64)


class TraceLengths:
    """Lengths taken from the trace behind the arrivals, request by request.

    Args:
        tokens: (n_rows,) int64, the lengths in the trace's window.
        weights: (n_rows,) float64, how often an episode is expected to use each row; all zero
            if it uses none.
    """

    def __init__(self, tokens: IntArray, weights: FloatArray) -> None:
        self._tokens = tokens
        total = weights.sum()
        self.mean_tokens = float(tokens @ weights / total if total > 0 else tokens.mean())

    def sample(self, rng: np.random.Generator, n: int, rows: IntArray | None) -> IntArray:
        """Lengths of `n` requests (see `LengthSampler.sample`)."""
        assert rows is not None  # arrivals come from the same trace
        return self._tokens[rows]


def _integral_of_rounding(x: FloatArray) -> FloatArray:
    """Integral from 0 to `x` of the nearest whole number."""
    nearest = np.floor(x + 0.5)
    return nearest * (x - nearest / 2)
