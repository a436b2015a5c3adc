"""The study's published figures and its independent reproduction come out of the simulator."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import vllm_tenant_tuning  # noqa: F401
from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.study import PUBLISHED, run_study

Shared = Callable[[str], Path]


@pytest.fixture(scope="module")
def table(shared: Shared) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(shared("study/table.json").read_text())
    return content


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_study(20)


def test_the_published_figures_in_the_code_are_the_table(table: dict[str, Any]) -> None:
    assert table["published"] == PUBLISHED


@pytest.mark.parametrize("policy", list(PUBLISHED))
def test_the_nine_figures(result: dict[str, Any], policy: str) -> None:
    ours, published = result[policy], PUBLISHED[policy]
    assert ours["throughput"] == pytest.approx(published["throughput"], rel=0.03)
    assert ours["p99_latency"] == pytest.approx(published["p99_latency"], rel=0.03)
    drops = {"abs": 1.5} if policy == "static" else {"rel": 0.10}
    assert ours["drops"] == pytest.approx(published["drops"], **drops)


def test_the_ablation_is_within_two_standard_errors_of_the_reproduction(
    result: dict[str, Any], table: dict[str, Any]
) -> None:
    for cell, drops in table["ablation_drops_20_seeds"].items():
        ours = result["ablation"][cell]
        # both are means of 20 seeds, of about the same spread
        error = math.sqrt(2) * ours["standard_error"]
        assert abs(ours["drops"] - drops) < 2 * error, (cell, ours, drops)


def test_static_caps_drop_what_the_reproduction_drops(table: dict[str, Any]) -> None:
    env = gym.make("VLLMTenantTuning-v0")
    inner: Any = env.unwrapped
    for cap, expected in table["static_k_k_drops"].items():
        drops = []
        for seed in range(20):
            env.reset(seed=seed, options={"caps": [int(cap)] * 2})
            for _ in range(600):
                env.step(np.array([1, 1]))
            drops.append((inner.outcomes().outcome == 4).sum())
        error = math.sqrt(2) * np.std(drops, ddof=1) / math.sqrt(20)
        assert abs(np.mean(drops) - expected) < 3 * error + 0.5, cap


def test_the_naive_rule_is_triggered_without_cause_as_often_as_the_tail_says() -> None:
    """Under 4/4 nearly nothing waits, and still the 6 s threshold is exceeded.

    A window of 6 s holds a Poisson number of completions of mean 0.688 * 6 = 4.13, each above
    6 s with probability exp(-6 / 2.5): at least one is with 1 - exp(-4.13 exp(-2.4)) = 31.3 %.
    """
    expected = 1 - math.exp(-4.13 * math.exp(-6 / 2.5))
    env = gym.make("VLLMTenantTuning-v0")
    policy = make_policy("naive")
    rates = []
    for seed in range(40):
        policy.reset(env.unwrapped.scenario, seed)  # type: ignore[attr-defined]
        _, info = env.reset(seed=seed)
        triggers = 0
        for _ in range(600):
            info = env.step(np.array([1, 1]))[4]
            cluster = info["telemetry"].cluster
            on_latency = cluster["window_completions"] > 0 and cluster["latency_p99_s"] > 6
            triggers += bool(on_latency)
            if on_latency:
                assert policy.act(np.zeros(29, np.float32), info).tolist() == [0, 0]
        rates.append(triggers / 600)
    error = np.std(rates, ddof=1) / math.sqrt(len(rates))
    assert abs(np.mean(rates) - expected) < 3 * error
    assert error < 0.01


def test_the_command_prints_and_writes_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "study.json"
    assert main(["study", "--seeds", "3", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    printed = capsys.readouterr().out
    for policy, published in PUBLISHED.items():
        assert set(written[policy]) == set(published)
        assert policy in printed
        assert f"{written[policy]['drops']:.1f}" in printed
        assert f"{published['drops']:.1f}" in printed
    assert set(written["ablation"]) == {
        "coupled_window_p99",
        "coupled_backlog",
        "per_tenant_window_p99",
        "per_tenant_backlog",
    }
    assert written["tests"]

    assert main(["study", "--seeds", "1"]) == 2
    assert "seeds: got 1; accepted are 2 to 1000" in capsys.readouterr().err
