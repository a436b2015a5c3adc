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
  92 % (sharegpt) and 99.7 % (fixed), and of 0 % for mixed, whose prompts do not fit the cache
  together: in fixed and sharegpt only the first run, c1 run1, computed its prompts. The engine
  has no prefix cache, so a cached prompt is played as the tokens that had to be computed. The
  reading of its cached context is put where the law has it, `kv_read * cached` a decoding
  sequence, and the frontend's work on it, `prompt_token * cached`, with each request; both for
  the mean of a run, which is exact for fixed.
- The environment's workload is open loop. A closed loop of c is one tenant whose requests all
  arrive at time 0 with unbounded patience, and whose cap is c.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import brute, least_squares

from vllm_tenant_tuning.backends.sim.engine import EngineBackend
from vllm_tenant_tuning.baselines.calibrate import write_profile
from vllm_tenant_tuning.profile import EngineProfile, Power, load_profile
from vllm_tenant_tuning.scenario import parse_scenario
from vllm_tenant_tuning.workload import RequestStream

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

CONNECTIONS = 100
NUM_GPU_BLOCKS = 25699  # 411184 tokens in blocks of 16, by the server's log
CACHED_WORKLOADS = ("fixed", "sharegpt")
FITTED = (
    ("fixed", 1, 1),
    ("fixed", 8, 1),
    ("fixed", 64, 1),
    ("sharegpt", 64, 1),
    ("mixed", 64, 1),
)
"""The cells that the profile h100-llama-3.1-8b is fitted to; all others are predicted."""
BANDWIDTH_RATIO = 4.8 / 3.35  # of H200 over H100, in TB/s by their data sheets


@dataclass(frozen=True)
class ClosedLoop:
    """Requests of a closed loop, in the order they were sent.

    Attributes:
        ttft_s: (R,) submission to first token.
        tpot_s: (R,) mean time between tokens; NaN for a request of one.
        output_tokens_per_s: all output tokens over the time from start to the last one.
        first_token_s, finished_s: (R,) from the start of the loop.
        preemptions: of all requests; 0 for records, which do not tell.
    """

    ttft_s: Floats
    tpot_s: Floats
    output_tokens_per_s: float
    first_token_s: Floats
    finished_s: Floats
    preemptions: int = 0


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


def play_closed_loop(
    profile: EngineProfile,
    prompt_tokens: Integers,
    output_tokens: Integers,
    concurrency: int,
    connections: int | None = None,
) -> ClosedLoop:
    """Play requests in a closed loop through the simulated engine.

    Args:
        profile: the engine.
        prompt_tokens, output_tokens: (R,) in the order of sending.
        concurrency: requests that the client has submitted and not got back.
        connections: of these, at most so many are sent to the server (none: all).
    """
    n = len(prompt_tokens)
    cap = min(concurrency, connections or concurrency)
    episode_s = 1e5
    tenant = {
        "name": "client",
        "arrivals": {"process": "poisson", "rate_per_s": 0},
        "prompt_tokens": {"distribution": "fixed", "tokens": 1},
        "output_tokens": {"distribution": "fixed", "tokens": 1},
        "cap_initial": cap,
        "slo_latency_p99_s": episode_s,
    }
    scenario = parse_scenario(
        {
            "name": "closed_loop",
            "question": "What does a closed loop of constant concurrency give?",
            "tenants": [tenant],
            "engine": {"fidelity": "engine", "profile": profile.model_dump()},
            "control": {
                "cap_max": cap,
                "control_interval_s": 100.0,
                "window_s": 100.0,
                "episode_s": episode_s,
            },
            "reward": {"w_slo": 0.5, "slo_clip": 3.0},
        }
    )
    backend = EngineBackend(scenario)
    backend.reset(
        0,
        RequestStream(
            offsets=np.array([0, n]),
            arrival_s=np.zeros(n),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            service_s=np.full(n, math.nan),
        ),
        np.array([cap]),
    )
    caps, active = np.array([[cap]]), np.array([True])
    for _ in range(scenario.control.n_steps):
        backend.advance(caps, active)
        outcomes = backend.outcomes(0)
        if np.isfinite(outcomes.finished_s).all():
            break
    if not np.isfinite(outcomes.tpot_s[output_tokens > 1]).all():
        raise ValueError("closed loop: a request failed, or did not end within 100000 s")
    submitted_s = np.zeros(n)
    submitted_s[concurrency:] = np.sort(outcomes.finished_s)[: max(0, n - concurrency)]
    return ClosedLoop(
        ttft_s=outcomes.first_token_s - submitted_s,
        tpot_s=outcomes.tpot_s,
        output_tokens_per_s=float(output_tokens.sum() / outcomes.finished_s.max()),
        first_token_s=outcomes.first_token_s,
        finished_s=outcomes.finished_s,
        preemptions=int(outcomes.preemptions.sum()),
    )


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


def play(cell: Cell, profile: EngineProfile) -> ClosedLoop:
    """Play a cell's requests through the simulated engine."""
    cached = cell.cached_tokens
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
        CONNECTIONS,
    )


def compare(cell: Cell, profile: EngineProfile) -> Comparison:
    """Play a cell and set it beside what was measured."""
    simulated, measured = play(cell, profile), cell.measured

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


def fit(cells: Sequence[Cell], h200: EngineProfile, command: str) -> EngineProfile:
    """An H100's profile: the H200's, its memory slower by bandwidth, the rest from `FITTED`.

    Of the cells of `FITTED`, `weights_ms` and `sequence_ms` meet the median TPOT of the fixed ones,
    the frontend the TTFT (median and 90th percentile) of all but the mixed one, and one factor of
    both compute coefficients the mixed one's output tokens per second.

    Raises:
        ValueError: a cell of `FITTED` is missing.
    """
    by_key = {cell.key: cell for cell in cells}
    missing = [
        f"{workload} c{c} run{run}"
        for workload, c, run in FITTED
        if (workload, c, run) not in by_key
    ]
    if missing:
        raise ValueError(f"fit: the records lack {', '.join(missing)}")
    fixed = [by_key[key] for key in FITTED if key[0] == "fixed"]
    cached = [by_key[key] for key in FITTED if key[0] in CACHED_WORKLOADS]
    saturated = by_key["mixed", 64, 1]
    start = h200.step_time
    kv_cache = h200.kv_cache.model_copy(update={"num_gpu_blocks": NUM_GPU_BLOCKS})

    def profile(step_time: Mapping[str, float], frontend: Mapping[str, float]) -> EngineProfile:
        kv_read_ms = start.kv_read_ms_per_token * BANDWIDTH_RATIO
        rounded = {name: float(f"{value:.4g}") for name, value in step_time.items()}
        return h200.model_copy(
            update={
                "kv_cache": kv_cache,
                "step_time": start.model_copy(
                    update={"kv_read_ms_per_token": float(f"{kv_read_ms:.4g}")} | rounded
                ),
                "frontend": h200.frontend.model_copy(update=frontend),
            }
        )

    def tpot_errors(values: Floats) -> list[float]:
        tried = profile({"weights_ms": values[0], "sequence_ms": values[1] / 100}, {})
        return [compare(cell, tried).error("tpot_p50_ms") for cell in fixed]

    weights_ms, hundred_sequences_ms = least_squares(
        tpot_errors, (6.5, 1.0), diff_step=(0.01, 0.01)
    ).x
    step_time = {"weights_ms": weights_ms, "sequence_ms": hundred_sequences_ms / 100}

    def frontend(values: Floats) -> dict[str, float]:
        rounded = [float(f"{value:.2g}") for value in values]
        return dict(zip(("request_s", "prompt_token_s", "delay_s"), rounded, strict=True))

    def ttft_error(values: Floats) -> float:
        tried = profile(step_time, frontend(values))
        compared = [compare(cell, tried) for cell in cached]
        errors = [each.error(name) for each in compared for name in ("ttft_p50_ms", "ttft_p90_ms")]
        return float(np.abs(np.log1p(errors)).sum())

    # A grid, since the error jumps wherever a request comes to catch another step.
    grid = (slice(1e-3, 7e-3, 5e-4), slice(0, 1.3e-5, 1e-6), slice(0.012, 0.024, 1e-3))
    served = frontend(brute(ttft_error, grid, finish=None))

    def slower_compute(factor: float) -> dict[str, float]:
        names = ("dense_ms_per_token", "prefill_attention_ms_per_pair")
        return step_time | {name: getattr(start, name) * factor for name in names}

    def rate_error(factor: Floats) -> float:
        compared = compare(saturated, profile(slower_compute(factor[0]), served))
        return compared.error("output_tokens_per_s")

    factor = float(least_squares(rate_error, (1.1,), diff_step=(0.01,)).x[0])
    described = {
        "name": "h100-llama-3.1-8b",
        "description": "Llama 3.1 8B in bf16 on an H100, under vLLM 0.19.0",
        "gpu": "one NVIDIA H100 SXM (80 GB)",
        "source": (
            f"{h200.name} with kv_read by memory bandwidth (x {BANDWIDTH_RATIO:.2f}), the rest "
            f"fitted to the cells {', '.join(map(_cell_name, FITTED))} of "
            f"the kvwarden records (compute x {factor:.2f}) by: {command}"
        ),
        "fit": None,
        "power": Power(
            idle_w=191,
            busy_w=610,
            source="board power in the same records: at rest after warm-up (clocks still up); "
            "median of fixed c64 run1. One sequence takes 440 W, a saturated GPU 670 W.",
        ),
        "gpu_memory_utilization": 0.85,
    }
    return profile(slower_compute(factor), served).model_copy(update=described)


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


def summary(compared: Sequence[Comparison]) -> str:
    """Mean, median and worst absolute errors, by workload and for the cells not fitted."""
    groups = {
        workload: [one for one in compared if one.workload == workload]
        for workload in dict.fromkeys(one.workload for one in compared)
    }
    groups["predicted"] = [one for one in compared if not one.fitted]
    lines = [
        "| cells | number | " + " | ".join(METRICS) + " |",
        "|---|--:|" + "--:|" * len(METRICS),
    ]
    for name, group in groups.items():
        cells = [name, str(len(group))]
        for metric in METRICS:
            errors = 100 * np.abs([one.error(metric) for one in group])
            cells.append(f"{errors.mean():.1f} / {np.median(errors):.1f} / {errors.max():.1f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell_name(key: tuple[str, int, int]) -> str:
    workload, concurrency, run = key
    return f"{workload} c{concurrency} run{run}"


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
    if options.fit:
        command = f"python benchmarks/h100_closed_loop.py RECORDS --fit {options.fit} --out PROFILE"
        profile = fit(cells, profile, command)
        if options.out:
            write_profile(options.out, profile)
    compared = [compare(cell, profile) for cell in cells]
    print(markdown(compared))
    print(f"\nMean / median / worst absolute errors:\n\n{summary(compared)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in compared], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
