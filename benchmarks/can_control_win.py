"""Can control win? The best static caps of a scenario against a feedback tuned to it.

    python benchmarks/can_control_win.py SCENARIO [--trace-dir FOLDER] [--json FILE]

The caps are the best of a grid on training seeds (`baselines/best_static.py`). The feedback moves
each tenant's cap, within `max_delta` an interval, towards a linear function of what the
observation says of the tenant, of the others and of the engine; scipy's differential evolution
tunes its weights on other training seeds, beginning at the best static caps. Both then play
evaluation seeds that neither has seen. A feedback that wins shows that control can win; one that
does not win shows nothing beyond itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import differential_evolution
from scipy.stats import bootstrap, wilcoxon

from vllm_tenant_tuning.baselines.best_static import find_best_static
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

Floats = npt.NDArray[np.float64]

OWN = ("queued", "in_flight", "arrival_rate", "latency_p99")
OTHERS = ("queued", "arrival_rate", "latency_p99")
TUNING_SEEDS = range(11_000, 11_012)
EVALUATION_SEEDS = range(100, 200)
POPULATION = 40
METRICS = ("return", "goodput_rps", "weighted_drops", "latency_p99_s")
MAX_TENANTS_OF_THEIR_OWN = 3
"""Up to so many tenants have weights of their own; more share them, but not the constant."""


@dataclass(frozen=True)
class Feedback:
    """Caps that follow `cap_max * (constant + weights . features)`.

    Attributes:
        constant: (n_tenants,).
        weights: (n_tenants, n_features).
    """

    constant: Floats
    weights: Floats


class Features:
    """What a feedback reads, (N, n_tenants, n_features), from a batch of observations."""

    def __init__(self, env: VLLMTenantTuningVectorEnv) -> None:
        scenario = env.scenario
        place = {name: i for i, name in enumerate(env.observation_names)}
        ttft = "ttft_p99" if f"{scenario.tenant_names[0]}.ttft_p99" in place else "itl_p50"
        self.names = (
            *OWN,
            ttft,
            *(f"others.{name}" for name in (*OTHERS, ttft)),
            "kv_cache_usage",
            "num_requests_waiting",
        )

        def columns(names: Sequence[str]) -> npt.NDArray[np.int64]:
            return np.array([[place[f"{t}.{n}"] for n in names] for t in scenario.tenant_names])

        self._own = columns((*OWN, ttft))
        self._others = columns((*OTHERS, ttft))
        self._cluster = [
            place[f"cluster.{name}"] for name in ("kv_cache_usage", "num_requests_waiting")
        ]
        # requests in units of a cap, not of max_num_seqs
        self._scale = np.array([1.0, scenario.max_num_seqs / scenario.control.cap_max])

    def __call__(self, observations: npt.NDArray[np.float32]) -> Floats:
        own = observations[:, self._own].astype(np.float64)
        others = observations[:, self._others].astype(np.float64)
        n = others.shape[1]
        rest = (others.sum(axis=1, keepdims=True) - others) / max(n - 1, 1)
        cluster = observations[:, self._cluster] * self._scale
        shared = np.broadcast_to(cluster[:, None], (*own.shape[:2], 2))
        return np.concatenate([own, rest, shared], axis=2)


def play(
    scenario: Scenario,
    caps: Sequence[int],
    constant: Floats,
    weights: Floats,
    seeds: Sequence[int],
    trace_dir: Path | None,
) -> dict[str, Floats]:
    """Play every feedback of a batch on every seed.

    Args:
        scenario: the task.
        caps: to start with.
        constant: (B, n_tenants) of the feedbacks.
        weights: (B, n_tenants, n_features).
        seeds: S of them, the same for all.
        trace_dir: the folder of the trace files.

    Returns:
        `METRICS`, (B, S) each; the 99th percentile is of all tenants' latencies.
    """
    n_each, control = len(seeds), scenario.control
    env = VLLMTenantTuningVectorEnv(len(constant) * n_each, scenario, trace_dir=trace_dir)
    features = Features(env)
    observations, infos = env.reset(
        seed=[*seeds] * len(constant), options={"caps": np.asarray(caps)}
    )
    offsets = np.repeat(constant, n_each, axis=0)
    slopes = np.repeat(weights, n_each, axis=0)
    total = np.zeros(env.num_envs)
    good = np.zeros(env.num_envs)
    for _ in range(control.n_steps):
        wanted = control.cap_max * (
            offsets + np.einsum("ntf,ntf->nt", features(observations), slopes)
        )
        delta = np.rint(np.clip(wanted - infos["caps"], -control.max_delta, control.max_delta))
        observations, rewards, _, _, infos = env.step(delta.astype(np.int64) + control.max_delta)
        total += rewards
        good += infos["telemetry"]["tenants"]["good"].sum(axis=1)
    dropped = infos["telemetry"]["tenants"]["dropped_total"]
    drop_weights = np.array([tenant.drop_weight for tenant in scenario.tenants])
    p99_s = [np.nanpercentile(env.outcomes(i).latency_s, 99) for i in range(env.num_envs)]
    env.close()
    shape = (len(constant), n_each)
    return {
        "return": total.reshape(shape),
        "goodput_rps": good.reshape(shape) / control.episode_s,
        "weighted_drops": (dropped * drop_weights).sum(axis=1).reshape(shape),
        "latency_p99_s": np.array(p99_s).reshape(shape),
    }


def tune(
    scenario: Scenario, caps: Sequence[int], generations: int, trace_dir: Path | None
) -> Feedback:
    """The feedback of the highest mean return on the tuning seeds."""
    env = VLLMTenantTuningVectorEnv(1, scenario, trace_dir=trace_dir)
    n_features = len(Features(env).names)
    env.close()
    n = scenario.n_tenants
    own = n if n <= MAX_TENANTS_OF_THEIR_OWN else 1

    def decode(x: Floats) -> tuple[Floats, Floats]:
        weights = x[:, n:].reshape(len(x), own, n_features)
        return x[:, :n], np.broadcast_to(weights, (len(x), n, n_features))

    def loss(x: Floats) -> Floats:
        batch = x.T if x.ndim == 2 else x[None]
        returns = play(scenario, caps, *decode(batch), TUNING_SEEDS, trace_dir)["return"]
        losses: Floats = -returns.mean(axis=1)
        return losses if x.ndim == 2 else losses[0]

    rng = np.random.default_rng(0)
    start = np.concatenate([np.array(caps) / scenario.control.cap_max, np.zeros(own * n_features)])
    scatter = np.concatenate([np.full(n, 0.15), np.full(own * n_features, 0.1)])
    bounds = [(0.0, 1.5)] * n + [(-3.0, 3.0)] * (own * n_features)
    population = start + rng.standard_normal((POPULATION, len(start))) * scatter
    # sparse at first: a tenth of the weights, so that not all of them must be right at once
    population[:, n:] *= rng.random((POPULATION, own * n_features)) < 0.2
    population[0] = start
    found = differential_evolution(
        loss,
        bounds,
        init=np.clip(population, *np.array(bounds).T),
        maxiter=generations,
        mutation=(0.4, 0.9),
        recombination=0.6,
        polish=False,
        tol=0,
        rng=rng,
        vectorized=True,
        updating="deferred",
    )
    constant, weights = decode(found.x[None])
    return Feedback(constant[0], weights[0])


def compare(scenario: Scenario, generations: int, trace_dir: Path | None) -> dict[str, Any]:
    """Best static caps and tuned feedback on the evaluation seeds, as plain data."""
    static = find_best_static(scenario, trace_dir=trace_dir)
    feedback = tune(scenario, static.caps, generations, trace_dir)
    fixed = np.array(static.caps) / scenario.control.cap_max
    seen = play(
        scenario,
        static.caps,
        np.stack([fixed, feedback.constant]),
        np.stack([np.zeros_like(feedback.weights), feedback.weights]),
        EVALUATION_SEEDS,
        trace_dir,
    )
    measured = {}
    for name in METRICS:
        held, moved = seen[name]
        difference = moved - held
        interval = bootstrap(
            (difference,), np.mean, n_resamples=10_000, method="percentile", rng=0
        ).confidence_interval
        measured[name] = {
            "best_static": float(held.mean()),
            "feedback": float(moved.mean()),
            "difference": float(difference.mean()),
            "low": float(interval.low),
            "high": float(interval.high),
            "wilcoxon_p": float(wilcoxon(difference).pvalue) if difference.any() else 1.0,
        }
    env = VLLMTenantTuningVectorEnv(1, scenario, trace_dir=trace_dir)
    names = Features(env).names
    env.close()
    return {
        "scenario": scenario.name,
        "best_static": list(static.caps),
        "tuning_seeds": [TUNING_SEEDS.start, TUNING_SEEDS.stop],
        "evaluation_seeds": [EVALUATION_SEEDS.start, EVALUATION_SEEDS.stop],
        "generations": generations,
        "measured": measured,
        "feedback": {
            "features": list(names),
            "constant": feedback.constant.round(4).tolist(),
            "weights": feedback.weights.round(4).tolist(),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenario", metavar="NAME|FILE")
    parser.add_argument("--trace-dir", type=Path, metavar="FOLDER")
    parser.add_argument("--generations", type=int, default=25, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args(arguments)
    scenario = load_scenario(options.scenario)
    result = compare(scenario, options.generations, options.trace_dir)
    print(f"{scenario.name}: best static {'/'.join(map(str, result['best_static']))}")
    for name, row in result["measured"].items():
        print(
            f"  {name}: {row['best_static']:.4g} static, {row['feedback']:.4g} feedback, "
            f"difference {row['difference']:+.4g} [{row['low']:+.4g}, {row['high']:+.4g}], "
            f"p = {row['wilcoxon_p']:.2g}"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
