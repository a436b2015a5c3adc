"""Evaluation on a live server: what its records keep, and what a table may be made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.baselines.records import EpisodeRecord, LiveRecord

RAW_FOLDER = "live"
"""The folder of the raw records, beside the episodes' records."""

WARM_UP_S = 10.0
"""Load before an episode of the protocol that is not measured."""

COOL_DOWN_S = 5.0
"""Rest after it."""

_CONDITIONS = ("serve", "model", "prompt_token_ids")


def live_conditions(options: Mapping[str, Any]) -> str:
    """What a live episode's result depends on beside scenario, policy and seed.

    Where the server listens is no part of it, nor how long it is waited for.

    Args:
        options: fields of `LiveOptions`.
    """
    chosen = {name: options.get(name) for name in _CONDITIONS}
    return "\nlive " + json.dumps(chosen, default=str)


def live_record(steps: Sequence[Mapping[str, Any]]) -> LiveRecord:
    """What an episode's record keeps of `info["live"]`.

    Args:
        steps: `info["live"]` of every step, at least one. The folder in it is a path of
            `.../RAW_FOLDER/EPISODE`.
    """
    last = steps[-1]
    folder = Path(last["folder"])
    return LiveRecord(
        folder=f"{folder.parent.name}/{folder.name}",
        server=last["server"],
        fault=last["fault"],
        invalid=tuple(last["invalid"]),
        scheduled=last["scheduled"],
        delivered=last["delivered"],
        send_lateness_p99_s=last["send_lateness_p99_s"],
        event_loop_lag_max_s=max(step["event_loop_lag_max_s"] for step in steps),
        overrun_max_s=max(step["overrun_s"] for step in steps),
        prefix_hit_rate=last["prefix_hit_rate"],
        server_restarts=last["server_restarts"],
    )


def split_results(
    records: Sequence[EpisodeRecord],
) -> tuple[list[EpisodeRecord], list[str]]:
    """The episodes that count, and a sentence on each that does not.

    Those that a fault truncated and those whose load was not delivered do not count.
    """
    results = [record for record in records if not record.left_out]
    sentences = [
        f"Left out: {record.policy}, seed {record.seed}: {record.left_out}"
        + ("." if record.is_whole else "; the same command plays it again.")
        for record in records
        if record.left_out
    ]
    return results, sentences


def recorded_trajectories(
    records: Sequence[EpisodeRecord], out_dir: Path
) -> dict[str, dict[str, npt.NDArray[np.float64]]]:
    """The episodes of the first seed that all policies have, from their raw records.

    Args:
        records: results.
        out_dir: the folder that the records lie in.

    Returns:
        By policy, as `evaluate.Trajectory` says; nothing without a common seed or raw records.
    """
    seeds: dict[str, set[int]] = {}
    for record in records:
        if record.live is not None and (out_dir / record.live.folder).is_dir():
            seeds.setdefault(record.policy, set()).add(record.seed)
    policies = {record.policy for record in records}
    common = set.intersection(*seeds.values()) if policies == seeds.keys() and seeds else set()
    return {
        record.policy: _trajectory(out_dir / record.live.folder)
        for record in records
        if common and record.seed == min(common) and record.live is not None
    }


def _trajectory(folder: Path) -> dict[str, npt.NDArray[np.float64]]:
    # imported here: it asks for the live backend's packages
    from vllm_tenant_tuning.backends.live.records import STEPS_FILE

    steps = [json.loads(line) for line in (folder / STEPS_FILE).read_text().splitlines()][1:]
    columns = {"caps": "cap"} | {
        name: name for name in ("queued", "latency_p99_s", "completed", "dropped")
    }
    return {
        "time_s": np.array([step["cluster"]["time_s"] for step in steps], np.float64),
        **{
            ours: np.array([step["tenants"][name] for step in steps], np.float64)
            for ours, name in columns.items()
        },
    }
