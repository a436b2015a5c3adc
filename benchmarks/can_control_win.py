"""Whether changing caps online can beat the best static caps of a scenario, and by how much.

    python benchmarks/can_control_win.py SCENARIO... [--trace-dir FOLDER] [--out FOLDER]
    python benchmarks/can_control_win.py --table [--out FOLDER]

The best static caps are chosen on training seeds (`baselines.best_static`). Two controllers are
tuned on training seeds too, from these caps on, by the cross-entropy method (Rubinstein, The
cross-entropy method for combinatorial and continuous optimization, 1999):

- feedback: each tenant's cap follows the exponential of a linear form of what telemetry shows
  (`FEEDBACK_FEATURES`);
- clairvoyant: the same form, and in it the GPU time that arrives in the seconds to come. It is no
  bound, only a controller that knows more.

Where tuning finds nothing better than the static caps on the seeds of their choice, the
controller is the static caps. Then all three play the same evaluation seeds; what is written,
SCENARIO.json in the folder, holds the paired differences with bootstrap intervals and what they
were computed from; `--table` prints what the files hold as Markdown. The form is small and the
search short: that it finds nothing does not prove that nothing can be found.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding

from vllm_tenant_tuning.agents.policy import as_action
from vllm_tenant_tuning.agents.static import StaticPolicy
from vllm_tenant_tuning.baselines.best_static import TRAINING_SEEDS, find_best_static
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.baselines.metrics import TESTED
from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.statistics import paired_differences
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv
from vllm_tenant_tuning.workload import RequestStream, Workload

OUT = Path(__file__).parent / "results" / "can_control_win"
EVALUATION_SEEDS = range(100, 200)

SHOWN = ("return_", "goodput_rps", "weighted_drops")
"""Metrics of the table."""

FEEDBACK_FEATURES = (
    "one",
    "own_queue",  # queued over cap, at most 2
    "own_violation",  # the worst of p99 / SLO over its promises, less 1, within -1 and 1
    "others_violation",  # the same, the worst of the other tenants
    "others_load",  # GPU time that others' arrivals ask for, smoothed, less its mean
    "others_activity",  # others' arrivals over their means, smoothed, at most 3, less 1; the mean
    # by SLO weight: a tenant that asks for little of the GPU may be the one to be spared
    "kv_cache_usage",  # less a half
    "engine_queue",  # requests waiting inside the engine, over 16, at most 2
)
CLAIRVOYANT_FEATURES = (
    *FEEDBACK_FEATURES,
    "own_load_to_come",
    "others_load_to_come",
)

SMOOTHING_S = 10.0
HORIZON_S = 30.0
"""How far the clairvoyant looks ahead."""

GENERATIONS = 20
ELITES = 6
SEEDS_AT_ONCE = 4
SEARCH_SEEDS = range(11_000, 11_060)
SPREAD_OF_CAPS = 0.3
SPREAD_OF_WEIGHTS = 0.5
KEPT = 0.3
"""Share of the last generation's distribution in the next one's."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def gpu_seconds(scenario: Scenario, stream: RequestStream) -> Floats:
    """What each request adds to the engine's steps by the step-time law: (n,) seconds.

    Its prompt's matrix products and attention, and its share of each step that it decodes in.
    """
    assert isinstance(scenario.engine, ContinuousBatchingEngine)
    law = scenario.engine.profile.step_time
    prompt = stream.prompt_tokens.astype(np.float64)
    output = stream.output_tokens.astype(np.float64)
    a_token_ms = (
        law.sequence_ms + law.dense_ms_per_token + law.kv_read_ms_per_token * (prompt + output / 2)
    )
    return (law.prompt_ms(prompt) + output * a_token_ms) / 1000


class Loads:
    """What a scenario's tenants ask of the GPU.

    Args:
        scenario: the task, of the engine fidelity.
        trace_dir: the folder of the trace files.

    Attributes:
        rate_per_s: (n_tenants,) mean requests in a second.
        per_request_s: (n_tenants,) mean GPU time of a request.
        offered: (n_tenants,) mean GPU time asked for in a second.
    """

    def __init__(self, scenario: Scenario, trace_dir: Path | None) -> None:
        self.scenario = scenario
        self._workload = Workload(scenario, trace_dir)
        streams = [self._stream(seed) for seed in SEARCH_SEEDS[:SEEDS_AT_ONCE]]
        costs_s = [self._per_tenant(stream, gpu_seconds(scenario, stream)) for stream in streams]
        counts = [self._per_tenant(stream, np.ones(len(stream))) for stream in streams]
        self.per_request_s: Floats = np.sum(costs_s, axis=0) / np.maximum(np.sum(counts, axis=0), 1)
        self.rate_per_s: Floats = np.asarray(self._workload.offered_rate_per_s)
        self.offered: Floats = self.per_request_s * self.rate_per_s

    def to_come(self, seed: int, horizon_s: float) -> Floats:
        """Mean load in the seconds after each decision: (n_steps + 1, n_tenants).

        Args:
            seed: of the environment, whose first episode is meant.
            horizon_s: how far to look.
        """
        control = self.scenario.control
        stream = self._stream(seed)
        cost_s = gpu_seconds(self.scenario, stream)
        now_s = np.arange(control.n_steps + 1) * control.control_interval_s
        loads = np.zeros((now_s.size, self.scenario.n_tenants))
        for i in range(self.scenario.n_tenants):
            mine = stream.tenant == i
            at_s = stream.arrival_s[mine]
            total = np.concatenate(([0.0], np.cumsum(cost_s[mine])))
            upto, since = (np.searchsorted(at_s, now_s + ahead) for ahead in (horizon_s, 0.0))
            loads[:, i] = (total[upto] - total[since]) / horizon_s
        return loads

    def _stream(self, seed: int) -> RequestStream:
        return self._workload.sample(seeding.np_random(seed)[0])

    def _per_tenant(self, stream: RequestStream, values: Floats) -> Floats:
        return np.bincount(stream.tenant, weights=values, minlength=self.scenario.n_tenants)


class CapRule:
    """Caps from telemetry, for N clusters at once.

    A tenant's cap moves to `exp(weights @ features)`, as fast as `max_delta` lets it.

    Args:
        loads: of the scenario.
        weights: (N, n_tenants, n_features), those of `CLAIRVOYANT_FEATURES` if there are as many.
        to_come: (N, n_steps + 1, n_tenants) for the clairvoyant (see `Loads.to_come`).
    """

    def __init__(self, loads: Loads, weights: Floats, to_come: Floats | None = None) -> None:
        scenario = loads.scenario
        self._loads, self._weights, self._to_come = loads, weights, to_come
        self._kept = np.exp(-scenario.control.control_interval_s / SMOOTHING_S)
        self._slo_s = np.array(
            [
                (
                    tenant.slo_latency_p99_s,
                    tenant.slo_ttft_p99_s or np.inf,
                    tenant.slo_itl_p99_s or np.inf,
                )
                for tenant in scenario.tenants
            ]
        )
        self._slo_weights = np.array([tenant.slo_weight for tenant in scenario.tenants])
        self._rate_per_s = np.broadcast_to(loads.rate_per_s, weights.shape[:2]).copy()
        self._step = 0

    def targets(self, tenants: npt.NDArray[np.void], cluster: npt.NDArray[np.void]) -> Integers:
        """Caps to move to: (N, n_tenants).

        Args:
            tenants: (N, n_tenants) of `TENANT_DTYPE`.
            cluster: (N,) of `CLUSTER_DTYPE`.
        """
        loads, control = self._loads, self._loads.scenario.control
        if self._step > 0:
            seen_per_s = tenants["arrived"] / control.control_interval_s
            self._rate_per_s = self._kept * self._rate_per_s + (1 - self._kept) * seen_per_s
        p99_s = np.stack([tenants[f"{name}_p99_s"] for name in ("latency", "ttft", "itl")], axis=-1)
        worst = np.nan_to_num(p99_s / self._slo_s).max(axis=-1)
        violation = np.clip(worst - 1, -1, 1)
        mean_per_s = np.where(loads.rate_per_s > 0, loads.rate_per_s, 1.0)
        activity = self._slo_weights * (np.minimum(self._rate_per_s / mean_per_s, 3) - 1)
        others_weight = _sum_of_others(self._slo_weights[None])
        everyone = np.ones(violation.shape)
        features = [
            everyone,
            np.minimum(tenants["queued"] / np.maximum(tenants["cap"], 1), 2),
            violation,
            _worst_of_others(violation),
            _sum_of_others(self._rate_per_s * loads.per_request_s - loads.offered),
            _sum_of_others(activity) / np.maximum(others_weight, 1e-9),
            everyone * (cluster["kv_cache_usage"] - 0.5)[:, None],
            everyone * np.minimum(cluster["num_requests_waiting"] / 16, 2)[:, None],
        ]
        if self._to_come is not None:
            ahead = self._to_come[:, self._step] - loads.offered
            features += [ahead, _sum_of_others(ahead)]
        self._step += 1
        exponent = (self._weights * np.stack(features, axis=-1)).sum(axis=-1)
        bounds = max(control.cap_min, 1), control.cap_max
        caps = np.exp(np.clip(exponent, *np.log(bounds)))
        return np.rint(caps).astype(np.int64)


class RulePolicy:
    """A `CapRule` as a policy (`vllm_tenant_tuning.agents.Policy`).

    Args:
        name: its label.
        loads: of the scenario.
        caps: to start with.
        weights: (n_tenants, n_features).
        horizon_s: how far the clairvoyant looks; None for feedback.
    """

    def __init__(
        self,
        name: str,
        loads: Loads,
        caps: tuple[int, ...],
        weights: Floats,
        horizon_s: float | None = None,
    ) -> None:
        self.name = name
        self._loads, self._caps, self._weights = loads, caps, weights
        self._horizon_s = horizon_s

    def initial_caps(self, scenario: Scenario) -> Sequence[int]:
        """The best static caps."""
        return self._caps

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Begin an episode; the clairvoyant draws its requests from the seed."""
        to_come = None
        if self._horizon_s is not None:
            to_come = self._loads.to_come(seed, self._horizon_s)[None]
        self._rule = CapRule(self._loads, self._weights[None], to_come)

    def act(self, observation: npt.NDArray[np.float32], info: dict[str, Any]) -> Integers:
        """Move the caps to the rule's."""
        seen = info["telemetry"]
        targets = self._rule.targets(seen.tenants[None], seen.cluster[None])[0]
        return as_action(targets - info["caps"], self._loads.scenario)


def mean_returns(
    loads: Loads,
    trace_dir: Path | None,
    caps: tuple[int, ...],
    weights: Floats,
    seeds: Sequence[int],
    horizon_s: float | None,
) -> Floats:
    """Mean return of each of P rules over the seeds: (P,).

    Args:
        loads: of the scenario.
        trace_dir: the folder of the trace files.
        caps: to start with.
        weights: (P, n_tenants, n_features).
        seeds: the same for every rule.
        horizon_s: how far the clairvoyant looks; None for feedback.
    """
    scenario, n_rules, n_seeds = loads.scenario, len(weights), len(seeds)
    env = VLLMTenantTuningVectorEnv(n_rules * n_seeds, scenario, trace_dir=trace_dir)
    _, info = env.reset(seed=list(seeds) * n_rules, options={"caps": np.array(caps)})
    to_come = None
    if horizon_s is not None:
        to_come = np.tile([loads.to_come(seed, horizon_s) for seed in seeds], (n_rules, 1, 1))
    rule = CapRule(loads, np.repeat(weights, n_seeds, axis=0), to_come)
    total = np.zeros(env.num_envs)
    for _ in range(scenario.control.n_steps):
        seen = info["telemetry"]
        action = as_action(rule.targets(seen["tenants"], seen["cluster"]) - info["caps"], scenario)
        _, reward, _, _, info = env.step(action)
        total += reward
    env.close()
    means: Floats = total.reshape(n_rules, n_seeds).mean(axis=1)
    return means


def tune(
    loads: Loads,
    trace_dir: Path | None,
    caps: tuple[int, ...],
    horizon_s: float | None,
    generations: int,
    training_seeds: Sequence[int],
) -> tuple[Floats, float]:
    """Search weights by the cross-entropy method.

    Returns:
        (n_tenants, n_features) weights, those of the static caps if nothing better was found,
        and their mean return over the training seeds.
    """
    n_features = len(FEEDBACK_FEATURES if horizon_s is None else CLAIRVOYANT_FEATURES)
    static = np.zeros((len(caps), n_features))
    static[:, 0] = np.log(caps)
    centre, spread = static.copy(), np.full(static.shape, SPREAD_OF_WEIGHTS)
    spread[:, 0] = SPREAD_OF_CAPS
    population = 24 + 4 * len(caps)
    rng = np.random.default_rng(0)
    for generation in range(generations):
        drawn = rng.normal(centre, spread, (population, *static.shape))
        drawn[0] = centre
        first = generation * SEEDS_AT_ONCE % len(SEARCH_SEEDS)
        seeds = SEARCH_SEEDS[first : first + SEEDS_AT_ONCE]
        returns = mean_returns(loads, trace_dir, caps, drawn, seeds, horizon_s)
        best = drawn[np.argsort(-returns)[:ELITES]]
        centre = KEPT * centre + (1 - KEPT) * best.mean(axis=0)
        spread = KEPT * spread + (1 - KEPT) * best.std(axis=0)
    last = np.stack([static, centre, *best])
    returns = mean_returns(loads, trace_dir, caps, last, training_seeds, horizon_s)
    chosen = int(returns.argmax())
    return last[chosen], float(returns[chosen])


def can_control_win(
    name: str,
    trace_dir: Path | None,
    generations: int,
    training_seeds: Sequence[int],
    seeds: Sequence[int],
) -> dict[str, Any]:
    """Choose, tune, play and compare; what the file holds."""
    began = time.perf_counter()
    scenario = load_scenario(name)
    loads = Loads(scenario, trace_dir)
    static = find_best_static(scenario, training_seeds, trace_dir)
    feedback, feedback_return = tune(
        loads, trace_dir, static.caps, None, generations, training_seeds
    )
    clairvoyant, clairvoyant_return = tune(
        loads, trace_dir, static.caps, HORIZON_S, generations, training_seeds
    )
    policies = (
        StaticPolicy(static.caps, "static"),
        RulePolicy("feedback", loads, static.caps, feedback),
        RulePolicy("clairvoyant", loads, static.caps, clairvoyant, HORIZON_S),
    )
    env = make_env(scenario, trace_dir=trace_dir)
    records = [play(env, policy, seed)[0] for policy in policies for seed in seeds]
    env.close()
    return {
        "scenario": name,
        "tenants": list(scenario.tenant_names),
        "training_seeds": [training_seeds[0], training_seeds[-1]],
        "search_seeds": [SEARCH_SEEDS[0], SEARCH_SEEDS[-1]],
        "evaluation_seeds": [seeds[0], seeds[-1]],
        "generations": generations,
        "static": {"caps": static.caps, "training_return": _digits(static.mean_return)},
        "feedback": {
            "training_return": _digits(feedback_return),
            "features": FEEDBACK_FEATURES,
            "weights": _digits(feedback),
        },
        "clairvoyant": {
            "training_return": _digits(clairvoyant_return),
            "horizon_s": HORIZON_S,
            "features": CLAIRVOYANT_FEATURES,
            "weights": _digits(clairvoyant),
        },
        "means": {
            policy.name: {
                metric: _digits(_values(records, policy.name, metric).mean()) for metric in TESTED
            }
            for policy in policies
        },
        "differences": [
            difference.to_dict() for difference in paired_differences(records, "static", TESTED)
        ],
        "episodes": {
            policy.name: {
                metric: _digits(_values(records, policy.name, metric)) for metric in TESTED
            }
            for policy in policies
        },
        "wall_s": round(time.perf_counter() - began),
    }


def markdown_table(folder: Path) -> str:
    """The results in a folder, a row for each scenario and controller."""
    lines = [
        "| scenario (best static caps) | controller | return | goodput, req/s | weighted drops |",
        "|---|---|---|---|---|",
    ]
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        caps = "/".join(map(str, found["static"]["caps"]))
        cells = [_cell(found["means"]["static"][metric]) for metric in SHOWN]
        lines.append(f"| `{found['scenario']}` ({caps}) | static | {' | '.join(cells)} |")
        for policy in ("feedback", "clairvoyant"):
            rows = {d["metric"]: d for d in found["differences"] if d["policy"] == policy}
            cells = [_difference(rows[metric]) for metric in SHOWN]
            lines.append(f"| | {policy} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Can control beat a scenario's best static caps?")
    parser.add_argument("scenario", nargs="*", help="names of scenarios of the engine fidelity")
    parser.add_argument("--trace-dir", type=Path, help="folder of the trace files")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    parser.add_argument("--generations", type=int, default=GENERATIONS, help="of the search")
    parser.add_argument(
        "--training-seeds",
        type=int,
        default=len(TRAINING_SEEDS),
        help="how many choose the static caps and, of what was found, the controller",
    )
    parser.add_argument("--table", action="store_true", help="print the folder's results instead")
    options = parser.parse_args(arguments)
    if options.table:
        print(markdown_table(options.out))
        return
    if not options.scenario:
        parser.error("a scenario or --table is needed")
    if not 1 <= options.training_seeds <= len(TRAINING_SEEDS) or options.generations < 1:
        parser.error(
            f"got --generations {options.generations}, --training-seeds {options.training_seeds}; "
            f"accepted are at least 1, and 1 to {len(TRAINING_SEEDS)}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.scenario:
        found = can_control_win(
            name,
            options.trace_dir,
            options.generations,
            TRAINING_SEEDS[: options.training_seeds],
            EVALUATION_SEEDS,
        )
        text = json.dumps(found, indent=1)
        (options.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        for difference in found["differences"]:
            print(name, *(difference[key] for key in ("policy", "metric", "mean", "interval")))


def _cell(value: float) -> str:
    return f"{value:.4g}"


def _difference(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    text = f"{row['mean']:+.3g} [{low:+.3g}, {high:+.3g}]"
    return text if row["significant"] else f"{text} n.s."


def _worst_of_others(values: Floats) -> Floats:
    """The largest of the other tenants' values: (N, n_tenants); -1 where there are none."""
    n = values.shape[1]
    if n == 1:
        return np.full(values.shape, -1.0)
    others = np.stack([np.delete(values, i, axis=1).max(axis=1) for i in range(n)], axis=1)
    return others


def _sum_of_others(values: Floats) -> Floats:
    """The sum of the other tenants' values: (N, n_tenants)."""
    return values.sum(axis=1, keepdims=True) - values


def _values(records: Sequence[EpisodeRecord], policy: str, metric: str) -> Floats:
    return np.array([getattr(record, metric) for record in records if record.policy == policy])


def _digits(values: Any) -> Any:
    """Five significant digits, as plain data."""
    rounded = np.vectorize(lambda value: float(f"{value:.5g}"))(np.asarray(values, np.float64))
    return rounded.tolist()


if __name__ == "__main__":
    main()
