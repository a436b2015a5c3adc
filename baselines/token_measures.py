"""What an episode's record holds where the engine has tokens: latencies, work, energy, cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends import RequestOutcomes
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario

Measures = dict[str, float | None]


def token_measures(
    scenario: Scenario,
    cluster: npt.NDArray[np.void],
    outcomes: RequestOutcomes,
    episode_s: float,
    good: float,
) -> Measures:
    """Fields of an `EpisodeRecord`; nothing for an engine without tokens.

    The GPU is paid for the whole episode, whatever it does: the price of a request falls as
    more of them are good.

    Args:
        scenario: the task.
        cluster: structured (steps,) of `telemetry.CLUSTER_DTYPE`.
        outcomes: of all requests.
        episode_s: how long the episode was.
        good: requests that met their SLOs.
    """
    engine = scenario.engine
    if not isinstance(engine, ContinuousBatchingEngine):
        return {}
    tokens = _sum(cluster["generation_tokens"])
    energy_j = float(cluster["energy_j"].sum())
    price_usd = (engine.gpu_price_per_hour_usd or np.nan) * episode_s / 3600
    return {
        **latency_measures(outcomes),
        "ttft_p50_s": _percentile(outcomes.ttft_s, 50),
        "tpot_p50_s": _percentile(outcomes.tpot_s, 50),
        "preemptions": _finite(_sum(cluster["preemptions"])),
        "generation_tokens_per_s": _finite(tokens / episode_s),
        "energy_j": _finite(energy_j),
        "usd_per_1000_good": _ratio(1e3 * price_usd, good),
        "usd_per_million_tokens": _ratio(1e6 * price_usd, tokens),
    }


def latency_measures(outcomes: RequestOutcomes, of: Any = slice(None)) -> Measures:
    """99th percentiles of TTFT and of the mean inter-token latency of single requests.

    Args:
        outcomes: of all requests; a backend without tokens gives None for both.
        of: which requests, an index into the arrays.
    """
    return {
        "ttft_p99_s": _percentile(outcomes.ttft_s[of], 99),
        "tpot_p99_s": _percentile(outcomes.tpot_s[of], 99),
    }


def _percentile(values: npt.NDArray[np.float64], level: float) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.percentile(known, level)) if known.size else None


def _sum(growth: npt.NDArray[np.float64]) -> float:
    """What a counter grew by; NaN if it was never read.

    An interval in which it was not read is counted with the next one in which it was.
    """
    return np.nan if np.isnan(growth).all() else float(np.nansum(growth))


def _ratio(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole else None


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
