"""The published study's table, reproduced beside its figures, with the 2x2 ablation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tenant_tuning.baselines.evaluate import evaluate
from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.statistics import paired_differences

PUBLISHED = {
    "static": {"throughput": 0.686, "drops": 1.9, "p99_latency": 11.75},
    "naive": {"throughput": 0.515, "drops": 309.5, "p99_latency": 12.79},
    "differentiated": {"throughput": 0.601, "drops": 154.7, "p99_latency": 13.25},
}
"""The study's averages over 20 seeds of 1800 s: requests/s, requests, seconds."""

METRICS = {
    "throughput": "throughput_rps",
    "drops": "drops",
    "p99_latency": "latency_p99_s",
}
"""The study's names and those of an episode's record."""

ABLATION = {
    "coupled_window_p99": "naive",
    "coupled_backlog": "coupled_backlog",
    "per_tenant_window_p99": "per_tenant_window_p99",
    "per_tenant_backlog": "differentiated",
}
"""The cells of {coupled, per tenant} x {window p99, backlog} and their policies."""


def run_study(
    n_seeds: int = 20, on_progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Play the study's policies on the scenario `study` and compare.

    Args:
        n_seeds: the seeds are 0 to `n_seeds - 1`, the same for every policy; at least 2.
        on_progress: called with (episodes done, episodes in all).

    Returns:
        `static`, `naive` and `differentiated`: means by the study's names; `standard_error`:
        the same of each mean; `published`; `ablation`: mean drops and standard error of each
        cell; `tests`: paired differences of drops between policies, with intervals and
        p-values after Holm's correction.

    Raises:
        ValueError: fewer than two seeds, or more than there are evaluation seeds.
    """
    if not 2 <= n_seeds <= 1000:
        raise ValueError(f"seeds: got {n_seeds}; accepted are 2 to 1000")
    policies = ["static", *ABLATION.values()]
    with tempfile.TemporaryDirectory() as folder:
        records = evaluate(policies, "study", range(n_seeds), Path(folder), on_progress=on_progress)
    result: dict[str, Any] = {"seeds": n_seeds, "published": PUBLISHED}
    result["standard_error"] = {}
    for policy in PUBLISHED:
        for part, over in ((result, np.mean), (result["standard_error"], _standard_error)):
            part[policy] = {
                name: float(over(_values(records, policy, field)))
                for name, field in METRICS.items()
            }
    result["ablation"] = {
        cell: {
            "drops": float(np.mean(_values(records, policy, "drops"))),
            "standard_error": _standard_error(_values(records, policy, "drops")),
        }
        for cell, policy in ABLATION.items()
    }
    result["tests"] = {
        reference: [
            difference.to_dict() for difference in paired_differences(records, reference, ["drops"])
        ]
        for reference in ("static", "naive")
    }
    return result


def _values(records: Sequence[EpisodeRecord], policy: str, field: str) -> list[float]:
    return [getattr(record, field) for record in records if record.policy == policy]


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
