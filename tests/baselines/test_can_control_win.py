"""The measurement of whether control can win: its rules do what they say, its table too."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.agents.static import StaticPolicy
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "can_control_win.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("can_control_win", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    whole = load_scenario("h200_chat_batch")
    control = whole.control.model_copy(update={"episode_s": 120.0})
    return whole.model_copy(update={"control": control})


@pytest.fixture(scope="module")
def loads(bench: ModuleType, scenario: Scenario) -> Any:
    return bench.Loads(scenario, None)


def weights_of(bench: ModuleType, caps: tuple[int, ...], n_features: int) -> Any:
    weights = np.zeros((len(caps), n_features))
    weights[:, 0] = np.log(caps)
    return weights


@pytest.mark.parametrize("horizon_s", [None, 20.0])
def test_a_rule_without_weights_is_static(
    bench: ModuleType, scenario: Scenario, loads: Any, horizon_s: float | None
) -> None:
    features = bench.FEEDBACK_FEATURES if horizon_s is None else bench.CLAIRVOYANT_FEATURES
    weights = weights_of(bench, (48, 5), len(features))
    env = make_env(scenario)
    rule, _ = play(env, bench.RulePolicy("rule", loads, (48, 5), weights, horizon_s), 3)
    static, _ = play(env, StaticPolicy((48, 5)), 3)
    assert rule.return_ == static.return_
    assert rule.cap_changes == 0


@pytest.mark.parametrize("horizon_s", [None, 20.0])
def test_tuning_and_playing_see_the_same_rule(
    bench: ModuleType, scenario: Scenario, loads: Any, horizon_s: float | None
) -> None:
    features = bench.FEEDBACK_FEATURES if horizon_s is None else bench.CLAIRVOYANT_FEATURES
    rng = np.random.default_rng(0)
    weights = weights_of(bench, (48, 5), len(features)) + rng.normal(0, 0.3, (2, len(features)))
    seeds = [11, 12, 13]
    tuned = bench.mean_returns(loads, None, (48, 5), weights[None], seeds, horizon_s)
    env = make_env(scenario)
    policy = bench.RulePolicy("rule", loads, (48, 5), weights, horizon_s)
    records = [play(env, policy, seed)[0] for seed in seeds]
    assert tuned[0] == pytest.approx(np.mean([record.return_ for record in records]), rel=1e-12)
    assert records[0].cap_changes > 0


def test_the_clairvoyant_sees_the_requests_that_arrive(
    bench: ModuleType, scenario: Scenario, loads: Any
) -> None:
    env = make_env(scenario)
    play(env, StaticPolicy((48, 5)), 5)
    unwrapped: Any = env.unwrapped
    played = unwrapped.outcomes()
    assert not isinstance(scenario.engine, str)
    law = scenario.engine.profile.step_time  # type: ignore[union-attr]
    to_come = loads.to_come(5, 20.0)
    assert to_come.shape == (121, 2)
    for step, tenant in ((0, 0), (30, 0), (30, 1), (110, 0)):
        now_s = step * scenario.control.control_interval_s
        total_s = 0.0
        for i in np.flatnonzero(played.tenant == tenant):
            if not now_s <= played.arrival_s[i] < now_s + 20:
                continue
            prompt, output = int(played.prompt_tokens[i]), int(played.output_tokens[i])
            total_s += 1e-3 * law.dense_ms_per_token * (prompt + output)
            total_s += 1e-3 * law.sequence_ms * output
            total_s += 1e-3 * law.prefill_attention_ms_per_pair * prompt * prompt / 2
            total_s += 1e-3 * law.kv_read_ms_per_token * output * (prompt + output / 2)
        assert to_come[step, tenant] == pytest.approx(total_s / 20, rel=1e-6)


def test_the_features_by_hand(bench: ModuleType, loads: Any) -> None:
    # one feature at a time: the cap is exp(log 10 + 1 * feature)
    tenants = np.zeros((1, 2), TENANT_DTYPE)
    for name in ("latency_p99_s", "ttft_p99_s", "itl_p99_s"):
        tenants[name] = np.nan
    tenants["cap"] = [[40, 10]]
    tenants["queued"] = [[10, 100]]  # a quarter of the cap; ten times the cap counts as 2
    tenants["ttft_p99_s"] = [[1.5, 1.0]]  # chat's promise is 1 s, batch has none
    tenants["latency_p99_s"] = [[3.0, 60.0]]  # of 30 s and of 120 s
    cluster = np.zeros(1, CLUSTER_DTYPE)
    cluster["kv_cache_usage"] = 0.75
    cluster["num_requests_waiting"] = 8
    expected = {
        "own_queue": (0.25, 2.0),
        "own_violation": (0.5, -0.5),
        "others_violation": (-0.5, 0.5),
        "others_load": (0.0, 0.0),  # nothing seen yet: the mean
        "others_activity": (0.0, 0.0),
        "kv_cache_usage": (0.25, 0.25),
        "engine_queue": (0.5, 0.5),
    }
    assert set(expected) == set(bench.FEEDBACK_FEATURES) - {"one"}
    for name, values in expected.items():
        weights = weights_of(bench, (10, 10), len(bench.FEEDBACK_FEATURES))
        weights[:, bench.FEEDBACK_FEATURES.index(name)] = 1.0
        caps = bench.CapRule(loads, weights[None]).targets(tenants, cluster)
        assert caps.tolist() == [[round(10 * math.exp(value)) for value in values]], name


def test_loads_and_activity_follow_what_arrives(
    bench: ModuleType, scenario: Scenario, loads: Any
) -> None:
    tenants, cluster = np.zeros((1, 2), TENANT_DTYPE), np.zeros(1, CLUSTER_DTYPE)
    tenants["arrived"] = [[15, 0]]  # in a second; chat's mean is 10, batch falls silent
    kept = math.exp(-1 / bench.SMOOTHING_S)
    rates = np.array(loads.rate_per_s)
    for name in ("others_load", "others_activity"):
        weights = weights_of(bench, (10, 10), len(bench.FEEDBACK_FEATURES))
        weights[:, bench.FEEDBACK_FEATURES.index(name)] = 1.0
        rule = bench.CapRule(loads, weights[None])
        for _ in range(21):  # the first decision has seen no interval yet
            caps = rule.targets(tenants, cluster)
        smoothed = kept**20 * rates + (1 - kept**20) * np.array([15.0, 0.0])
        if name == "others_load":
            feature = (smoothed - rates) * loads.per_request_s
        else:
            feature = smoothed / rates - 1
        assert caps.tolist() == [[round(10 * math.exp(value)) for value in feature[::-1]]], name


def test_the_table_says_what_is_not_significant(bench: ModuleType, tmp_path: Path) -> None:
    def row(policy: str, metric: str, mean: float, significant: bool) -> dict[str, Any]:
        interval = [mean - 1, mean + 1]
        return {
            "policy": policy,
            "metric": metric,
            "mean": mean,
            "interval": interval,
            "significant": significant,
        }

    found = {
        "scenario": "mine",
        "static": {"caps": [8, 2]},
        "means": {"static": dict.fromkeys(bench.SHOWN, 100.0)},
        "differences": [
            row(policy, metric, 5.0 if policy == "feedback" else 0.5, policy == "feedback")
            for policy in ("feedback", "clairvoyant")
            for metric in bench.SHOWN
        ],
    }
    (tmp_path / "mine.json").write_text(json.dumps(found), encoding="utf-8")
    lines = bench.markdown_table(tmp_path).splitlines()
    assert lines[2] == "| `mine` (8/2) | static | 100 | 100 | 100 |"
    assert lines[3] == "| | feedback |" + " +5 [+4, +6] |" * 3
    assert lines[4] == "| | clairvoyant |" + " +0.5 [-0.5, +1.5] n.s. |" * 3


@pytest.mark.parametrize(
    "arguments",
    [[], ["study", "--training-seeds", "0"], ["study", "--training-seeds", "21"],
     ["study", "--generations", "0"]],
)  # fmt: skip
def test_arguments_are_refused_before_anything_runs(
    bench: ModuleType, tmp_path: Path, arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main([*arguments, "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert not (tmp_path / "out").exists()


def test_the_whole_measurement_compares_with_the_static_caps_that_were_chosen(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = load_scenario("h200_long_context")
    control = whole.control.model_copy(update={"episode_s": 300.0, "cap_max": 8})
    tenants = tuple(t.model_copy(update={"cap_initial": 4}) for t in whole.tenants)
    short = whole.model_copy(update={"control": control, "tenants": tenants})
    monkeypatch.setattr(bench, "load_scenario", lambda name: short)
    monkeypatch.setattr(bench, "EVALUATION_SEEDS", range(100, 104))
    arguments = ["h200_long_context", "--generations", "2", "--training-seeds", "2"]
    bench.main([*arguments, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "h200_long_context.json").read_text(encoding="utf-8"))
    assert found["training_seeds"] == [10_000, 10_001]
    assert found["evaluation_seeds"] == [100, 103]
    env = make_env(short)
    caps = tuple(found["static"]["caps"])
    alone = [play(env, StaticPolicy(caps), seed)[0].return_ for seed in range(100, 104)]
    assert found["episodes"]["static"]["return_"] == pytest.approx(alone, rel=1e-4)
    for policy in ("feedback", "clairvoyant"):
        # never worse on the seeds of its choice: the static caps are among what it chooses from
        assert found[policy]["training_return"] >= found["static"]["training_return"] - 1e-2
        features = np.array(found[policy]["weights"]).shape
        assert features == (2, len(found[policy]["features"]))
