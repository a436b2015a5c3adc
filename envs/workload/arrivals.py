"""Samplers of arrival times on `[0, horizon_s]` for the parametric arrival processes.

Each sampler is prepared once for a horizon and then draws whole episodes without a loop over
requests or bursts. A rate that is constant by pieces is sampled by time change: a Poisson
process of unit rate runs on the axis of the cumulative rate, whose inverse, linear between the
breakpoints, maps it back to seconds (Lewis and Shedler, 1979).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import (
    GammaArrivals,
    PeriodicBurstArrivals,
    PiecewiseArrivals,
    PoissonArrivals,
    RandomBurstArrivals,
    ScenarioError,
)

FloatArray = npt.NDArray[np.float64]

MAX_EVENTS = 20_000_000
"""The most requests, or changes of rate, that an episode of one tenant may be expected to have."""


class ArrivalSampler(Protocol):
    """Draws the arrival times of one tenant for one episode.

    Attributes:
        mean_rate_per_s: expected arrivals over the horizon, divided by the horizon.
    """

    mean_rate_per_s: float

    def sample(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times in seconds: (n,) float64 in `[0, horizon_s]`, not decreasing."""


def arrival_sampler(
    arrivals: PoissonArrivals
    | GammaArrivals
    | PeriodicBurstArrivals
    | RandomBurstArrivals
    | PiecewiseArrivals,
    horizon_s: float,
) -> ArrivalSampler:
    """Prepare the sampler of a parametric process (traces: see `replay.TraceReplay`).

    Raises:
        ScenarioError: an episode would be expected to have more than `MAX_EVENTS` requests or
            changes of rate.
    """
    sampler: ArrivalSampler
    match arrivals:
        case PoissonArrivals():
            sampler = PoissonProcess(arrivals.rate_per_s, horizon_s)
        case GammaArrivals():
            sampler = GammaRenewalProcess(arrivals.rate_per_s, arrivals.cv, horizon_s)
        case PeriodicBurstArrivals():
            check_events("changes of rate", 2 * horizon_s / arrivals.period_s)
            sampler = PiecewiseRateProcess(*_burst_rates(arrivals, horizon_s), horizon_s)
        case RandomBurstArrivals():
            mean_cycle_s = arrivals.mean_on_s + arrivals.mean_off_s
            check_events("changes of rate", 2 * horizon_s / mean_cycle_s)
            sampler = RandomBurstProcess(arrivals, horizon_s)
        case PiecewiseArrivals():
            n_segments = len(arrivals.durations_s) * horizon_s / sum(arrivals.durations_s)
            check_events("changes of rate", n_segments)
            sampler = PiecewiseRateProcess(*_repeated_rates(arrivals, horizon_s), horizon_s)
    check_events("requests", sampler.mean_rate_per_s * horizon_s)
    return sampler


def check_events(what: str, expected: float) -> None:
    """Refuse an episode that would not fit into memory.

    Raises:
        ScenarioError: `expected` is above `MAX_EVENTS`.
    """
    if expected > MAX_EVENTS:
        raise ScenarioError(
            f"arrivals: an episode would have about {expected:.3g} {what}; "
            f"at most {MAX_EVENTS} are accepted"
        )


class PoissonProcess:
    """Poisson arrivals of constant rate.

    Args:
        rate_per_s: arrivals a second, at least 0.
        horizon_s: length of an episode in seconds.
    """

    def __init__(self, rate_per_s: float, horizon_s: float) -> None:
        self.mean_rate_per_s = rate_per_s
        self._horizon_s = horizon_s

    def sample(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times in seconds: (n,) float64 in `[0, horizon_s]`, not decreasing."""
        return _poisson_points(rng, self.mean_rate_per_s * self._horizon_s, self._horizon_s)


class GammaRenewalProcess:
    """Renewal arrivals with Gamma gaps, stationary from time 0 on.

    Gaps have shape `1 / cv**2` and mean `1 / rate_per_s`. Time 0 falls into a gap as seen by an
    observer who comes at random: that gap is drawn by its length (a Gamma of one shape more)
    and a uniform part of it remains (Cox, Renewal Theory, 1962, section 5.3). So the rate is
    `rate_per_s` over any horizon.

    Args:
        rate_per_s: arrivals a second, above 0.
        cv: coefficient of variation of the gaps, above 0.
        horizon_s: length of an episode in seconds.
    """

    def __init__(self, rate_per_s: float, cv: float, horizon_s: float) -> None:
        self.mean_rate_per_s = rate_per_s
        self._horizon_s = horizon_s
        self._shape = cv**-2
        self._scale_s = cv**2 / rate_per_s
        expected = rate_per_s * horizon_s
        # Four standard deviations of the count, so that a second draw is rare.
        self._n_draws = int(expected + 4 * cv * np.sqrt(expected)) + 8

    def sample(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times in seconds: (n,) float64 in `[0, horizon_s]`, not decreasing."""
        gaps_s = rng.standard_gamma(self._shape, self._n_draws) * self._scale_s
        gaps_s[0] = rng.random() * rng.standard_gamma(self._shape + 1) * self._scale_s
        arrival_s = np.cumsum(gaps_s)
        while arrival_s[-1] <= self._horizon_s:
            gaps_s = rng.standard_gamma(self._shape, self._n_draws) * self._scale_s
            arrival_s = np.concatenate((arrival_s, arrival_s[-1] + np.cumsum(gaps_s)))
        return arrival_s[: np.searchsorted(arrival_s, self._horizon_s, side="right")]


class PiecewiseRateProcess:
    """Poisson arrivals whose rate is a fixed step function of time.

    Args:
        edges_s: (k + 1,) seconds, not decreasing, from at most 0 to at least `horizon_s`.
        rates_per_s: (k,) arrivals a second between the edges, at least 0.
        horizon_s: length of an episode in seconds.
    """

    def __init__(self, edges_s: FloatArray, rates_per_s: FloatArray, horizon_s: float) -> None:
        self._edges_s = np.clip(edges_s, 0, horizon_s)
        self._cumulative = _cumulative(self._edges_s, rates_per_s)
        self.mean_rate_per_s = float(self._cumulative[-1] / horizon_s)

    def sample(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times in seconds: (n,) float64 in `[0, horizon_s]`, not decreasing."""
        return _invert(rng, self._edges_s, self._cumulative)


class RandomBurstProcess:
    """The two-state Markov-modulated Poisson process, stationary from time 0 on.

    Sojourns have no memory, so drawing the state at time 0 by its share of the time and its
    sojourn afresh makes the start stationary (Fischer and Meier-Hellstern, The
    Markov-modulated Poisson process cookbook, 1993).

    Args:
        arrivals: rates and mean sojourns of the two states.
        horizon_s: length of an episode in seconds.
    """

    def __init__(self, arrivals: RandomBurstArrivals, horizon_s: float) -> None:
        cycle_s = arrivals.mean_on_s + arrivals.mean_off_s
        self._probability_on = arrivals.mean_on_s / cycle_s
        self.mean_rate_per_s = (
            arrivals.on_rate_per_s * self._probability_on
            + arrivals.off_rate_per_s * (1 - self._probability_on)
        )
        self._horizon_s = horizon_s
        expected = horizon_s / cycle_s
        # A cycle's deviation is at most its mean: four deviations, so a second draw is rare.
        n_cycles = int(expected + 4 * np.sqrt(expected)) + 4
        sojourns_s = (arrivals.mean_on_s, arrivals.mean_off_s)
        rates_per_s = (arrivals.on_rate_per_s, arrivals.off_rate_per_s)
        self._sojourns_s = [np.tile(order, n_cycles) for order in (sojourns_s[::-1], sojourns_s)]
        self._rates_per_s = [np.array(order) for order in (rates_per_s[::-1], rates_per_s)]

    def sample(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times in seconds: (n,) float64 in `[0, horizon_s]`, not decreasing."""
        starts_on = int(rng.random() < self._probability_on)
        means_s = self._sojourns_s[starts_on]
        changes_s = np.cumsum(rng.standard_exponential(means_s.size) * means_s)
        while changes_s[-1] < self._horizon_s:
            more_s = np.cumsum(rng.standard_exponential(means_s.size) * means_s)
            changes_s = np.concatenate((changes_s, changes_s[-1] + more_s))
        n_segments = int(np.searchsorted(changes_s, self._horizon_s)) + 1
        edges_s = np.empty(n_segments + 1)
        edges_s[0] = 0.0
        edges_s[1:] = changes_s[:n_segments]
        edges_s[-1] = self._horizon_s
        rates_per_s = np.resize(self._rates_per_s[starts_on], n_segments)
        return _invert(rng, edges_s, _cumulative(edges_s, rates_per_s))


def _burst_rates(
    arrivals: PeriodicBurstArrivals, horizon_s: float
) -> tuple[FloatArray, FloatArray]:
    """Edges and rates of periodic bursts, from before time 0 to after the horizon."""
    first_s = arrivals.phase_s % arrivals.period_s - arrivals.period_s
    n_bursts = int((horizon_s - first_s) / arrivals.period_s) + 1
    starts_s = first_s + np.arange(n_bursts + 1) * arrivals.period_s
    # With on_s equal to period_s rounding must not put the end of a burst behind the next.
    ends_s = np.minimum(starts_s[:-1] + arrivals.on_s, starts_s[1:])
    edges_s = np.empty(2 * ends_s.size + 1)
    edges_s[::2], edges_s[1::2] = starts_s, ends_s
    return edges_s, np.tile((arrivals.on_rate_per_s, arrivals.off_rate_per_s), ends_s.size)


def _repeated_rates(arrivals: PiecewiseArrivals, horizon_s: float) -> tuple[FloatArray, FloatArray]:
    """Edges and rates of repeated segments, from time 0 to after the horizon."""
    n_repeats = int(horizon_s / sum(arrivals.durations_s)) + 1
    edges_s = np.concatenate(([0.0], np.cumsum(np.tile(arrivals.durations_s, n_repeats))))
    edges_s[-1] = max(edges_s[-1], horizon_s)
    return edges_s, np.tile(arrivals.rates_per_s, n_repeats)


def _cumulative(edges_s: FloatArray, rates_per_s: FloatArray) -> FloatArray:
    """(k + 1,) expected arrivals from the first edge up to each edge."""
    cumulative = np.empty(edges_s.size)
    cumulative[0] = 0.0
    np.cumsum((edges_s[1:] - edges_s[:-1]) * rates_per_s, out=cumulative[1:])
    return cumulative


def _invert(rng: np.random.Generator, edges_s: FloatArray, cumulative: FloatArray) -> FloatArray:
    """Poisson arrivals of the given cumulative rate, by inversion."""
    expected = float(cumulative[-1])
    return np.interp(_poisson_points(rng, expected, expected), cumulative, edges_s)


def _poisson_points(rng: np.random.Generator, expected: float, length: float) -> FloatArray:
    """A Poisson number of uniform points on `[0, length]`, in order.

    Uniform order statistics are normalised partial sums of exponentials, so nothing is sorted
    (Devroye, Non-Uniform Random Variate Generation, 1986, section V.2).
    """
    sums = np.cumsum(rng.standard_exponential(rng.poisson(expected) + 1))
    points: FloatArray = np.minimum(sums[:-1] * (length / sums[-1]), length)
    return points
