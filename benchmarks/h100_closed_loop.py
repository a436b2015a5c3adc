"""A real vLLM server's records beside the simulated engine, request by request.

    python benchmarks/h100_closed_loop.py RECORDS [--profile h100-llama-3.1-8b] [--json FILE]
    python benchmarks/h100_closed_loop.py RECORDS --fit h200-llama-3.1-8b --out PROFILE

RECORDS holds `WORKLOAD_vllm_cN_runR.csv` of the kvwarden benchmark records (github.com,
coconut-labs/kvwarden, results/results_vllm_h100-sxm_20260416_182420, MIT licence): 200 requests in
a closed loop of N against vLLM 0.19.0 with Llama-3.1-8B on one H100. What the records need to be
read rightly:

- Above 100 the client's connection pool held it at 100 in flight; a request's clock ran while it
  waited for a connection.
- All runs sent the same prompts to one server with prefix caching on. Its log shows hit rates of
  92 % (sharegpt) and 99.7 % (fixed), which is what whole blocks of 16 of these prompts come to,
  and of 0 % for the workload mixed, whose prompts do not fit the cache together: in fixed and
  sharegpt only the first run, c1 run1, computed its prompts. The engine has no prefix cache, so a
  cached prompt is played as the tokens that had to be computed. The reading of its cached context
  is put where the law has it, `kv_read * cached` a decoding sequence, and the frontend's work on
  it, `prompt_token * cached`, with each request; both for the mean of a run, which is exact for
  fixed. `--json` also holds what comes out when every prompt is computed.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from closed_loop import ClosedLoop, Floats, Integers, play_closed_loop
from scipy.optimize import brute, least_squares

from vllm_tenant_tuning.baselines.calibrate import write_profile
from vllm_tenant_tuning.profile import (
    EngineProfile,
    Frontend,
    Power,
    StepTimeCoefficients,
    load_profile,
)

CONNECTIONS = 100
NUM_GPU_BLOCKS = 25699  # 411184 tokens in blocks of 16, by the server's log
CACHED_WORKLOADS = ("fixed", "sharegpt")
FITTED = (("fixed", 1, 1), ("fixed", 8, 1), ("fixed", 64, 1), ("sharegpt", 64, 1))
"""The cells that the profile h100-llama-3.1-8b is fitted to; all others are predicted."""
BANDWIDTH_RATIO = 4.8 / 3.35  # of H200 over H100, in TB/s by their data sheets

REQUEST_S, PROMPT_TOKEN_S = slice(1e-3, 7e-3, 5e-4), slice(0, 1.3e-5, 1e-6)
NONE = slice(0, 1, 1)
FRONTEND_FORMS = {
    "delay": (NONE, NONE, slice(0.01, 0.15, 1e-3)),
    "request, delay": (REQUEST_S, NONE, slice(0.012, 0.03, 1e-3)),
    "request, prompt token, delay": (REQUEST_S, PROMPT_TOKEN_S, slice(0.012, 0.024, 1e-3)),
}
"""Grids of request_s, prompt_token_s, delay_s: the error jumps wherever a request comes to catch
another step. The last form is the profile's."""


@dataclass(frozen=True)
class Cell:
    """One recorded run."""

    workload: str
    concurrency: int
    run: int
    prompt_tokens: Integers
    output_tokens: Integers
    measured: ClosedLoop

    @property
    def key(self) -> tuple[str, int, int]:
        """Workload, concurrency, run."""
        return self.workload, self.concurrency, self.run

    @property
    def cached_tokens(self) -> Integers:
        """(R,) prompt tokens that the server found in its prefix cache: whole blocks of 16."""
        if self.workload in CACHED_WORKLOADS and (self.concurrency, self.run) != (1, 1):
            return (self.prompt_tokens - 1) // 16 * 16
        return np.zeros_like(self.prompt_tokens)


@dataclass(frozen=True)
class Comparison:
    """Simulated over measured, minus 1, for one cell; the medians beside each other."""

    workload: str
    concurrency: int
    run: int
    fitted: bool
    tpot_p50_ms: tuple[float, float]
    output_tokens_per_s: tuple[float, float]
    ttft_p50_ms: tuple[float, float]
    ttft_p90_ms: tuple[float, float]
    preemptions: int

    def error(self, name: str) -> float:
        """Relative error of one of the pairs (simulated, measured)."""
        simulated, measured = getattr(self, name)
        return float(simulated / measured - 1)


METRICS = ("tpot_p50_ms", "output_tokens_per_s", "ttft_p50_ms", "ttft_p90_ms")


def read_cell(path: Path) -> Cell:
    """Read the records of one run.

    Raises:
        ValueError: a name of another form, or a request that failed.
    """
    named = re.fullmatch(r"([a-z]+)_vllm_c(\d+)_run(\d+)\.csv", path.name)
    if named is None:
        raise ValueError(f"{path}: expected a name of the form WORKLOAD_vllm_cN_runR.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["error"]]
    rows.sort(key=lambda row: float(row["timestamp"]))

    def column(name: str) -> Floats:
        return np.array([float(row[name]) for row in rows])

    start_s = column("timestamp") - float(rows[0]["timestamp"])
    finished_s = start_s + column("total_latency_ms") / 1e3
    output_tokens = column("tokens_out").astype(np.int64)
    return Cell(
        workload=named[1],
        concurrency=int(named[2]),
        run=int(named[3]),
        prompt_tokens=column("tokens_in").astype(np.int64),
        output_tokens=output_tokens,
        measured=ClosedLoop(
            ttft_s=column("ttft_ms") / 1e3,
            tpot_s=column("tpot_ms") / 1e3,
            output_tokens_per_s=float(output_tokens.sum() / finished_s.max()),
            first_token_s=start_s + column("ttft_ms") / 1e3,
            finished_s=finished_s,
        ),
    )


def read_records(folder: Path) -> list[Cell]:
    """All cells of a folder, by workload, concurrency and run.

    Raises:
        ValueError: no records there.
    """
    cells = [read_cell(path) for path in folder.glob("*_vllm_c*_run*.csv")]
    if not cells:
        raise ValueError(f"{folder}: holds no WORKLOAD_vllm_cN_runR.csv")
    return sorted(cells, key=lambda cell: cell.key)


def play(cell: Cell, profile: EngineProfile, prefix_cached: bool = True) -> ClosedLoop:
    """Play a cell's requests through the simulated engine.

    Args:
        cell: the recorded run.
        profile: the engine.
        prefix_cached: leave out the prompt tokens that the server had cached.
    """
    cached = cell.cached_tokens if prefix_cached else np.zeros_like(cell.prompt_tokens)
    mean_cached = float(cached.mean())
    step_time, frontend = profile.step_time, profile.frontend
    sequence_ms = step_time.sequence_ms + step_time.kv_read_ms_per_token * mean_cached
    request_s = frontend.request_s + frontend.prompt_token_s * mean_cached
    warmed = profile.model_copy(
        update={
            "step_time": step_time.model_copy(update={"sequence_ms": sequence_ms}),
            "frontend": frontend.model_copy(update={"request_s": request_s}),
        }
    )
    return play_closed_loop(
        warmed,
        cell.prompt_tokens - cached,
        cell.output_tokens,
        cell.concurrency,
        connections=CONNECTIONS,
    )


def compare(cell: Cell, profile: EngineProfile, prefix_cached: bool = True) -> Comparison:
    """Play a cell and set it beside what was measured; arguments as for `play`."""
    simulated, measured = play(cell, profile, prefix_cached), cell.measured

    def pair_ms(name: str, q: float) -> tuple[float, float]:
        both = (np.nanquantile(getattr(loop, name), q) for loop in (simulated, measured))
        simulated_s, measured_s = both
        return 1e3 * float(simulated_s), 1e3 * float(measured_s)

    return Comparison(
        *cell.key,
        fitted=cell.key in FITTED,
        tpot_p50_ms=pair_ms("tpot_s", 0.5),
        output_tokens_per_s=(simulated.output_tokens_per_s, measured.output_tokens_per_s),
        ttft_p50_ms=pair_ms("ttft_s", 0.5),
        ttft_p90_ms=pair_ms("ttft_s", 0.9),
        preemptions=simulated.preemptions,
    )


def fitted_cells(cells: Iterable[Cell]) -> list[Cell]:
    """The cells of `FITTED`, in its order.

    Raises:
        ValueError: one is missing.
    """
    by_key = {cell.key: cell for cell in cells}
    missing = [_cell_name(key) for key in FITTED if key not in by_key]
    if missing:
        raise ValueError(f"fit: the records lack {', '.join(missing)}")
    return [by_key[key] for key in FITTED]


def fit_step_time(cells: Iterable[Cell], h200: EngineProfile) -> StepTimeCoefficients:
    """The H200's step time with KV reads slower by bandwidth, fitted to the fixed cells.

    `weights_ms` and `sequence_ms` meet the median TPOT of the fixed cells of `FITTED`. Compute
    stays the H200's: by their data sheets both GPUs have the same, and the fitted cells, whose
    prompts were cached, tell nothing of it.
    """
    start = h200.step_time
    kv_read_ms = start.kv_read_ms_per_token * BANDWIDTH_RATIO
    fixed = [cell for cell in fitted_cells(cells) if cell.workload == "fixed"]

    def coefficients(weights_ms: float, sequence_ms: float) -> StepTimeCoefficients:
        return start.model_copy(
            update={
                "weights_ms": _digits(weights_ms, 4),
                "sequence_ms": _digits(sequence_ms, 4),
                "kv_read_ms_per_token": _digits(kv_read_ms, 4),
            }
        )

    def tpot_errors(values: Floats) -> list[float]:
        tried = h200.model_copy(update={"step_time": coefficients(values[0], values[1] / 100)})
        return [compare(cell, tried).error("tpot_p50_ms") for cell in fixed]

    # Hundred sequences take about 1 ms: both unknowns in the same unit.
    found = least_squares(tpot_errors, (6.5, 1.0), diff_step=(0.01, 0.01)).x
    return coefficients(found[0], found[1] / 100)


def ttft_error(cells: Iterable[Cell], profile: EngineProfile) -> float:
    """Mean absolute logarithm of simulated over measured TTFT: median and 90th percentile."""
    compared = [compare(cell, profile) for cell in cells]
    errors = [one.error(name) for one in compared for name in ("ttft_p50_ms", "ttft_p90_ms")]
    return float(np.abs(np.log1p(errors)).mean())


def fit_frontends(
    cells: Iterable[Cell], profile: EngineProfile
) -> dict[str, tuple[Frontend, float]]:
    """For each form of the frontend the best one and its `ttft_error` on the cells of `FITTED`."""
    chosen = fitted_cells(cells)

    def frontend(values: Floats) -> Frontend:
        request_s, prompt_token_s, delay_s = (_digits(float(value), 2) for value in values)
        return Frontend(request_s=request_s, prompt_token_s=prompt_token_s, delay_s=delay_s)

    def error(values: Floats) -> float:
        return ttft_error(chosen, profile.model_copy(update={"frontend": frontend(values)}))

    found = {}
    for form, grid in FRONTEND_FORMS.items():
        best, least, _, _ = brute(error, grid, full_output=True, finish=None)
        found[form] = frontend(best), float(least)
    return found


def fit(
    cells: Sequence[Cell], h200: EngineProfile, command: str
) -> tuple[EngineProfile, dict[str, float]]:
    """An H100's profile from an H200's and the cells of `FITTED`; `ttft_error` of each form.

    Raises:
        ValueError: a cell of `FITTED` is missing.
    """
    step_time = fit_step_time(cells, h200)
    kv_cache = h200.kv_cache.model_copy(update={"num_gpu_blocks": NUM_GPU_BLOCKS})
    profile = h200.model_copy(
        update={
            "name": "h100-llama-3.1-8b",
            "description": "Llama 3.1 8B in bf16 on an H100, under vLLM 0.19.0",
            "gpu": "one NVIDIA H100 SXM (80 GB)",
            "source": (
                f"{h200.name} with kv_read by memory bandwidth (x {BANDWIDTH_RATIO:.2f}) and the "
                "same compute; weights, sequence and frontend fitted to the cells "
                f"{', '.join(map(_cell_name, FITTED))} of the kvwarden records by: {command}"
            ),
            "step_time": step_time,
            "kv_cache": kv_cache,
            "fit": None,
            "power": Power(
                idle_w=191,
                busy_w=610,
                source="board power in the same public records: at rest after warm-up (clocks "
                "still up); median of fixed c64 run1. One sequence takes 440 W, a saturated GPU "
                "670 W.",
            ),
            "gpu_memory_utilization": 0.85,
        }
    )
    forms = fit_frontends(cells, profile)
    frontend, _ = list(forms.values())[-1]
    return profile.model_copy(update={"frontend": frontend}), {
        form: error for form, (_, error) in forms.items()
    }


def markdown(compared: Iterable[Comparison]) -> str:
    """The comparison as a table; `*` marks cells that the profile was fitted to."""
    head = (
        "| cell | TPOT p50, ms | | output tokens/s | | TTFT p50, ms | | TTFT p90, ms | |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    )
    lines = []
    for one in compared:
        mark = " *" if one.fitted else ""
        cells = [_cell_name((one.workload, one.concurrency, one.run)) + mark]
        for name, digits in zip(METRICS, (2, 0, 0, 0), strict=True):
            simulated, measured = getattr(one, name)
            cells.append(f"{simulated:.{digits}f} / {measured:.{digits}f}")
            cells.append(f"{100 * one.error(name):+.1f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join(lines)


def summary(compared: Sequence[Comparison]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean, median and worst absolute errors: all, by workload, and the cells not fitted."""
    groups = {"all": list(compared)}
    for workload in dict.fromkeys(one.workload for one in compared):
        groups[workload] = [one for one in compared if one.workload == workload]
    groups["predicted"] = [one for one in compared if not one.fitted]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, group in groups.items():
        found[name] = {}
        for metric in METRICS:
            errors = np.abs([one.error(metric) for one in group])
            found[name][metric] = {
                "cells": errors.size,
                "mean": float(errors.mean()),
                "median": float(np.median(errors)),
                "worst": float(errors.max()),
            }
    return found


def summary_markdown(compared: Sequence[Comparison]) -> str:
    """The summary as a table of mean / median / worst."""
    lines = [
        "| cells | number | " + " | ".join(METRICS) + " |",
        "|---|--:|" + "--:|" * len(METRICS),
    ]
    for name, metrics in summary(compared).items():
        cells = [name, str(metrics[METRICS[0]]["cells"])]
        for errors in metrics.values():
            shares = (f"{100 * errors[kind]:.1f}" for kind in ("mean", "median", "worst"))
            cells.append(f"{' / '.join(shares)} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell_name(key: tuple[str, int, int]) -> str:
    workload, concurrency, run = key
    return f"{workload} c{concurrency} run{run}"


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("records", type=Path, help="folder of the records")
    parser.add_argument("--profile", default="h100-llama-3.1-8b", metavar="NAME|FILE")
    parser.add_argument("--fit", metavar="H200", help="fit an H100 from this profile first")
    parser.add_argument("--out", type=Path, metavar="PROFILE", help="write the fitted profile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there too")
    options = parser.parse_args(arguments)
    cells = read_records(options.records)
    profile = load_profile(options.fit or options.profile)
    content: dict[str, Any] = {}
    if options.fit:
        command = f"python benchmarks/h100_closed_loop.py RECORDS --fit {options.fit} --out PROFILE"
        profile, forms = fit(cells, profile, command)
        content["ttft_error_by_frontend"] = forms
        print("Mean absolute log error of TTFT on the fitted cells, by form of the frontend:\n")
        print("".join(f"    {form}: {error:.3f}\n" for form, error in forms.items()))
        if options.out:
            write_profile(options.out, profile)
    for title, prefix_cached in {"prompts as cached": True, "all prompts computed": False}.items():
        compared = [compare(cell, profile, prefix_cached) for cell in cells]
        content[title] = {
            "summary": summary(compared),
            "cells": [asdict(one) for one in compared],
        }
        print(f"{title}:\n\n{markdown(compared)}\n")
        print(f"Mean / median / worst absolute errors:\n\n{summary_markdown(compared)}\n")
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
