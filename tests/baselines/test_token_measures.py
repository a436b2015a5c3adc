"""Latencies, energy and cost in an episode's record, against their definitions by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_profile import PROFILE, content

from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.baselines.records import append_record, read_records
from vllm_tenant_tuning.scenario import load_scenario, parse_scenario

POWER = {"idle_w": 100.0, "busy_w": 600.0, "source": "made up"}


def test_an_episode_costs_what_the_gpu_does(tmp_path: Path) -> None:
    scenario = parse_scenario(
        content(profile=PROFILE | {"power": POWER}, gpu_price_per_hour_usd=3.6)
    )
    env = make_env(scenario)
    record, _ = play(env, make_policy("static"), 5)
    inner: Any = env.unwrapped
    outcomes = inner.outcomes()

    price_usd = 3.6 * 60 / 3600
    done = np.isfinite(outcomes.latency_s)
    good = sum(tenant.good for tenant in record.tenants.values())
    assert good > 0
    assert record.usd_per_1000_good == pytest.approx(1000 * price_usd / good)
    # every token is emitted once; what is still in the engine at the end has emitted some too
    assert record.generation_tokens_per_s is not None
    tokens = record.generation_tokens_per_s * 60
    assert 50 * done.sum() <= tokens <= 50 * (done.sum() + (outcomes.outcome == 2).sum())
    assert record.usd_per_million_tokens == pytest.approx(1e6 * price_usd / tokens)
    assert record.energy_j is not None
    assert 100 * 60 < record.energy_j < 600 * 60  # neither idle nor busy all the time
    assert record.preemptions == 0

    first = ~np.isnan(outcomes.first_token_s)
    ttft_s = (outcomes.first_token_s - outcomes.arrival_s)[first]
    assert record.ttft_p99_s == pytest.approx(np.percentile(ttft_s, 99))
    mine = outcomes.tenant[first] == 1
    assert record.tenants["batch"].ttft_p99_s == pytest.approx(np.percentile(ttft_s[mine], 99))
    tpot_s = (outcomes.finished_s - outcomes.first_token_s)[done] / 49
    assert record.tpot_p99_s == pytest.approx(np.percentile(tpot_s, 99))

    append_record(tmp_path / "episodes.jsonl", record)
    assert read_records(tmp_path / "episodes.jsonl") == [record]


def test_an_idle_gpu_draws_its_idle_power() -> None:
    idle = content(profile=PROFILE | {"power": POWER}, gpu_price_per_hour_usd=3.6)
    for tenant in idle["tenants"]:
        tenant["arrivals"] = {"process": "poisson", "rate_per_s": 0.0}
    record, _ = play(make_env(parse_scenario(idle)), make_policy("static"), 0)
    assert record.energy_j == pytest.approx(100 * 60)
    assert record.usd_per_1000_good is None
    assert record.usd_per_million_tokens is None


def test_without_price_tokens_or_power_there_is_no_such_figure() -> None:
    record, _ = play(make_env(parse_scenario(content())), make_policy("static"), 0)
    assert (record.usd_per_1000_good, record.energy_j) == (None, None)
    assert record.ttft_p99_s is not None
    slots = load_scenario("study")
    short = slots.control.model_copy(update={"episode_s": 60.0})
    record, _ = play(
        make_env(slots.model_copy(update={"control": short})), make_policy("static"), 0
    )
    assert (record.ttft_p99_s, record.preemptions, record.usd_per_million_tokens) == (None,) * 3


def test_the_section_survives_yaml_with_power() -> None:
    scenario = parse_scenario(content(profile=PROFILE | {"power": POWER}))
    again = yaml.safe_load(yaml.safe_dump(scenario.model_dump(mode="json")))
    assert parse_scenario(again) == scenario
