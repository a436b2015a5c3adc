"""Calibrate an engine profile on a running vLLM server.

`vllm-tenant-tuning calibrate --url URL --out PROFILE` runs controlled batches
(`calibration_trials`), keeps what they showed as JSON lines beside the profile, and fits the law
of the step time and the profile's `frontend` to them. `--records FILE` fits such lines again.

What the fit reads from a trial:

- decode steps: the mean time between tokens while all sequences of the batch decode;
- prompts alone: the server's own `vllm:request_prefill_time_seconds`;
- mixed steps: the gap in the decoding sequences' tokens at whose end the prompt's token came;
- the frontend: the API server's CPU time in bursts, and a client's time to the first token less
  the server's own queue and prefill time.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from scipy.optimize import nnls

from vllm_tenant_tuning.backends.live.options import LiveOptions, live_options
from vllm_tenant_tuning.baselines.calibrate import (
    MIN_POINTS,
    CalibrationError,
    StepGrid,
    check_writable,
    fit_step_time,
    make_profile,
    print_errors,
    write_profile,
)
from vllm_tenant_tuning.baselines.calibration_trials import LIMITS, Limits, measure
from vllm_tenant_tuning.baselines.comparison import progress_bar
from vllm_tenant_tuning.profile import EngineProfile, Frontend, load_profile

Floats = npt.NDArray[np.float64]

STEPS_A_POINT: Final = 16
"""Decode steps whose mean is one point of the fit."""
RECORDS_SUFFIX: Final = ".trials.jsonl"


@dataclass(frozen=True)
class Delays:
    """What a request meets before its prompt is scheduled and after its token is out.

    Attributes:
        frontend: the fit.
        trials: trials it was fitted to.
        idle_ms: median over prompts alone of what client, connection and API server add to the
            server's own queue and prefill time.
        client_ms: the part of it that is outside the server's own time to the first token.
        error_ms: mean absolute error of the fit over the trials.
    """

    frontend: Frontend
    trials: int
    idle_ms: float
    client_ms: float
    error_ms: float


def read_trials(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The server's line and those of the trials; a last line that was cut off is left out.

    Raises:
        CalibrationError: not such a file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}") from error
    kinds = [record.get("record") if isinstance(record, dict) else None for record in records]
    if not kinds or kinds[0] != "server" or set(kinds[1:]) - {"trial"}:
        raise CalibrationError(f"{path}: expected a line 'server', then lines 'trial'")
    return records[0], records[1:]


def step_points(server: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> StepGrid:
    """The steps that the trials show.

    Raises:
        CalibrationError: too few of them.
    """
    rows: list[tuple[float, ...]] = []
    for trial in trials:
        match trial["kind"]:
            case "idle":
                rows += _idle_points(trial)
            case "decode":
                rows += _decode_points(trial)
            case "mixed":
                rows += _mixed_points(trial)
    if len(rows) < MIN_POINTS:
        raise CalibrationError(
            f"{len(rows)} steps in {len(trials)} trials; at least {MIN_POINTS} are needed"
        )
    prefill, decodes, context, prompt, step_ms = np.array(rows).T
    source = f"Controlled batches on a live server, {len(trials)} trials, {server['began']}"
    return StepGrid(server["model"], source, prefill, decodes, context, prompt, step_ms)


def fit_frontend(trials: Sequence[Mapping[str, Any]]) -> Delays:
    """The profile's frontend.

    `request_s` is the API server's CPU time for a request, from bursts of short prompts, less what
    reading `/metrics` took of it (0 where the page does not tell CPU time). For a prompt alone,
    the time to its token less the server's own queue and prefill time is
    `request_s + prompt_token_s * tokens + delay_s`, the way back included: the other two are
    fitted to the medians of each length, none below 0.

    Raises:
        CalibrationError: the server's page has no queue or prefill times, or no trial shows them.
    """
    added: dict[int, list[float]] = {}
    client_s = []
    for trial in trials:
        if trial["kind"] != "idle":
            continue
        counters, request = trial["counters"], trial["requests"][0]
        if not {"queue_time_s", "prefill_time_s"} <= counters.keys():
            raise CalibrationError(
                "/metrics: no vllm:request_queue_time_seconds and "
                "vllm:request_prefill_time_seconds in it"
            )
        ttft_s = request["chunk_s"][0] - request["sent_s"]
        added.setdefault(request["prompt_tokens"], []).append(
            ttft_s - counters["queue_time_s"] - counters["prefill_time_s"]
        )
        if "ttft_s" in counters:
            client_s.append(ttft_s - counters["ttft_s"])
    if len(added) < 2:
        raise CalibrationError(f"prompts alone: {len(added)} lengths; at least 2 are needed")
    request_s = _api_cpu_s(trials)
    lengths = np.array(sorted(added), np.float64)
    medians_s = np.array([np.median(added[int(length)]) for length in lengths])
    scale = np.array([1e-6, 1e-3])
    features = np.column_stack([lengths, np.ones_like(lengths)]) * scale
    found, _ = nnls(features, np.maximum(medians_s - request_s, 0.0))
    prompt_token_s, delay_s = (float(value) for value in found * scale)
    errors_s = [
        abs(request_s + prompt_token_s * length + delay_s - value)
        for length, values in added.items()
        for value in values
    ]
    return Delays(
        Frontend(
            request_s=round(request_s, 6),
            prompt_token_s=round(prompt_token_s, 9),
            delay_s=round(delay_s, 6),
        ),
        trials=len(errors_s),
        idle_ms=1e3 * float(np.median(np.concatenate(list(added.values())))),
        client_ms=1e3 * float(np.median(client_s)) if client_s else math.nan,
        error_ms=1e3 * float(np.mean(errors_s)),
    )


def _api_cpu_s(trials: Sequence[Mapping[str, Any]]) -> float:
    """The API server's CPU time for a request of a burst, in seconds."""
    pages = [t for t in trials if t["kind"] == "pages" and "api_cpu_s" in t["counters"]]
    bursts = [t for t in trials if t["kind"] == "burst" and "api_cpu_s" in t["counters"]]
    if not pages or not bursts:
        return 0.0
    page_s = sum(t["counters"]["api_cpu_s"] for t in pages) / sum(t["pages"] for t in pages)
    burst_s = sum(t["counters"]["api_cpu_s"] - page_s * t["pages"] for t in bursts)
    return float(max(burst_s, 0.0) / sum(len(t["requests"]) for t in bursts))


def fit_trials(
    records_files: Sequence[Path],
    out: Path,
    *,
    template: str | None,
    given: Mapping[str, Any],
    command: str,
) -> EngineProfile:
    """Fit a profile to recorded trials, write it and print its errors.

    Args:
        records_files: as `measure` writes them, all of one server.
        out: the profile to write.
        template: a packaged profile or a file, for whatever is neither measured nor given.
        given: dotted names of the profile's fields to values; they win over what was measured.
        command: what is running, for the profile's source.

    Raises:
        CalibrationError, ProfileError: the input is refused; nothing has been written.
        OSError: the profile cannot be written.
    """
    check_writable(out)
    read = [read_trials(path) for path in records_files]
    server, trials = read[0][0], [trial for _, found in read for trial in found]
    for path, (other, _) in zip(records_files, read, strict=True):
        for name in ("model", "num_gpu_blocks", "block_size", *LIMITS):
            if other[name] != server[name]:
                raise CalibrationError(
                    f"{path}: {name}: got {other[name]!r}, in {records_files[0]} it is "
                    f"{server[name]!r}: records of one server are needed"
                )
    grid = step_points(server, trials)
    coefficients = fit_step_time(grid)
    delays = fit_frontend(trials)
    measured = {
        "kv_cache.num_gpu_blocks": server["num_gpu_blocks"],
        "kv_cache.block_size": server["block_size"],
        **{f"scheduler.{name}": server[name] for name in LIMITS},
        **{f"frontend.{name}": value for name, value in delays.frontend},
    }
    base = None if template is None else load_profile(template)
    profile = make_profile(
        grid, coefficients, base, {**measured, **given}, command, keep_regions=True
    )
    write_profile(out, profile)
    console = Console()
    print_errors(console, grid, coefficients)
    console.print(
        f"frontend: {1e3 * delays.frontend.request_s:.2f} ms a request and "
        f"{1e6 * delays.frontend.prompt_token_s:.2f} us a prompt token, one after another, then "
        f"{1e3 * delays.frontend.delay_s:.2f} ms (mean error {delays.error_ms:.2f} ms over "
        f"{delays.trials} trials)"
    )
    console.print(
        f"a prompt alone: client, connection and API server add {delays.idle_ms:.2f} ms to the "
        f"engine's own time, {delays.client_ms:.2f} ms of it outside the server's own time to "
        "the first token"
    )
    console.print(f"wrote {out}")
    return profile


def calibrate_server(
    url: str,
    out: Path,
    *,
    model: str | None,
    rounds: int,
    template: str | None,
    given: Mapping[str, Any],
    command: str,
) -> EngineProfile:
    """Measure a running server, then `fit_trials`.

    Args:
        url: of the server.
        out: the profile to write; the trials go to a file of JSON lines beside it.
        model: the served model's name (none: the first that the server lists).
        rounds: how often every trial is run.
        template: see `fit_trials`; its limits of the scheduler are those of the trials.
        given: see `fit_trials`.
        command: see `fit_trials`.

    Raises:
        CalibrationError: the server cannot be calibrated; what was measured is kept.
        ValueError: an option that is refused.
    """
    check_writable(out)
    options = live_options({"url": url, "model": model})
    base = None if template is None else load_profile(template)
    limits = {} if base is None else base.scheduler.model_dump()
    limits |= {name: given[f"scheduler.{name}"] for name in LIMITS if f"scheduler.{name}" in given}
    records_file = out.with_name(out.name.removesuffix(".yaml") + RECORDS_SUFFIX)
    if records_file.exists():
        raise CalibrationError(
            f"{records_file}: exists; fit it with --records, or move it to measure anew"
        )
    asyncio.run(_measure(options, limits, records_file, rounds))
    return fit_trials([records_file], out, template=template, given=given, command=command)


async def _measure(
    options: LiveOptions, limits: dict[str, int], records_file: Path, rounds: int
) -> None:
    console = Console()

    def on_plan(found: Limits, trials: int) -> None:
        console.print(
            f"{trials} trials in {rounds} rounds, up to {found.max_num_seqs} sequences; "
            f"records: {records_file}"
        )

    with progress_bar("measuring") as on_progress:
        await measure(options, limits, records_file, rounds, on_plan, on_progress)


def token_times_s(request: Mapping[str, Any]) -> Floats:
    """(tokens,) when each token of a recorded request came; those of a chunk come together."""
    times = np.array(request["chunk_s"], np.float64)
    counts = request.get("chunk_tokens")
    return times if counts is None else np.repeat(times, counts)


def _idle_points(trial: Mapping[str, Any]) -> list[tuple[float, ...]]:
    prefill_s = trial["counters"].get("prefill_time_s", 0.0)
    prompt = trial["requests"][0]["prompt_tokens"]
    return [(prompt, 0, 0, prompt, 1e3 * prefill_s)] if prefill_s > 0 else []


def _decode_points(trial: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """Means of decode steps while every sequence of the trial decodes."""
    times = [token_times_s(request) for request in trial["requests"]]
    prompt, n = trial["context_tokens"], len(times)
    # half a step of grace: the tokens of one step reach the client one after another
    gap_s = float(np.median(np.concatenate([np.diff(t) for t in times]))) / 2
    since_s, until_s = max(t[0] for t in times) - gap_s, min(t[-1] for t in times) + gap_s
    spans = [(int(np.searchsorted(t, since_s)), int(np.searchsorted(t, until_s))) for t in times]
    steps = min(last - first for first, last in spans) - 1
    points: list[tuple[float, ...]] = []
    for i in range(0, steps - STEPS_A_POINT + 1, STEPS_A_POINT):
        step_ms, context = [], []
        for t, (first, _) in zip(times, spans, strict=True):
            a, b = first + i, first + i + STEPS_A_POINT
            step_ms.append(1e3 * (t[b] - t[a]) / STEPS_A_POINT)
            context.append(prompt + (a + 1 + b) / 2)
        points.append((0, n, float(np.mean(context)), 0, float(np.mean(step_ms))))
    return points


def _mixed_points(trial: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """The steps in which prompts were computed beside sequences that decode."""
    background = [
        (request["prompt_tokens"], token_times_s(request))
        for request in trial["requests"]
        if request["role"] == "background"
    ]
    points: list[tuple[float, ...]] = []
    for request in trial["requests"]:
        if request["role"] != "probe":
            continue
        step_ms, context = [], []
        for prompt, times in background:
            # the token that came with the prompt's own: the gap before it is the step
            i = int(np.abs(times - request["chunk_s"][0]).argmin())
            if 0 < i < len(times) - 1:
                step_ms.append(1e3 * (times[i] - times[i - 1]))
                context.append(prompt + i)
        if len(step_ms) == len(background):
            p = request["prompt_tokens"]
            points.append(
                (p, len(background), float(np.mean(context)), p, float(np.median(step_ms)))
            )
    return points
