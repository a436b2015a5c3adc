"""The same requests in two backends, side by side: what `validate` tells of an episode.

Everything here works on outcomes and records, without a server or a simulator.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.live.records import (
    REQUESTS_FILE,
    chunk_times_s,
    read_outcomes,
    read_requests,
)

Floats = npt.NDArray[np.float64]

QUANTILES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
MIN_PAIRS: Final = 3
ALL: Final = "all"
"""The name of the row over all tenants."""


@dataclass(frozen=True, eq=False)
class Episode:
    """One backend's episode.

    Attributes:
        outcomes: of R requests, the same and in the same order as the other backend's.
        itl_s: for each tenant and then for all of them the inter-token latency's p50, p95 and
            p99 over the episode, in seconds; NaN without tokens.
    """

    outcomes: RequestOutcomes
    itl_s: Sequence[Mapping[str, float]]


def read_live(folder: Path, tenants: Sequence[str]) -> tuple[Episode, npt.NDArray[np.int64]]:
    """A live episode from its records.

    Returns:
        The episode, and (R,) the numbers of its requests in their stream.
    """
    records = read_requests(folder)
    gaps: dict[str, list[Floats]] = {name: [] for name in tenants}
    for record in records:
        gaps[record["tenant"]].append(inter_token_s(record))
    numbers = np.array(sorted(record["request"] for record in records), np.int64)
    by_tenant = [np.concatenate([np.empty(0), *gaps[name]]) for name in tenants]
    itl_s = [percentiles(values) for values in (*by_tenant, np.concatenate(by_tenant))]
    return Episode(read_outcomes(folder), itl_s), numbers


def inter_token_s(record: Mapping[str, Any]) -> Floats:
    """(tokens - 1,) seconds between a recorded request's tokens; 0 within a chunk."""
    times, counts = chunk_times_s(record)
    return np.diff(np.repeat(times, counts))


def percentiles(values: Floats) -> dict[str, float]:
    """The p50, p95 and p99 of (n,) values; NaN of none."""
    if values.size == 0:
        return dict.fromkeys(QUANTILES, float("nan"))
    return {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}


def select(outcomes: RequestOutcomes, chosen: npt.NDArray[Any]) -> RequestOutcomes:
    """The chosen requests, by number or by mask."""
    return RequestOutcomes(**{name: values[chosen] for name, values in vars(outcomes).items()})


def compare_episodes(
    sim: Episode, live: Episode, tenants: Sequence[str], episode_s: float
) -> dict[str, Any]:
    """Both episodes' measures, tenant by tenant and over all.

    Percentiles are those of each backend's own completed requests; what the end of the episode
    cut off is in neither. Correlations are Pearson's over the requests that both completed.

    Args:
        sim: what was predicted.
        live: what was measured.
        tenants: names, in the order of the outcomes' indices.
        episode_s: length of the episode.

    Returns:
        By tenant's name, and `ALL`: `requests`, `completed`, `dropped`, `failed`,
        `throughput_rps`, `output_tokens_per_s`, and `ttft_s`, `itl_s`, `latency_s` by
        percentile; each a mapping of `sim`, `live` and, for times and rates, `error`
        (sim / live - 1; None where it is not defined). `correlation` has `latency`, `ttft` and
        the number of `pairs`.
    """
    rows = {}
    for i, name in enumerate([*tenants, ALL]):
        chosen = (
            np.ones(len(live.outcomes.tenant), np.bool_)
            if name == ALL
            else live.outcomes.tenant == i
        )
        ours, theirs = select(sim.outcomes, chosen), select(live.outcomes, chosen)
        done = [side.outcome == Outcome.COMPLETED for side in (ours, theirs)]
        row: dict[str, Any] = {
            "requests": int(chosen.sum()),
            "completed": _pair(*(int(mask.sum()) for mask in done)),
            "dropped": _pair(*_counts(ours, theirs, Outcome.DROPPED)),
            "failed": _pair(*_counts(ours, theirs, Outcome.FAILED)),
            "throughput_rps": _measured(*(float(mask.sum()) / episode_s for mask in done)),
            "output_tokens_per_s": _measured(
                *(
                    float(side.output_tokens[mask].sum()) / episode_s
                    for side, mask in zip((ours, theirs), done, strict=True)
                )
            ),
        }
        for field in ("ttft_s", "latency_s"):
            found = [
                percentiles(getattr(side, field)[mask])
                for side, mask in zip((ours, theirs), done, strict=True)
            ]
            row[field] = {q: _measured(found[0][q], found[1][q]) for q in QUANTILES}
        row["itl_s"] = {q: _measured(sim.itl_s[i][q], live.itl_s[i][q]) for q in QUANTILES}
        both = done[0] & done[1]
        row["correlation"] = {
            "pairs": int(both.sum()),
            "latency": _pearson(ours.latency_s[both], theirs.latency_s[both]),
            "ttft": _pearson(ours.ttft_s[both], theirs.ttft_s[both]),
        }
        rows[name] = row
    return rows


def pack_requests(folder: Path) -> None:
    """Compress an episode's requests in place; `read_requests` reads them all the same."""
    source = folder / REQUESTS_FILE
    # without a time of its own in it, the same records give the same bytes
    packed = gzip.compress(source.read_bytes(), mtime=0)
    (folder / f"{REQUESTS_FILE}.gz").write_bytes(packed)
    source.unlink()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON."""
    text = json.dumps(content, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _counts(ours: RequestOutcomes, theirs: RequestOutcomes, outcome: Outcome) -> tuple[int, int]:
    return int((ours.outcome == outcome).sum()), int((theirs.outcome == outcome).sum())


def _pair(sim: int, live: int) -> dict[str, int]:
    return {"sim": sim, "live": live}


def _measured(sim: float, live: float) -> dict[str, float | None]:
    defined = np.isfinite(sim) and np.isfinite(live)
    return {
        "sim": round(sim, 6) if np.isfinite(sim) else None,
        "live": round(live, 6) if np.isfinite(live) else None,
        "error": round(sim / live - 1, 5) if defined and live > 0 else None,
    }


def _pearson(ours: Floats, theirs: Floats) -> float | None:
    if len(ours) < MIN_PAIRS or np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return None
    return round(float(np.corrcoef(ours, theirs)[0, 1]), 4)
