"""The engine fidelity beside a public simulator on the same load, in one run.

    taskset -c 0 python benchmarks/peers/compare.py [--rounds 3] [--json FILE]

The peer is `@doublewordai/inference-lab` (npm, MIT licence; Rust compiled to WebAssembly), run by
Node in the version that `package.json` names. README.md beside this file says what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tenant_tuning.baselines.bench_engine import (
    OUTPUT_TOKENS,
    PROFILE,
    PROMPT_TOKENS,
    REPEATS,
    engine_real_time_ratio,
    load_scenario_of,
)
from vllm_tenant_tuning.profile import EngineProfile, load_profile
from vllm_tenant_tuning.workload import Workload

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
PACKAGE = "@doublewordai/inference-lab"

NUM_PARAMETERS = 8_030_261_248  # Llama-3.1-8B
KV_BYTES_PER_TOKEN = 131_072  # 2 x 8 heads x 128 x 2 bytes x 32 layers
BYTES_PER_PARAMETER = 2

LOADS = ((20.0, 30.0), (20.0, 300.0), (5.0, 30.0), (5.0, 300.0))
"""Requests per second and simulated seconds."""
WARM_UP_REQUESTS = 300
TIMEOUT_S = 600.0


class PeerError(RuntimeError):
    """The peer cannot be installed or run; the message has what npm or Node said."""


def hardware_variants(profile: EngineProfile) -> dict[str, dict[str, float]]:
    """The two figures of an H200 that the peer's roofline takes.

    Returns:
        `matched`: what the profile's own coefficients say, weights over the time to read them and
        arithmetic of a token over its time, so that both simulate steps of about the same length;
        `data_sheet`: NVIDIA's (dense bf16, HBM3e), which no server reaches. `compute_flops` in
        operations and `memory_bandwidth` in bytes per second.
    """
    step_time = profile.step_time
    weights_bytes = NUM_PARAMETERS * BYTES_PER_PARAMETER
    return {
        "matched": {
            "compute_flops": 2 * NUM_PARAMETERS / (step_time.dense_ms_per_token / 1e3),
            "memory_bandwidth": weights_bytes / ((step_time.base_ms + step_time.weights_ms) / 1e3),
        },
        "data_sheet": {"compute_flops": 989.5e12, "memory_bandwidth": 4.8e12},
    }


def peer_configuration(
    profile: EngineProfile,
    hardware: dict[str, float],
    rate_per_s: float,
    n_requests: int,
    seed: int,
) -> Row:
    """The peer's configuration of our load, with the profile's scheduler and KV cache.

    Args:
        profile: our engine, whose limits the peer gets.
        hardware: one of `hardware_variants`.
        rate_per_s: of the Poisson arrivals.
        n_requests: after so many the peer stops, once all are completed.
        seed: of the arrivals.
    """
    kv_cache, scheduler = profile.kv_cache, profile.scheduler
    return {
        "hardware": {
            "name": "H200",
            "memory_capacity": 141_000_000_000,
            "kv_cache_capacity": kv_cache.num_gpu_blocks * kv_cache.block_size * KV_BYTES_PER_TOKEN,
            "bytes_per_param": BYTES_PER_PARAMETER,
        }
        | hardware,
        "model": {
            "name": "Llama-3.1-8B",
            "num_parameters": NUM_PARAMETERS,
            "num_layers": 32,
            "hidden_dim": 4096,
            "num_heads": 32,
            "num_kv_heads": 8,
            "max_seq_len": scheduler.max_model_len,
        },
        "scheduler": {
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "policy": "fcfs",
            "enable_chunked_prefill": True,
            "block_size": kv_cache.block_size,
        },
        "workload": {
            "arrival_pattern": "poisson",
            "arrival_rate": rate_per_s,
            "input_len_dist": {"type": "fixed", "value": PROMPT_TOKENS},
            "output_len_dist": {"type": "fixed", "value": OUTPUT_TOKENS},
            "num_requests": n_requests,
            "seed": seed,
        },
        "simulation": {"log_interval": 1_000_000_000},
    }


def find_or_install(folder: Path) -> Path:
    """The peer's package beside this file, or freshly installed by npm into `folder`.

    Raises:
        PeerError: npm is missing or fails.
    """
    beside = HERE / "node_modules" / PACKAGE
    if beside.is_dir():
        return beside
    (folder / "package.json").write_bytes((HERE / "package.json").read_bytes())
    options = ["--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"]
    _run(["npm", "install", *options, "--fetch-retries=0"], folder)
    return folder / "node_modules" / PACKAGE


def run_peer(
    package: Path, configuration: Row, warm_up: Row, horizon_s: float, repeats: int = REPEATS
) -> Row:
    """Run the peer in a fresh Node process.

    Args:
        package: its folder.
        configuration: what is measured, the best of `repeats` runs.
        warm_up: what runs before.
        horizon_s: completions up to this simulated time are counted.
        repeats: number of runs measured.

    Raises:
        PeerError: Node is missing, the package has another version than `package.json` names, or
            it refuses the configuration.
    """
    asked = {
        "configuration": configuration,
        "warm_up": warm_up,
        "repeats": repeats,
        "horizon_s": horizon_s,
    }
    command = ["node", str(HERE / "inference_lab.mjs"), str(package)]
    row: Row = json.loads(_run(command, HERE, json.dumps(asked)))
    pinned = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    if row["version"] != pinned[PACKAGE]:
        raise PeerError(f"{PACKAGE}: version {row['version']}, expected {pinned[PACKAGE]}")
    return row


def compare(
    package: Path,
    loads: Sequence[tuple[float, float]] = LOADS,
    rounds: int = 3,
    repeats: int = REPEATS,
) -> Row:
    """Measure both sides, alternately, `rounds` times.

    Args:
        package: the peer's folder.
        loads: pairs of requests per second and simulated seconds (whole intervals of 3 s).
        rounds: of both sides for every load; each round draws other arrivals for the peer.
        repeats: runs of the peer in a round, of which the best counts (our side: `REPEATS`).

    Returns:
        `peer`, `machine`, `profile`, `rounds`, `repeats`, `hardware` and `loads`: for each what
        both simulated and how fast, as medians over the rounds with the lowest and highest.
    """
    profile = load_profile(PROFILE)
    variants = hardware_variants(profile)
    load_before = os.getloadavg()
    rows: list[Row] = []
    peer: Row = {}
    for rate_per_s, simulated_s in loads:
        scenario = load_scenario_of(rate_per_s, simulated_s)
        n_requests = len(Workload(scenario).sample(np.random.default_rng(0)))
        drawn_rate_per_s = n_requests / simulated_s
        engine: list[Row] = []
        peers: dict[str, list[Row]] = {name: [] for name in variants}
        for seed in range(rounds):
            engine.append(engine_real_time_ratio(rate_per_s, simulated_s))
            for name, hardware in variants.items():
                configuration, warm_up = (
                    peer_configuration(profile, hardware, drawn_rate_per_s, n, seed)
                    for n in (n_requests, WARM_UP_REQUESTS)
                )
                peers[name].append(run_peer(package, configuration, warm_up, simulated_s, repeats))
        peer = {key: peers["matched"][0][key] for key in ("version", "node")}
        rows.append(
            {
                "rate_per_s": rate_per_s,
                "simulated_s": simulated_s,
                "requests": n_requests,
                "engine": _engine_figures(engine, simulated_s),
                "peer": {
                    name: _peer_figures(runs, simulated_s) | _ratios(engine, runs)
                    for name, runs in peers.items()
                },
            }
        )
    return {
        "peer": {"package": PACKAGE} | peer,
        "machine": {
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "cores_allowed": len(os.sched_getaffinity(0)),
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "python": platform.python_version(),
        },
        "profile": PROFILE,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": rounds,
        "repeats": repeats,
        "hardware": variants,
        "loads": rows,
    }


def spread(values: Sequence[float]) -> Row:
    """Median, lowest and highest."""
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }


def _engine_figures(runs: Sequence[Row], simulated_s: float) -> Row:
    first = runs[0]
    return {
        "real_time_ratio": spread([run["real_time_ratio"] for run in runs]),
        "requests_per_s": spread([run["requests_per_s"] for run in runs]),
        "completed_within_horizon": first["completed"],
        "output_tokens_per_s": first["completed"] * OUTPUT_TOKENS / simulated_s,
        "mean_ttft_s": first["mean_ttft_s"],
        "mean_tpot_s": first["mean_tpot_s"],
        "mean_latency_s": first["mean_ttft_s"] + (OUTPUT_TOKENS - 1) * first["mean_tpot_s"],
    }


def _peer_figures(runs: Sequence[Row], simulated_s: float) -> Row:
    def median(name: str) -> float:
        return float(statistics.median(run[name] for run in runs))

    return {
        "real_time_ratio": spread([run["simulated_s"] / run["simulating_s"] for run in runs]),
        "real_time_ratio_with_result": spread([run["simulated_s"] / run["wall_s"] for run in runs]),
        "requests_per_s": spread([run["completed"] / run["simulating_s"] for run in runs]),
        "completed": median("completed"),
        "completed_within_horizon": median("completed_within_horizon"),
        "output_tokens_per_s": median("completed_within_horizon") * OUTPUT_TOKENS / simulated_s,
        "mean_ttft_s": median("mean_ttft_s"),
        "mean_tpot_s": median("mean_tpot_s"),
        "mean_latency_s": median("mean_latency_s"),
        "preemptions": median("preemptions"),
    }


def _ratios(engine: Sequence[Row], peer: Sequence[Row]) -> Row:
    """Our speed over the peer's, paired by round."""
    pairs = list(zip(engine, peer, strict=True))
    return {
        "times_faster": spread(
            [
                ours["real_time_ratio"] * theirs["simulating_s"] / theirs["simulated_s"]
                for ours, theirs in pairs
            ]
        ),
        "times_faster_in_requests_per_s": spread(
            [
                ours["requests_per_s"] * theirs["simulating_s"] / theirs["completed"]
                for ours, theirs in pairs
            ]
        ),
    }


def _run(command: Sequence[str], folder: Path, stdin: str = "") -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise PeerError(f"{command[0]}: not found; Node 18 or newer brings node and npm") from error
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{command[0]}: no end after {TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise PeerError(f"{' '.join(command[:2])}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def table(result: Row) -> str:
    """Both sides of every load, one line each."""
    lines = [
        f"{'load':<18}{'simulator':<28}{'x real time':>13}{'times faster':>24}"
        f"{'tokens/s':>10}{'TTFT ms':>9}{'TPOT ms':>9}"
    ]
    for load in result["loads"]:
        named = f"{load['rate_per_s']:g}/s, {load['simulated_s']:g} s"
        sides = [("this engine", load["engine"])]
        sides += [(f"inference-lab, {name}", row) for name, row in load["peer"].items()]
        for side, row in sides:
            faster = row.get("times_faster")
            shown = (
                f"{faster['median']:.0f} [{faster['lowest']:.0f}, {faster['highest']:.0f}]"
                if faster
                else ""
            )
            lines.append(
                f"{named:<18}{side:<28}{row['real_time_ratio']['median']:>13,.0f}{shown:>24}"
                f"{row['output_tokens_per_s']:>10,.0f}{1e3 * row['mean_ttft_s']:>9.1f}"
                f"{1e3 * row['mean_tpot_s']:>9.2f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of both sides (3)")
    parser.add_argument("--json", type=Path, help="write the result there")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds}, expected 1 or more")
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = compare(find_or_install(Path(folder)), rounds=options.rounds)
    except PeerError as error:
        sys.exit(str(error))
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
