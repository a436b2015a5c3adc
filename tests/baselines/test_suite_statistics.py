"""Scores, profiles, verdicts and ablations against plain counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from synthetic import record

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.baselines.benchmark import PlayedPolicy, ScenarioRecords
from vllm_tenant_tuning.baselines.metrics import TESTED
from vllm_tenant_tuning.baselines.statistics import paired_differences
from vllm_tenant_tuning.baselines.suite import Suite
from vllm_tenant_tuning.baselines.suite_statistics import (
    ablation_results,
    count_verdicts,
    scenario_results,
    shares_above,
    suite_scores,
    verdicts,
)

POLICIES = ("best_static", "naive", "robust", "aimd")
N = 20


def suite(**changes: Any) -> Suite:
    cells = [
        {"label": label, "policy": policy} for label, policy in (("A", "naive"), ("B", "aimd"))
    ]
    ablation = {"name": "one", "question": "?", "compared": "first", "cells": cells}
    content = {
        "name": "s",
        "description": "",
        "scenarios": ["study", "reserved"],
        "policies": POLICIES,
        "seeds": f"0:{N}",
        "ablations": [ablation],
    }
    return Suite.model_validate(content | changes)


def recorded(asked: str, means: dict[str, float], seed: int) -> ScenarioRecords:
    rng = np.random.default_rng(seed)
    policies = {p: "best_static:4/4" if p == "best_static" else p for p in means}
    episodes = [
        record(policies[p], i, **{"return": mean + rng.normal()}, scenario=asked)
        for p, mean in means.items()
        for i in range(N)
    ]
    return ScenarioRecords(
        asked,
        load_scenario(asked),
        tuple(PlayedPolicy(asked=p, label=policies[p], text=p, digest="0123") for p in means),
        tuple(episodes),
        {},
    )


@pytest.fixture
def two() -> list[ScenarioRecords]:
    first = dict(zip(POLICIES, (100.0, 90.0, 110.0, 100.0), strict=True))
    second = {"best_static": 50.0, "naive": 60.0, "robust": 70.0}
    return [recorded("study", first, 0), recorded("reserved", second, 1)]


def test_returns_are_scaled_by_the_lowest_and_the_highest_mean(two: list[ScenarioRecords]) -> None:
    results, missing = scenario_results(suite(), two)
    assert missing == []
    for result, lowest in zip(results, ("naive", "best_static"), strict=True):
        assert result.scores[lowest].mean() == pytest.approx(0, abs=1e-12)
        assert result.scores["robust"].mean() == pytest.approx(1)
        low, high = result.scale
        returns = [e.return_ for e in result.recorded.of(["naive"])]
        np.testing.assert_allclose(result.scores["naive"], (np.array(returns) - low) / (high - low))


def test_scores_pool_the_scenarios_and_leave_out_who_lacks_one(two: list[ScenarioRecords]) -> None:
    results, _ = scenario_results(suite(), two)
    scores = {score.policy: score for score in suite_scores(suite(), results)}
    assert set(scores) == {"best_static", "naive", "robust"}
    for policy, score in scores.items():
        pooled = np.sort(np.concatenate([result.scores[policy] for result in results]))
        assert score.iqm == pytest.approx(pooled[N // 2 : -N // 2].mean())
        assert score.interval[0] < score.iqm < score.interval[1]
        profile = score.profile
        for threshold, share in zip(profile.thresholds, profile.share, strict=True):
            above = [(result.scores[policy] > threshold).mean() for result in results]
            assert share == pytest.approx(np.mean(above))
        assert (profile.low <= profile.share + 1e-12).all()
        assert (profile.share <= profile.high + 1e-12).all()
    assert list(scores) == sorted(scores, key=lambda policy: -scores[policy].iqm)


def test_a_profile_weighs_scenarios_alike() -> None:
    few, many = np.array([0.0, 1.0]), np.array([1.0] * 8)
    np.testing.assert_array_equal(
        shares_above([few, many], np.array([-1, 0, 0.5, 1])), [1, 0.75, 0.75, 0]
    )


def test_verdicts_are_the_tests_of_each_scenario(two: list[ScenarioRecords]) -> None:
    results, _ = scenario_results(suite(), two)
    found = verdicts(suite(), results)
    assert list(found) == ["naive", "robust", "aimd"]
    assert found["naive"]["study"]["return_"] == "worse"
    assert found["naive"]["reserved"]["return_"] == "better"
    assert found["aimd"]["study"]["return_"] == "not significant"
    assert "reserved" not in found["aimd"]
    assert count_verdicts(found["robust"], "return_") == {"better": 2}
    assert count_verdicts(found["robust"], "goodput_rps") == {"not significant": 2}


def test_an_ablation_is_tested_by_itself(two: list[ScenarioRecords]) -> None:
    (one,) = ablation_results(suite(), two)  # aimd was not played in reserved
    assert (one.scenario, one.labels) == ("study", ("A", "B"))
    both = two[0].of(["naive", "aimd"])
    for difference in paired_differences(both, "naive", TESTED):
        ours = one.differences["B", difference.metric]
        assert (ours.mean, ours.p_holm) == (difference.mean, difference.p_holm)
        assert (ours.policy, ours.reference) == ("B", "A")


def test_what_is_missing_is_said(two: list[ScenarioRecords]) -> None:
    short = ScenarioRecords(
        two[0].asked, two[0].scenario, two[0].policies, two[0].episodes[:-3], {}
    )
    results, missing = scenario_results(suite(), [short])
    assert [result.name for result in results] == ["study"]
    assert missing == [f"study: aimd has {N - 3} of {N} seeds.", "reserved: not played."]


def test_scenarios_in_which_all_are_alike_score_nothing() -> None:
    alike = recorded("study", dict.fromkeys(POLICIES, 1.0), 0)
    same = tuple(e.model_copy(update={"return_": 5.0}) for e in alike.episodes)
    results, _ = scenario_results(
        suite(), [ScenarioRecords("study", alike.scenario, alike.policies, same, {})]
    )
    assert results[0].scores == {}
    assert suite_scores(suite(), results) == []
