"""Hold an engine profile against the steps that `calibrate --url` measured.

python benchmarks/h200/compare_profile.py TRIALS PROFILE OUT.json

TRIALS is the file of JSON lines that lies beside the calibrated profile; PROFILE a packaged one's
name or a file. Prints the relative error by kind of step, and writes every step, measured and
predicted. Nothing is fitted here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from vllm_tenant_tuning.baselines.calibrate import errors_by_region
from vllm_tenant_tuning.baselines.calibrate_live import read_trials, step_points
from vllm_tenant_tuning.profile import load_profile


def compare(trials_file: Path, profile_name: str, out: Path) -> None:
    profile = load_profile(profile_name)
    server, trials = read_trials(trials_file)
    grid = step_points(server, trials)
    print(f"{profile.name}, by its own coefficients, against: {grid.source}")
    for region in errors_by_region(grid, profile.step_time):
        print(
            f"{region.region}: {region.points} steps, relative error {region.mean:.1%} in the "
            f"mean, {region.p95:.1%} at the 95th percentile, {region.worst:.1%} at worst"
        )
    predicted_ms = grid.predicted_ms(profile.step_time)
    error = predicted_ms / grid.step_ms - 1
    blocks = {"measured": server["num_gpu_blocks"] * server["block_size"]}
    blocks["profile"] = profile.kv_cache.num_gpu_blocks * profile.kv_cache.block_size
    content = {
        "profile": profile.name,
        "server": server,
        "kv_tokens": blocks,
        "steps": len(error),
        "mean_relative_error": float(np.abs(error).mean()),
        "p95_relative_error": float(np.percentile(np.abs(error), 95)),
        "mean_signed_error": float(error.mean()),
        "columns": ["prefill_tokens", "decode_seqs", "context_tokens", "step_ms", "predicted_ms"],
        "rows": np.column_stack(
            [
                grid.prefill_tokens,
                grid.decode_seqs,
                grid.context_tokens,
                grid.step_ms,
                predicted_ms,
            ]
        ).tolist(),
    }
    out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"KV cache: {blocks['measured']} tokens measured, {blocks['profile']} in the profile")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit("accepted is TRIALS PROFILE OUT.json")
    compare(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
