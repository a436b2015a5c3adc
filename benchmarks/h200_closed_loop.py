"""The simulated engine beside AIConfigurator's mean-field estimate of a closed loop on an H200.

    python benchmarks/h200_closed_loop.py ../shared/h200 [--json FILE]

The folder holds `closed_loop_reference.json`, throughput and TPOT of Llama-3.1-8B against
concurrency, and `step_time_grid.json`, whose step times the estimate was composed of. These are the
kernels' times, without a host: so the engine is the packaged profile with all six coefficients as
fitted to the grid (`sequence_ms` 0.0041 in place of a served engine's 0.01), and no frontend.

The estimate takes a batch of constant composition: in a cycle of `output_tokens` steps each of the
c requests gets a token a step, and the prompts of one round take up whole steps of 8192 tokens, all
of which count in the TPOT. What follows from that:

- Its own steps give c / (output_tokens x TPOT) requests a second. The requests_per_s that it
  reports are fewer: they are c over the TTFT and the other tokens' time, and the TTFT carries a
  fixed correction, see `implied_ttft_ms`, which counts a prompt's step a second time. The
  simulation is held against the first; the second is shown.
- It does not apply where a round's prompts do not fill one step (it charges a full step), nor
  where the KV cache cannot hold c requests (it has no KV cache).

The simulated requests start evenly over one cycle, since in a mean field the phases are mixed; the
first and last two rounds of twelve are left out. Beside it the throughput is simulated with all of
them started at once: then prompts do come in whole steps, as the estimate has them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from closed_loop import ClosedLoop, play_closed_loop

from vllm_tenant_tuning.baselines.calibrate import fit_step_time, read_grid
from vllm_tenant_tuning.profile import EngineProfile, Frontend, load_profile

PROFILE = "h200-llama-3.1-8b"
STEP_TOKENS = 8192
ROUNDS, LEFT_OUT = 12, 2


@dataclass(frozen=True)
class Estimate:
    """A row of the reference."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    tpot_ms: float
    requests_per_s: float

    @property
    def cycle_s(self) -> float:
        """Time of the steps in which each request gets all its tokens."""
        return self.output_tokens * self.tpot_ms / 1e3

    @property
    def steps_requests_per_s(self) -> float:
        """Throughput by the estimate's own steps."""
        return self.concurrency / self.cycle_s

    @property
    def implied_ttft_ms(self) -> float:
        """What is left of a request's time by Little's law when all other tokens are taken off."""
        request_ms = 1e3 * self.concurrency / self.requests_per_s
        return request_ms - (self.output_tokens - 1) * self.tpot_ms

    def not_applying(self, kv_tokens: int) -> str:
        """Why the estimate does not apply to a server of so many KV tokens; empty if it does."""
        if self.concurrency * self.input_tokens < STEP_TOKENS:
            return "prompts do not fill a step"
        if self.concurrency * (self.input_tokens + self.output_tokens) > kv_tokens:
            return "KV cache too small"
        return ""


@dataclass(frozen=True)
class Comparison:
    """One row: what the simulation gives, the estimate, and relative errors of the first."""

    estimate: Estimate
    not_applying: str
    implied_ttft_ms: float
    tpot_ms: float
    requests_per_s: float
    preemptions: int
    tpot_error: float
    requests_error: float
    reported_requests_error: float
    at_once_requests_error: float


def read_reference(folder: Path) -> list[Estimate]:
    """The rows of `closed_loop_reference.json`."""
    content = json.loads((folder / "closed_loop_reference.json").read_text(encoding="utf-8"))
    return [Estimate(**dict(zip(content["columns"], row, strict=True))) for row in content["rows"]]


def kernels_profile(folder: Path) -> EngineProfile:
    """The packaged profile with the grid's own step times and nothing of a host."""
    packaged = load_profile(PROFILE)
    grid = read_grid(folder / "step_time_grid.json", packaged.model)
    return packaged.model_copy(update={"step_time": fit_step_time(grid), "frontend": Frontend()})


def compare(estimate: Estimate, profile: EngineProfile) -> Comparison:
    """Play a row's closed loop; median TPOT and throughput of the middle rounds."""
    loop = _play(estimate, profile, ramp_s=estimate.cycle_s)
    at_once = _play(estimate, profile, ramp_s=0.0)
    tpot_ms = 1e3 * float(np.median(loop.tpot_s[_middle(estimate)]))
    requests_per_s = _requests_per_s(estimate, loop)
    kv_tokens = profile.kv_cache.num_gpu_blocks * profile.kv_cache.block_size
    return Comparison(
        estimate=estimate,
        not_applying=estimate.not_applying(kv_tokens),
        implied_ttft_ms=estimate.implied_ttft_ms,
        tpot_ms=tpot_ms,
        requests_per_s=requests_per_s,
        preemptions=loop.preemptions,
        tpot_error=tpot_ms / estimate.tpot_ms - 1,
        requests_error=requests_per_s / estimate.steps_requests_per_s - 1,
        reported_requests_error=requests_per_s / estimate.requests_per_s - 1,
        at_once_requests_error=(
            _requests_per_s(estimate, at_once) / estimate.steps_requests_per_s - 1
        ),
    )


def markdown(compared: Sequence[Comparison]) -> str:
    """The comparison as a table, simulated / estimated."""
    lines = [
        "| prompt, output, c | TPOT, ms | | requests/s by its steps | | at once | "
        "requests/s reported | | applies |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for one in compared:
        estimate = one.estimate
        shape = (estimate.input_tokens, estimate.output_tokens, estimate.concurrency)
        cells = [
            ", ".join(map(str, shape)),
            f"{one.tpot_ms:.2f} / {estimate.tpot_ms:.2f}",
            f"{100 * one.tpot_error:+.1f} %",
            f"{one.requests_per_s:.2f} / {estimate.steps_requests_per_s:.2f}",
            f"{100 * one.requests_error:+.1f} %",
            f"{100 * one.at_once_requests_error:+.1f} %",
            f"{estimate.requests_per_s:.2f}",
            f"{100 * one.reported_requests_error:+.1f} %",
            one.not_applying or "yes",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _play(estimate: Estimate, profile: EngineProfile, ramp_s: float) -> ClosedLoop:
    n = ROUNDS * estimate.concurrency
    return play_closed_loop(
        profile,
        np.full(n, estimate.input_tokens),
        np.full(n, estimate.output_tokens),
        estimate.concurrency,
        ramp_s=ramp_s,
    )


def _middle(estimate: Estimate) -> slice:
    return slice(LEFT_OUT * estimate.concurrency, (ROUNDS - LEFT_OUT) * estimate.concurrency)


def _requests_per_s(estimate: Estimate, loop: ClosedLoop) -> float:
    middle = _middle(estimate)
    finished_s = np.sort(loop.finished_s)
    between_s = finished_s[middle.stop - 1] - finished_s[middle.start - 1]
    return float((middle.stop - middle.start) / between_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the grid and the reference")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there too")
    options = parser.parse_args(arguments)
    profile = kernels_profile(options.folder)
    compared = [compare(estimate, profile) for estimate in read_reference(options.folder)]
    print(markdown(compared))
    applying = [one for one in compared if not one.not_applying]
    names = ("tpot_error", "requests_error", "at_once_requests_error", "reported_requests_error")
    for name in names:
        errors = 100 * np.abs([getattr(one, name) for one in applying])
        print(f"{name}, {errors.size} rows: mean {errors.mean():.1f} %, worst {errors.max():.1f} %")
    if options.json:
        content = [asdict(one) for one in compared]
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
