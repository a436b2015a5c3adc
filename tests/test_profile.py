"""Engine profiles and the engine section: what is read, resolved and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

import vllm_tenant_tuning  # noqa: F401  (registers the environment)
from vllm_tenant_tuning.profile import ProfileError, load_profile, profile_names
from vllm_tenant_tuning.scenario import Scenario, ScenarioError, parse_scenario

PROFILE: dict[str, Any] = {
    "name": "tiny",
    "model": "a model",
    "gpu": "a GPU",
    "source": "made up",
    "step_time": {
        "base_ms": 2.0,
        "weights_ms": 3.0,
        "dense_ms_per_token": 0.02,
        "sequence_ms": 0.01,
        "kv_read_ms_per_token": 3e-5,
        "prefill_attention_ms_per_pair": 1e-6,
    },
    "kv_cache": {"num_gpu_blocks": 1000, "block_size": 16},
    "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 4096},
}


def changed(section: str, **values: float) -> dict[str, Any]:
    """The profile with some values of a section changed."""
    return PROFILE | {section: PROFILE.get(section, {}) | values}


def content(**engine: Any) -> dict[str, Any]:
    tenant = {
        "prompt_tokens": {"distribution": "fixed", "tokens": 300},
        "output_tokens": {"distribution": "fixed", "tokens": 50},
        "cap_initial": 8,
        "slo_latency_p99_s": 5.0,
    }
    arrivals = {"process": "poisson", "rate_per_s": 4.0}
    return {
        "name": "mine",
        "question": "What is asked?",
        "tenants": [
            tenant
            | {"name": "chat", "arrivals": arrivals}
            | {"slo_ttft_p99_s": 0.015, "slo_itl_p99_s": 0.008},
            tenant | {"name": "batch", "arrivals": arrivals},
        ],
        "engine": {"fidelity": "engine", "profile": PROFILE} | engine,
        "control": {"cap_max": 32, "episode_s": 60.0},
        "reward": {"w_slo": 0.5, "slo_clip": 3.0},
    }


@pytest.mark.parametrize("name", profile_names())
def test_a_packaged_profile_survives_yaml(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    assert profile.name == name
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(profile.model_dump(mode="json")), encoding="utf-8")
    assert load_profile(file) == profile


def test_a_scenario_holds_the_profile_and_its_own_limits_go_first(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(PROFILE), encoding="utf-8")
    scenario = parse_scenario(
        content(profile=str(file), max_num_seqs=16, num_gpu_blocks_override=100)
    )
    engine: Any = scenario.engine
    assert engine.profile.model == "a model"
    assert engine.scheduler.max_num_seqs == scenario.max_num_seqs == 16
    assert engine.scheduler.max_num_batched_tokens == 512
    assert engine.num_gpu_blocks == 100
    again = yaml.safe_load(yaml.safe_dump(scenario.model_dump(mode="json")))
    assert parse_scenario(again) == scenario


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"profile": "h300"}, ["profile", "'h300'", "neither"]),
        ({"profile": PROFILE | {"speed": 1}}, [": engine.profile.speed", "unknown key"]),
        ({"max_num_seqs": 1024}, ["max_num_batched_tokens (512)", "max_num_seqs (1024)"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy", "'lifo'", "'priority'"]),
        ({"gpu_price_per_hour_usd": -1}, ["gpu_price_per_hour_usd", "-1"]),
        ({"max_num_queued_reqs": 0}, ["max_num_queued_reqs", "0"]),
        (
            {"profile": changed("step_time", dense_ms_per_token=1e4)},
            ["step_time", "512 tokens", "accepted are at most 1000 s"],
        ),
        ({"profile": changed("step_time", weights_ms=1e6)}, ["accepted are at most 1000 s"]),
        (
            {"profile": changed("step_time", prefill_attention_ms_per_pair=1e5)},
            ["accepted are at most 1000 s"],
        ),
        (
            {"profile": changed("step_time", kv_read_ms_per_token=1e5)},
            ["accepted are at most 1000 s"],
        ),
        *(
            ({"profile": changed("frontend", **{name: 1e7})}, [f"frontend.{name}", "1000"])
            for name in ("request_s", "prompt_token_s", "delay_s")
        ),
        ({"max_model_len": 64}, ["tenants.0", "shortest request", "max_model_len (64)"]),
        ({"num_gpu_blocks_override": 1}, ["tenants.0", "KV cache of 1 blocks"]),
    ],
)
def test_a_wrong_engine_section_is_refused_by_name(
    engine: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(content(**engine))
    for part in expected:
        assert part in str(caught.value)


def test_the_window_is_bounded() -> None:
    wrong = content()
    wrong["control"] |= {"window_s": 3e6}
    with pytest.raises(ScenarioError, match=r"window_s .* at most 10000 control intervals"):
        parse_scenario(wrong)


def test_the_window_is_whole_control_intervals() -> None:
    wrong = content()
    wrong["control"] |= {"window_s": 7.0}
    with pytest.raises(ScenarioError, match=r"window_s \(7.0\).*control_interval_s \(3.0\)"):
        parse_scenario(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not YAML"),
        ("- 1", "expected a mapping"),
        ("name: x", "model: missing"),
        ("name: x\nname: y", "the key 'name' is there twice"),
        ("[" * 5000, "nested too deeply"),
        (
            yaml.safe_dump(
                PROFILE | {"scheduler": PROFILE["scheduler"] | {"max_num_batched_tokens": 1}}
            ),
            r"max_num_batched_tokens \(1\) must be at least",
        ),
        (
            yaml.safe_dump(PROFILE | {"kv_cache": {"num_gpu_blocks": 0}}),
            "kv_cache.num_gpu_blocks: got 0",
        ),
        (
            yaml.safe_dump(PROFILE | {"step_time": dict.fromkeys(PROFILE["step_time"], 0)}),
            "under a microsecond",
        ),
    ],
)
def test_a_file_that_is_no_profile(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=expected):
        load_profile(file)


def test_a_profile_that_is_not_there() -> None:
    with pytest.raises(ProfileError, match=r"'none' is neither .*h200-qwen3-8b.*\) nor a file$"):
        load_profile("none")


@pytest.fixture
def played() -> tuple[Scenario, Any, list[Any]]:
    scenario = parse_scenario(content())
    env = gym.make("VLLMTenantTuning-v0", scenario=scenario)
    env.reset(seed=3)
    return scenario, env.unwrapped, [env.step(np.array([1, 1])) for _ in range(20)]


def test_time_to_first_token_is_observed_against_its_slo(
    played: tuple[Scenario, Any, list[Any]],
) -> None:
    _, env, steps = played
    assert env.observation_space.shape == (15 * 2 + 5,)
    for observation, _, _, _, info in steps:
        entry = dict(zip(env.observation_names, observation.tolist(), strict=True))
        tenants = info["telemetry"].tenants
        alone_s = (2.0 + (3.0**4 + 0.02**4) ** 0.25 + 0.01) / 1000
        for i, (ttft_s, itl_s) in enumerate([(0.015, 0.008), (5.0, alone_s)]):
            for q in ("p50", "p95", "p99"):
                for feature, reference in (("ttft", ttft_s), ("itl", itl_s)):
                    wanted = np.clip(tenants[f"{feature}_{q}_s"][i] / reference, 0, 10)
                    seen = entry[f"{scenario_tenant(i)}.{feature}_{q}"]
                    # the dense term's exponent is the step-time law's own affair
                    assert seen == pytest.approx(wanted, rel=1e-2)
        assert entry["cluster.gpu_memory_utilization"] == pytest.approx(0.92)


def scenario_tenant(i: int) -> str:
    return ("chat", "batch")[i]


def test_the_worst_violated_slo_counts(played: tuple[Scenario, Any, list[Any]]) -> None:
    _, _, steps = played
    seen = set()
    for _, _, _, _, info in steps:
        tenants = info["telemetry"].tenants
        ratios = np.array(
            [
                [tenants["latency_p99_s"][0] / 5.0, tenants["latency_p99_s"][1] / 5.0],
                [tenants["ttft_p99_s"][0] / 0.015, 0],
                [tenants["itl_p99_s"][0] / 0.008, 0],
            ]
        )
        worst = np.nan_to_num(ratios).max(axis=0)
        seen.add(int(np.nan_to_num(ratios)[:, 0].argmax()))
        expected = -0.5 * np.clip(worst - 1, 0, 3.0).sum()
        assert info["reward_terms"]["slo"] == pytest.approx(expected, rel=1e-12)
    assert len(seen) > 1  # not always the same SLO


def test_good_requests_meet_every_slo(played: tuple[Scenario, Any, list[Any]]) -> None:
    _, env, steps = played
    outcomes = env.outcomes()
    ttft_s = outcomes.first_token_s - outcomes.arrival_s
    itl_s = (outcomes.finished_s - outcomes.first_token_s) / 49
    good = outcomes.latency_s <= 5.0
    good &= (outcomes.tenant == 1) | ((ttft_s <= 0.015) & (itl_s <= 0.008))
    counted = np.sum([info["telemetry"].tenants["good"] for *_, info in steps], axis=0)
    assert counted.tolist() == [good[outcomes.tenant == t].sum() for t in range(2)]
    completed = np.isfinite(outcomes.latency_s)
    assert 0 < good[outcomes.tenant == 0].sum() < completed[outcomes.tenant == 0].sum()
