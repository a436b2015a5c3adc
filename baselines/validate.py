"""Sim to real: the same requests under the same caps in simulation and on a live server.

`vllm-tenant-tuning validate --url URL --scenario S --profile P --out DIR` plays an episode for
each load and each setting of the caps, prints both sides, and keeps raw records, a summary and a
figure. Episodes that DIR already holds are not played again, so that a changed profile can be
held against them, without a server.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from vllm_tenant_tuning.backends.base import Outcome
from vllm_tenant_tuning.backends.live.backend import LiveError
from vllm_tenant_tuning.backends.live.client import Completion, CompletionClient, completion_body
from vllm_tenant_tuning.backends.live.load import Prompts
from vllm_tenant_tuning.backends.live.options import live_options
from vllm_tenant_tuning.backends.live.pages import NotReadyError, find_model
from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.baselines.plots import save_plot
from vllm_tenant_tuning.baselines.validation_measures import (
    ALL,
    QUANTILES,
    Episode,
    compare_episodes,
    pack_requests,
    read_live,
    select,
    write_json,
)
from vllm_tenant_tuning.baselines.validation_play import find_pace, hold, play_sim
from vllm_tenant_tuning.baselines.validation_plot import validation_plot
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.profile import EngineProfile, load_profile
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.workload import Workload

RATE_FIELDS: Final = ("rate_per_s", "on_rate_per_s", "off_rate_per_s", "rates_per_s")
LIVE_FILE: Final = "live.json"
SUMMARY_FILE: Final = "summary.json"
PLOT: Final = "validation"
RESET_S: Final = 5.0
"""About what goes by between two live episodes."""
CHECK_STEPS: Final = 48
CHECK_PROMPT: Final = 64
CHECK_TIMEOUT_S: Final = 60.0


class PlayError(ValueError):
    """A live episode that could not be played, or was played otherwise than now asked for."""


@dataclass(frozen=True)
class Cell:
    """One episode of a validation: a factor on all arrival rates, and caps."""

    load: float
    caps: tuple[int, ...]

    @property
    def folder(self) -> str:
        """Of its records, inside the validation's own."""
        return f"load-{self.load:g}-caps-{'-'.join(map(str, self.caps))}"

    @property
    def titles(self) -> tuple[str, str]:
        """How figures and tables call it."""
        return f"caps {'/'.join(map(str, self.caps))}", f"load x {self.load:g}"


def with_load(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with all arrival rates multiplied (a trace: its time divided).

    Raises:
        ValueError: a factor that is not above 0, or that a rate's bounds do not allow.
    """
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"--loads: got {factor:g}; accepted are finite factors above 0")
    content = scenario.model_dump()
    for tenant in content["tenants"]:
        arrivals = tenant["arrivals"]
        if "speedup" in arrivals:
            arrivals["speedup"] *= factor
        for field in RATE_FIELDS:
            if field in arrivals:
                rates = arrivals[field]
                arrivals[field] = (
                    [rate * factor for rate in rates]
                    if isinstance(rates, list | tuple)
                    else rates * factor
                )
    return Scenario.model_validate(content)


def prepare(scenario: str | Path, profile: EngineProfile, episode_s: float | None) -> Scenario:
    """The scenario on the profile.

    Raises:
        ValueError: a scenario of another fidelity, or a length that it does not allow.
    """
    task = load_scenario(scenario)
    if not isinstance(task.engine, ContinuousBatchingEngine):
        raise ValueError(
            f"--scenario: got '{task.name}' of fidelity '{task.engine.fidelity}'; accepted are "
            "scenarios of fidelity 'engine'"
        )
    content = task.model_dump()
    content["engine"]["profile"] = profile.model_dump()
    if episode_s is not None:
        content["control"]["episode_s"] = episode_s
    return Scenario.model_validate(content)


def play_live(
    scenario: Scenario, caps: Sequence[int], seed: int, url: str, model: str | None, folder: Path
) -> None:
    """The episode on the server; its records, packed, and `LIVE_FILE` are then in the folder.

    Raises:
        PlayError: a server on which no episode can begin, or on which it ended
            early; what was measured is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = check_speed(scenario, url, model)
    env = gym.make(
        "VLLMTenantTuning-v0",
        scenario=scenario,
        backend="live",
        url=url,
        model=model,
        out_dir=folder,
    )
    try:
        info = hold(env, scenario, caps, seed)
    except LiveError as error:
        raise PlayError(str(error)) from error
    finally:
        env.close()
    if info["truncation_reason"] != "time_limit":
        raise PlayError(
            f"{folder}: the live episode ended with {info['truncation_reason']}: "
            f"{info['live']['fault']}"
        )
    report = info["live"]
    episode = Path(report["folder"])
    pack_requests(episode)
    write_json(
        folder / LIVE_FILE,
        {
            "episode": episode.name,
            "seed": seed,
            "server_speed": {"before": before, "after": check_speed(scenario, url, model)},
            "delivery": {
                name: report[name]
                for name in (
                    "scheduled",
                    "delivered",
                    "send_lateness_p50_s",
                    "send_lateness_p99_s",
                    "send_lateness_max_s",
                    "event_loop_lag_p99_s",
                    "prefix_hit_rate",
                    "invalid",
                )
            },
        },
    )


def check_speed(scenario: Scenario, url: str, model: str | None) -> dict[str, float]:
    """How fast the server is now: one request alone, measured and as the profile has it.

    A machine that is shared or that changes its clock is not the one that was calibrated; this
    tells by how much.

    Returns:
        `ttft_s` and `step_s`, each measured, and `..._predicted`.

    Raises:
        PlayError: the request did not complete.
    """
    assert isinstance(scenario.engine, ContinuousBatchingEngine)
    profile = scenario.engine.profile
    completion = asyncio.run(_alone(url, model))
    if completion.end != "completed":
        raise PlayError(f"{url}: a request alone {completion.end}: {completion.error}")
    middle = CHECK_PROMPT + CHECK_STEPS / 2
    pairs = CHECK_PROMPT * (CHECK_PROMPT + 1) / 2
    first_ms = float(step_time_ms(profile.step_time, CHECK_PROMPT, 0, 0, pairs))
    step_ms = float(step_time_ms(profile.step_time, 0, 1, middle, 0))
    frontend = profile.frontend
    added_s = frontend.request_s + frontend.prompt_token_s * CHECK_PROMPT + frontend.delay_s
    decoded_s = completion.last_token_s - completion.first_token_s
    return {
        "ttft_s": round(completion.first_token_s - completion.sent_s, 6),
        "ttft_s_predicted": round(first_ms / 1e3 + added_s, 6),
        "step_s": round(decoded_s / (completion.tokens - 1), 6),
        "step_s_predicted": round(step_ms / 1e3, 6),
    }


async def _alone(url: str, model: str | None) -> Completion:
    options = live_options({"url": url, "model": model})
    assert options.url is not None
    client = CompletionClient(
        options.url, options.api_key_env, options.connect_timeout_s, CHECK_TIMEOUT_S
    )
    try:
        until_s = asyncio.get_running_loop().time() + options.connect_timeout_s
        name, _ = await find_model(client, options.url, options, model, until_s)
        prompts = Prompts(time.time_ns(), *options.prompt_token_ids)
        for number in (0, 1):  # the first after a pause is slow
            completion = Completion()
            body = completion_body(name, prompts.tokens(number, CHECK_PROMPT), CHECK_STEPS)
            await client.complete(body, completion)
    except NotReadyError as error:
        raise PlayError(str(error)) from error
    finally:
        await client.close()
    return completion


def validate(
    scenario: str | Path,
    profile: str | Path,
    out_dir: Path,
    *,
    url: str | None,
    model: str | None,
    loads: Sequence[float],
    caps: Sequence[Sequence[int]],
    seed: int,
    episode_s: float | None,
    dry_run: bool,
    command: str,
) -> dict[str, Any]:
    """Play and compare every load under every setting of the caps.

    Args:
        scenario: a packaged scenario's name or a path.
        profile: an engine profile's name or path.
        out_dir: records, `SUMMARY_FILE` and the figure.
        url: of the server; None where all live episodes are in `out_dir`.
        model: the served model's name (none: the first that the server lists).
        loads: factors on all arrival rates.
        caps: settings, one cap for each tenant; empty for the scenario's own.
        seed: of the requests.
        episode_s: length of the episodes; None for the scenario's.
        dry_run: say what it would take, and play nothing.
        command: what is running, for the summary.

    Returns:
        What the summary holds.

    Raises:
        ValueError: an option that is refused, before anything is played.
        PlayError: the server cannot play; what was played is kept.
    """
    console = Console()
    base = prepare(scenario, load_profile(profile), episode_s)
    tasks = {load: with_load(base, load) for load in loads}
    settings = [tuple(setting) for setting in caps] or [base.caps_initial]
    for setting in settings:
        base.check_caps(list(setting))
    cells = [Cell(load, setting) for load in loads for setting in settings]
    missing = [cell for cell in cells if not (out_dir / cell.folder / LIVE_FILE).exists()]
    requests = sum(
        len(Workload(tasks[cell.load]).sample(np.random.default_rng(seed))) for cell in missing
    )
    minutes = len(missing) * (base.control.episode_s + RESET_S) / 60
    console.print(
        f"{len(cells)} episodes of {base.control.episode_s:g} s, {len(missing)} of them still to "
        f"be played live: {requests} requests, about {minutes:.0f} min"
    )
    if dry_run:
        return {}
    if missing and url is None:
        raise ValueError(f"--url: needed, {len(missing)} episodes are not in {out_dir} yet")
    out_dir.mkdir(parents=True, exist_ok=True)
    found, panels = [], []
    for cell in cells:
        folder, task = out_dir / cell.folder, tasks[cell.load]
        if cell in missing:
            assert url is not None
            play_live(task, cell.caps, seed, url, model, folder)
        result, panel = _compare(task, cell, folder)
        console.print(_table(cell, result))
        found.append(result)
        panels.append((*cell.titles, panel))
        summary = {
            "command": command,
            "scenario": base.name,
            "profile": base.engine.profile.model_dump(mode="json", exclude_none=True),  # type: ignore[union-attr]
            "episode_s": base.control.episode_s,
            "cells": found,
        }
        write_json(out_dir / SUMMARY_FILE, summary)
        save_plot(validation_plot(panels), out_dir, PLOT)
    console.print(errors_table(found))
    console.print(pace_table(found))
    console.print(f"wrote {out_dir / SUMMARY_FILE} and {out_dir / PLOT}.svg")
    return summary


def _compare(
    scenario: Scenario, cell: Cell, folder: Path
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """What a cell's summary holds, and by tenant the latencies of both sides."""
    known = json.loads((folder / LIVE_FILE).read_text(encoding="utf-8"))
    names = scenario.tenant_names
    live, numbers = read_live(folder / known["episode"], names)
    sim = play_sim(scenario, cell.caps, known["seed"])
    n = len(sim.outcomes.arrival_s)
    sim = _of(sim, numbers)
    if len(numbers) > n or not np.allclose(
        sim.outcomes.arrival_s, live.outcomes.arrival_s, atol=2e-6
    ):
        raise PlayError(
            f"{folder}: was played with other requests; name another --out, or the scenario, "
            "load and length that it was played with"
        )
    rows = compare_episodes(sim, live, names, scenario.control.episode_s)
    panel = {}
    for i, name in enumerate(names):
        latencies = []
        for side in (sim.outcomes, live.outcomes):
            done = (side.tenant == i) & (side.outcome == Outcome.COMPLETED)
            latencies.append(side.latency_s[done])
        panel[name] = (latencies[0], latencies[1])
    pace, paced = find_pace(scenario, cell.caps, known["seed"], live.outcomes)
    at_its_pace = {
        "step_time_factor": pace,
        "tenants": compare_episodes(_of(paced, numbers), live, names, scenario.control.episode_s),
    }
    return {**asdict(cell), **known, "tenants": rows, "at_its_pace": at_its_pace}, panel


def _of(sim: Episode, numbers: npt.NDArray[np.int64]) -> Episode:
    """The part of a simulated episode that the live one's records name."""
    known = numbers[numbers < len(sim.outcomes.arrival_s)]
    return replace(sim, outcomes=select(sim.outcomes, known))


def _table(cell: Cell, result: dict[str, Any]) -> Table:
    """Both sides of an episode."""
    before, after = (result["server_speed"][when] for when in ("before", "after"))
    now = (
        100 * (before["step_s"] / before["step_s_predicted"] - 1),
        100 * (after["step_s"] / after["step_s_predicted"] - 1),
    )
    note = f"a step alone {now[0]:+.0f} % and {now[1]:+.0f} % from the profile, before and after"
    if result["delivery"]["invalid"]:
        note += f"; INVALID: {'; '.join(result['delivery']['invalid'])}"
    table = Table(title=f"{', '.join(reversed(cell.titles))}: {note}")
    table.add_column("tenant")
    table.add_column("measure")
    for column in ("simulated", "measured", "error"):
        table.add_column(column, justify="right")
    for name, row in result["tenants"].items():
        for label, entry in _measures(row):
            cells = [
                "-" if entry[side] is None else f"{entry[side]:.4g}" for side in ("sim", "live")
            ]
            error = entry.get("error")
            table.add_row(name, label, *cells, "" if error is None else f"{100 * error:+.1f} %")
            name = ""
        found = row["correlation"]
        shown = ["-" if found[key] is None else f"{found[key]:.3f}" for key in ("latency", "ttft")]
        table.add_row(
            "", f"correlation of latency, TTFT over {found['pairs']} requests", *shown, ""
        )
        table.add_section()
    return table


def _measures(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = [
        ("completed", row["completed"]),
        ("dropped", row["dropped"]),
        ("requests/s", row["throughput_rps"]),
        ("output tokens/s", row["output_tokens_per_s"]),
    ]
    for label, field in (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("latency", "latency_s")):
        found += [
            (f"{label} {q}, s", row[field][q])
            for q in QUANTILES
            if row[field][q]["sim"] is not None
        ]
    return found


def errors_table(cells: Sequence[dict[str, Any]]) -> Table:
    """Errors of all episodes in one table, tenant by tenant."""
    table = Table(title="simulated / measured - 1, in percent")
    for column in ("load", "caps", "tenant"):
        table.add_column(column)
    table.add_column("req/s", justify="right")
    for label in ("latency", "TTFT", "ITL"):
        table.add_column(f"{label} p50/p95/p99", justify="right")
    table.add_column("r", justify="right")
    for cell in cells:
        for name, row in cell["tenants"].items():
            times = [
                " / ".join(_percent(row[field][q]["error"]) for q in QUANTILES)
                for field in ("latency_s", "ttft_s", "itl_s")
            ]
            correlation = row["correlation"]["latency"]
            table.add_row(
                f"{cell['load']:g}",
                "/".join(map(str, cell["caps"])),
                name,
                _percent(row["throughput_rps"]["error"]),
                *(times if name != ALL else ("", "", "")),
                "-" if correlation is None else f"{correlation:.2f}",
            )
        table.add_section()
    return table


def pace_table(cells: Sequence[dict[str, Any]]) -> Table:
    """The errors once more, with the simulated steps as slow as each episode's own."""
    paced = [
        {**cell, "tenants": cell["at_its_pace"]["tenants"], "load": cell["load"]} for cell in cells
    ]
    table = errors_table(paced)
    factors = ", ".join(f"{cell['at_its_pace']['step_time_factor']:.2f}" for cell in cells)
    table.title = f"the same with all step times multiplied so that the mean TPOT is met: {factors}"
    return table


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}"
