"""Measure a trace: what a scenario needs to send arrivals and lengths like it.

Run as `python -m vllm_tenant_tuning.baselines.measure_trace FILE --format azure`. It prints, as
YAML: the rate, the coefficient of variation of the inter-arrival times, the index of dispersion
of counts at 1, 10 and 60 s, the `random_bursts` process with silent pauses that meets these
dispersions best, and the quantiles of the token lengths.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import yaml

from vllm_tenant_tuning.workload.traces import (
    Trace,
    TraceError,
    TraceFormat,
    find_trace,
    read_trace,
)

TIMESCALES_S = (1.0, 10.0, 60.0)
PROBABILITIES = (
    *(0, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8),
    *(0.85, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999, 1),
)


def index_of_dispersion(arrival_s: npt.NDArray[np.float64], timescale_s: float) -> float:
    """Variance over mean of the counts in consecutive whole intervals of `timescale_s`.

    1 for a Poisson process at every timescale; NaN with fewer than two intervals.

    Args:
        arrival_s: (n,) arrival times in seconds, the first one at 0, not decreasing.
        timescale_s: length of an interval in seconds.
    """
    n_intervals = int(arrival_s[-1] / timescale_s)
    if n_intervals < 2:
        return math.nan
    counts = np.bincount((arrival_s / timescale_s).astype(np.int64))[:n_intervals]
    return float(counts.var(ddof=1) / counts.mean())


def burst_dispersion(
    rate_per_s: float, mean_on_s: float, mean_off_s: float, timescale_s: float
) -> float:
    """Index of dispersion of bursts with silent pauses, in closed form.

    The interrupted Poisson process of mean rate `rate_per_s` (Fischer and Meier-Hellstern, The
    Markov-modulated Poisson process cookbook, 1993). Its limit for long timescales is also the
    squared coefficient of variation of the inter-arrival times, since it is a renewal process.
    """
    decay_per_s = 1 / mean_on_s + 1 / mean_off_s
    limit = 2 * rate_per_s * mean_off_s / mean_on_s / decay_per_s
    x = decay_per_s * timescale_s
    return 1 + limit * (1 + math.expm1(-x) / x)


def fit_bursts(rate_per_s: float, dispersion: Sequence[float]) -> tuple[float, float]:
    """Mean burst and mean pause in seconds that meet the dispersions at `TIMESCALES_S` best.

    Least squares of the logarithms, the mean rate being kept.
    """
    from scipy.optimize import least_squares

    target = np.log(dispersion)

    def residuals(log_sojourns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        on_s, off_s = np.exp(log_sojourns).tolist()
        fitted = [burst_dispersion(rate_per_s, on_s, off_s, scale) for scale in TIMESCALES_S]
        return np.asarray(np.log(fitted) - target)

    # What the three timescales can tell apart.
    bounds = (math.log(0.1), math.log(3600.0))
    fit = least_squares(residuals, np.log((5.0, 20.0)), bounds=bounds)
    on_s, off_s = np.exp(fit.x).tolist()
    return on_s, off_s


def measure(trace: Trace) -> dict[str, Any]:
    """Everything that the command prints, as plain data.

    Raises:
        TraceError: the trace has fewer than three requests or lasts under two minutes, the
            least for a dispersion at 60 s.
    """
    if len(trace) < 3 or trace.arrival_s[-1] < 2 * TIMESCALES_S[-1]:
        raise TraceError(
            trace.file,
            None,
            f"has {len(trace)} requests in {trace.arrival_s[-1]:g} s; at least 3 in 120 s are "
            "needed to measure it",
        )
    gaps_s = np.diff(trace.arrival_s)
    rate_per_s = float(1 / gaps_s.mean())
    dispersion = [index_of_dispersion(trace.arrival_s, scale) for scale in TIMESCALES_S]
    counts = np.bincount(trace.arrival_s.astype(np.int64))
    return {
        "requests": len(trace),
        "duration_s": _digits(trace.arrival_s[-1]),
        "skipped_rows": trace.skipped_rows,
        "rate_per_s": _digits(rate_per_s),
        "interarrival_cv": _digits(gaps_s.std() / gaps_s.mean()),
        "empty_seconds_fraction": _digits((counts == 0).mean()),
        "dispersion": _at_timescales(dispersion),
        "random_bursts": _random_bursts(rate_per_s, dispersion),
        "prompt_tokens": _lengths(trace.prompt_tokens),
        "output_tokens": _lengths(trace.output_tokens),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the measurements of a trace file as YAML."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tenant_tuning.baselines.measure_trace",
        description="Measure a trace's rate, burstiness and token lengths.",
    )
    parser.add_argument("file", help="the trace file")
    parser.add_argument("--format", required=True, choices=get_args(TraceFormat))
    parser.add_argument("--trace-dir", help="folder of a file given by a relative name")
    parser.add_argument(
        "--malformed", choices=("error", "skip"), default="error", help="malformed rows"
    )
    options = parser.parse_args(arguments)
    try:
        path = find_trace(options.file, options.trace_dir)
        measured = measure(read_trace(path, options.format, options.malformed))
    except TraceError as error:
        parser.error(str(error))
    print(yaml.safe_dump(measured, sort_keys=False, default_flow_style=None, width=100), end="")


def _random_bursts(rate_per_s: float, dispersion: Sequence[float]) -> dict[str, Any] | None:
    """The fitted bursts and what they reach; None for arrivals that do not clump."""
    if min(dispersion) <= 1:
        return None
    on_s, off_s = fit_bursts(rate_per_s, dispersion)
    fitted = [burst_dispersion(rate_per_s, on_s, off_s, scale) for scale in TIMESCALES_S]
    return {
        "on_rate_per_s": _digits(rate_per_s * (on_s + off_s) / on_s),
        "off_rate_per_s": 0.0,
        "mean_on_s": _digits(on_s),
        "mean_off_s": _digits(off_s),
        "dispersion": _at_timescales(fitted),
        "interarrival_cv": _digits(math.sqrt(burst_dispersion(rate_per_s, on_s, off_s, math.inf))),
    }


def _lengths(tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {
        "mean": _digits(tokens.mean()),
        "probabilities": list(PROBABILITIES),
        "tokens": [_digits(value) for value in np.quantile(tokens, PROBABILITIES)],
    }


def _at_timescales(values: Sequence[float]) -> dict[str, float]:
    names = (f"{scale:g}s" for scale in TIMESCALES_S)
    return {name: _digits(value) for name, value in zip(names, values, strict=True)}


def _digits(value: float) -> float:
    """Four significant digits are all that an hour of requests can tell."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
