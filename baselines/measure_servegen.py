"""Measure a client of ServeGen's published samples: what a tenant needs to send like it.

Run as `python -m vllm_tenant_tuning.baselines.measure_servegen FOLDER --client 4`. ServeGen
(alibaba/ServeGen) describes each client in bins of ten minutes: `chunk-N-trace.csv` has lines of
start in seconds, rate in requests/s, coefficient of variation of the inter-arrival times, the
family that fits them and its two parameters; `chunk-N-dataset.json` has the distributions of
prompt and output tokens from each start in seconds to the next. Printed as YAML: the client's
busiest hour, its rate and coefficient of variation in it, and the quantiles of its lengths then;
and its rate in each hour of the day, the mean over the sample's days.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from vllm_tenant_tuning.baselines.measure_trace import PROBABILITIES
from vllm_tenant_tuning.workload.traces import TraceError

BIN_S = 600.0
BUSIEST_BINS = 6
"""Bins of the window that is measured: an hour."""

FloatArray = npt.NDArray[np.float64]
Lengths = dict[int, float]
"""Probability of each number of tokens."""


class ClientRates(NamedTuple):
    """A client's bins, consecutive and of `BIN_S`: (n_bins,) each."""

    start_s: FloatArray
    rate_per_s: FloatArray
    cv: FloatArray  # of the inter-arrival times; 0 in a bin without arrivals


def read_rates(file: Path) -> ClientRates:
    """Read a client's `chunk-N-trace.csv`.

    Raises:
        TraceError: no such file, a line that has not six fields, a number that is not finite
            or negative, or bins that do not follow each other.
    """
    rows: list[tuple[float, float, float]] = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TraceError(file, None, f"cannot be read: {error}") from error
    for number, fields in enumerate(csv.reader(lines), start=1):
        if len(fields) != 6:
            raise TraceError(file, number, f"has {len(fields)} fields, expected 6")
        try:
            row = (float(fields[0]), float(fields[1]), float(fields[2]))
        except ValueError as error:
            raise TraceError(file, number, f"start, rate and cv must be numbers: {error}") from None
        if not all(math.isfinite(value) and value >= 0 for value in row):
            raise TraceError(file, number, f"got {row}; start, rate and cv must be 0 or more")
        if rows and row[0] != rows[-1][0] + BIN_S:
            raise TraceError(
                file, number, f"starts at {row[0]:g} s, expected {rows[-1][0] + BIN_S:g} s"
            )
        rows.append(row)
    if len(rows) < BUSIEST_BINS:
        raise TraceError(file, None, f"has {len(rows)} bins, at least {BUSIEST_BINS} are needed")
    return ClientRates(*np.array(rows).T)


def read_lengths(file: Path, time_s: float) -> tuple[Lengths, Lengths]:
    """The distributions of prompt and output tokens in force at a time.

    Args:
        file: a client's `chunk-N-dataset.json`.
        time_s: seconds on the clock of the client's bins.

    Raises:
        TraceError: no such file, not of the form, or no lengths at that time.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        start = max((key for key in content if float(key) <= time_s), key=float)
        prompt, output = (
            {int(tokens): float(p) for tokens, p in ast.literal_eval(content[start][key]).items()}
            for key in ("input_tokens", "output_tokens")
        )
    except OSError as error:
        raise TraceError(file, None, f"cannot be read: {error}") from error
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(file, None, f"not of ServeGen's form at {time_s:g} s: {error}") from error
    for lengths in (prompt, output):
        if not lengths or not math.isclose(sum(lengths.values()), 1.0, rel_tol=1e-6):
            raise TraceError(file, None, f"no distribution of lengths at {time_s:g} s")
    return prompt, output


def quantiles(lengths: Lengths, probabilities: Sequence[float] = PROBABILITIES) -> FloatArray:
    """Smallest number of tokens whose cumulative probability reaches each of these: (n,)."""
    tokens = np.array(sorted(lengths), np.float64)
    cumulative = np.cumsum([lengths[int(value)] for value in tokens])
    # The last step may miss 1 by rounding.
    ranks = np.searchsorted(cumulative, np.asarray(probabilities) * (1 - 1e-9))
    return tokens[np.minimum(ranks, tokens.size - 1)]


def hourly_rates(rates: ClientRates) -> FloatArray:
    """Mean rate in each hour of the day, the first bin being midnight's: (24,) requests/s.

    NaN for an hour that no bin lies in.
    """
    hour = (rates.start_s % 86_400 // 3600).astype(np.int64)
    bins = np.bincount(hour, minlength=24)
    total = np.bincount(hour, weights=rates.rate_per_s, minlength=24)
    mean: FloatArray = np.divide(total, bins, out=np.full(24, np.nan), where=bins > 0)
    return mean


def measure_client(folder: Path, client: int) -> dict[str, Any]:
    """Everything that the command prints, as plain data.

    The rate is the mean over the busiest hour, the coefficient of variation the mean of its
    bins', each weighed by its requests; the lengths are those in force in the hour's busiest
    bin (0 tokens counting as 1, the least that can be asked for), None where the sample has no
    dataset of the client.

    Raises:
        TraceError: files that are missing or malformed, or a client without a request.
    """
    file = folder / f"chunk-{client}-trace.csv"
    rates = read_rates(file)
    hours = np.convolve(rates.rate_per_s, np.ones(BUSIEST_BINS), "valid")
    first = int(hours.argmax())
    busiest = slice(first, first + BUSIEST_BINS)
    rate_per_s, cv = rates.rate_per_s[busiest], rates.cv[busiest]
    if not rate_per_s.any():
        raise TraceError(file, None, "has no request")
    measured: dict[str, Any] = {
        "client": client,
        "start_s": float(rates.start_s[first]),
        "duration_s": BIN_S * BUSIEST_BINS,
        "rate_per_s": _digits(rate_per_s.mean()),
        "cv": _digits(np.average(cv, weights=rate_per_s)),
        "hourly_rate_per_s": [_digits(value) for value in hourly_rates(rates)],
        "prompt_tokens": None,
        "output_tokens": None,
    }
    dataset = folder / f"chunk-{client}-dataset.json"
    if dataset.is_file():
        peak_s = float(rates.start_s[first + int(rate_per_s.argmax())])
        both = read_lengths(dataset, peak_s)
        for name, lengths in zip(("prompt_tokens", "output_tokens"), both, strict=True):
            measured[name] = {
                "mean": _digits(sum(max(tokens, 1) * p for tokens, p in lengths.items())),
                "probabilities": list(PROBABILITIES),
                "tokens": [max(int(value), 1) for value in quantiles(lengths)],
            }
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the measurements of a client as YAML."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_tenant_tuning.baselines.measure_servegen",
        description="Measure the busiest hour of a client of ServeGen's published samples.",
    )
    parser.add_argument("folder", type=Path, help="folder of the chunk files")
    parser.add_argument("--client", required=True, type=int, help="number of the client")
    options = parser.parse_args(arguments)
    try:
        measured = measure_client(options.folder, options.client)
    except TraceError as error:
        parser.error(str(error))
    print(yaml.safe_dump(measured, sort_keys=False, default_flow_style=None, width=100), end="")


def _digits(value: float) -> float:
    """Four significant digits are all that an hour of requests can tell."""
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
