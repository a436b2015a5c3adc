"""The scalar environment: Gymnasium's contract, the MDP's promises, refusals by name."""

from __future__ import annotations

import copy
import hashlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from other_process import printed_elsewhere

import vllm_tenant_tuning
from vllm_tenant_tuning import load_scenario, scenario_names
from vllm_tenant_tuning.backends import Outcome
from vllm_tenant_tuning.scenario import Scenario, ScenarioError
from vllm_tenant_tuning.spaces import ActionError
from vllm_tenant_tuning.telemetry import conservation_error
from vllm_tenant_tuning.workload import TraceError

HOLD = np.array([1, 1])


def short(name: str = "study", episode_s: float = 60.0, **changes: Any) -> Scenario:
    """A packaged scenario with a short episode."""
    scenario = load_scenario(name)
    control = scenario.control.model_copy(update={"episode_s": episode_s, **changes})
    return scenario.model_copy(update={"control": control})


def traces_of(name: str) -> list[str]:
    """The trace files that a scenario replays."""
    arrivals = [tenant.arrivals for tenant in load_scenario(name).tenants]
    return [replayed.file for replayed in arrivals if replayed.process == "trace"]


@pytest.mark.parametrize("name", [name for name in scenario_names() if not traces_of(name)])
def test_gymnasium_checker_finds_nothing(name: str) -> None:
    env = gym.make("VLLMTenantTuning-v0", scenario=name).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


@pytest.mark.shared
@pytest.mark.parametrize("name", [name for name in scenario_names() if traces_of(name)])
def test_gymnasium_checker_finds_nothing_in_a_replay(
    shared: Callable[[str], Path], name: str
) -> None:
    folder = shared(f"traces/{traces_of(name)[0]}").parent
    env = gym.make("VLLMTenantTuning-v0", scenario=name, trace_dir=folder).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


def test_defaults_are_the_study_in_simulation() -> None:
    env = gym.make("vllm_tenant_tuning:VLLMTenantTuning-v0")
    inner: Any = env.unwrapped
    assert inner.scenario == load_scenario("study")
    assert env.spec is not None
    assert env.action_space == gym.spaces.MultiDiscrete([3, 3])
    assert env.observation_space.shape == (12 * 2 + 5,)
    assert len(inner.observation_names) == 29
    assert inner.observation_names[0] == "a.queued"
    assert inner.observation_names[-1] == "cluster.preemptions"


def test_an_episode_is_truncated_at_its_end_and_not_before() -> None:
    env = gym.make("VLLMTenantTuning-v0", scenario=short())
    env.reset(seed=0)
    for step in range(1, 21):
        _, _, terminated, truncated, info = env.step(HOLD)
        assert not terminated
        assert truncated == (step == 20)
        assert ("truncation_reason" in info) == (step == 20)
    assert info["truncation_reason"] == "time_limit"
    assert info["telemetry"].cluster["time_s"] == 60.0
    with pytest.raises(ResetNeeded, match="reset"):
        env.unwrapped.step(HOLD)
    env.reset()
    env.step(HOLD)


def test_telemetry_agrees_with_the_outcomes_of_single_requests() -> None:
    env = gym.make("VLLMTenantTuning-v0", scenario=short("reserved", 120.0))
    inner: Any = env.unwrapped
    env.reset(seed=3)
    rng = np.random.default_rng(0)
    sums = np.zeros((4, 2))
    truncated = False
    while not truncated:
        _, _, _, truncated, info = env.step(rng.integers(0, 3, 2))
        tenants = info["telemetry"].tenants
        assert not conservation_error(tenants).any()
        sums += [tenants[name] for name in ("arrived", "completed", "dropped", "good")]
    outcomes = inner.outcomes()
    slo_s = np.array([tenant.slo_latency_p99_s for tenant in inner.scenario.tenants])
    for i in range(2):
        mine = outcomes.tenant == i
        kinds = outcomes.outcome[mine]
        latency_s = outcomes.latency_s[mine]
        assert sums[0, i] == (kinds != Outcome.PENDING).sum() == tenants["arrived_total"][i]
        assert sums[1, i] == (kinds == Outcome.COMPLETED).sum() == tenants["completed_total"][i]
        assert sums[2, i] == (kinds == Outcome.DROPPED).sum() == tenants["dropped_total"][i]
        assert sums[3, i] == (latency_s <= slo_s[i]).sum()
        assert (kinds == Outcome.QUEUED).sum() == tenants["queued"][i]
        assert (kinds == Outcome.IN_FLIGHT).sum() == tenants["in_flight"][i]
    window = outcomes.finished_s > 120.0 - inner.scenario.control.window_s
    done = np.sort(outcomes.latency_s[window & (outcomes.outcome == Outcome.COMPLETED)])
    cluster = info["telemetry"].cluster
    assert cluster["window_completions"] == done.size > 0
    assert cluster["latency_p50_s"] == done[int(0.50 * done.size)]
    assert cluster["latency_p99_s"] == done[min(int(0.99 * done.size), done.size - 1)]


def test_the_reward_is_the_formula() -> None:
    scenario = short("premium_burst", 600.0)
    reward = scenario.reward.model_copy(update={"w_slo": 0.7, "w_cost": 0.3, "slo_clip": 0.5})
    scenario = scenario.model_copy(update={"reward": reward})
    env = gym.make("VLLMTenantTuning-v0", scenario=scenario)
    env.reset(seed=1)
    interval_s = scenario.control.control_interval_s
    offered = np.array([0.9, 2.0]) * interval_s  # means of 0.2/1.6 in halves, and of 2.0
    seen_violation = False
    for _ in range(200):
        _, total, _, _, info = env.step(HOLD)
        tenants = info["telemetry"].tenants
        p99_s = np.nan_to_num(tenants["latency_p99_s"])
        violation = np.clip(p99_s / 12.0 - 1, 0, 0.5)
        seen_violation |= bool(violation.any())
        expected = {
            "throughput": tenants["completed"].sum() / offered.sum(),
            "slo": -0.7 * (np.array([5, 1]) * violation).sum(),
            "drop": -0.5 * (np.array([5, 1]) * tenants["dropped"] / offered).sum(),
            "cost": -0.3 * tenants["mean_in_flight"].sum() / 8,
        }
        assert info["reward_terms"] == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert total == pytest.approx(sum(expected.values()), rel=1e-12, abs=1e-12)
    assert seen_violation


def test_throughput_counts_output_tokens_where_the_scenario_says_so() -> None:
    scenario = short("study", 600.0)
    reward = scenario.reward.model_copy(update={"throughput_unit": "output_tokens"})
    in_tokens = gym.make(
        "VLLMTenantTuning-v0", scenario=scenario.model_copy(update={"reward": reward})
    )
    in_requests = gym.make("VLLMTenantTuning-v0", scenario=scenario)
    for env in (in_tokens, in_requests):
        env.reset(seed=0)
    for _ in range(200):  # every request has 100 tokens: the share of the offer is the same
        a = in_tokens.step(HOLD)[4]["reward_terms"]
        b = in_requests.step(HOLD)[4]["reward_terms"]
        assert a == pytest.approx(b, rel=1e-12)


def test_an_observation_entry_is_reading_over_reference_clipped() -> None:
    scenario = short("moving_knee", 300.0)
    env = gym.make("VLLMTenantTuning-v0", scenario=scenario)
    inner: Any = env.unwrapped
    env.reset(seed=0)
    for step in range(100):
        observation, _, _, _, info = env.step(np.array([2, 2]) if step < 20 else HOLD)
        entry = dict(zip(inner.observation_names, observation.tolist(), strict=True))
        tenants, cluster = info["telemetry"].tenants, info["telemetry"].cluster
        for i, name in enumerate(scenario.tenant_names):
            expected = {
                "queued": tenants["queued"][i] / 12,
                "in_flight": tenants["in_flight"][i] / 12,
                "cap": info["caps"][i] / 12,
                "arrival_rate": tenants["arrived"][i] / (0.85 * 3),
                "drop_rate": tenants["dropped"][i] / (0.85 * 3),
                "latency_p50": tenants["latency_p50_s"][i] / 15,
                "latency_p95": tenants["latency_p95_s"][i] / 15,
                "latency_p99": tenants["latency_p99_s"][i] / 15,
                "window_completions": tenants["window_completions"][i] / (0.85 * 6),
                "itl_p50": tenants["itl_p50_s"][i] / 0.025,
                "itl_p95": tenants["itl_p95_s"][i] / 0.025,
                "itl_p99": tenants["itl_p99_s"][i] / 0.025,
            }
            for feature, value in expected.items():
                high = 1 if feature == "cap" else 10
                wanted = min(float(np.nan_to_num(value)), high)
                assert entry[f"{name}.{feature}"] == pytest.approx(wanted, rel=1e-6), feature
        assert entry["cluster.kv_cache_usage"] == pytest.approx(
            cluster["num_requests_running"] / 32, rel=1e-6
        )
        assert entry["cluster.num_requests_running"] == entry["cluster.kv_cache_usage"]
        assert entry["cluster.gpu_memory_utilization"] == 0.0  # not available in simulation


@pytest.mark.parametrize("name", ["study", "premium_burst", "moving_knee"])
def test_observations_stay_in_their_space_under_random_actions(name: str) -> None:
    env = gym.make("VLLMTenantTuning-v0", scenario=name)
    env.action_space.seed(0)
    observation, _ = env.reset(seed=5)
    truncated = False
    while not truncated:
        assert env.observation_space.contains(observation)
        observation, reward, _, truncated, _ = env.step(env.action_space.sample())
        assert np.isfinite(reward)


def _trajectory(seed: int) -> bytes:
    env = gym.make("VLLMTenantTuning-v0", scenario="premium_burst")
    rng = np.random.default_rng(9)
    observation, _ = env.reset(seed=seed)
    parts = [observation.tobytes()]
    for _ in range(2):
        truncated = False
        while not truncated:
            observation, reward, _, truncated, info = env.step(rng.integers(0, 3, 2))
            parts += [observation.tobytes(), np.float64(reward).tobytes()]
            parts.append(info["telemetry"].tenant_values.tobytes())
        observation, _ = env.reset()
        parts.append(observation.tobytes())
    return b"".join(parts)


def test_the_same_seed_gives_the_same_trajectory_in_another_process() -> None:
    printed = printed_elsewhere(
        "import hashlib;"
        "from test_env import _trajectory;"
        "print(hashlib.sha256(_trajectory(4)).hexdigest())"
    )
    assert printed == hashlib.sha256(_trajectory(4)).hexdigest()
    assert _trajectory(4) != _trajectory(5)


def test_the_requests_of_an_episode_do_not_depend_on_the_policy() -> None:
    arrivals = []
    for action in (np.array([0, 0]), np.array([2, 2])):
        env = gym.make("VLLMTenantTuning-v0")
        inner: Any = env.unwrapped
        env.reset(seed=11)
        for _ in range(600):
            env.step(action)
        outcomes = inner.outcomes()
        arrivals.append((outcomes.arrival_s, outcomes.tenant))
    np.testing.assert_array_equal(arrivals[0][0], arrivals[1][0])
    np.testing.assert_array_equal(arrivals[0][1], arrivals[1][1])


def test_a_new_episode_has_new_requests() -> None:
    env = gym.make("VLLMTenantTuning-v0")
    inner: Any = env.unwrapped
    env.reset(seed=11)
    first = inner.outcomes().arrival_s
    env.reset()
    assert not np.array_equal(first, inner.outcomes().arrival_s)
    env.reset(seed=11)
    np.testing.assert_array_equal(first, inner.outcomes().arrival_s)


def test_reset_takes_caps() -> None:
    env = gym.make("VLLMTenantTuning-v0")
    _, info = env.reset(seed=0, options={"caps": [8, 1]})
    assert info["caps"].tolist() == [8, 1]
    assert info["telemetry"].tenants["cap"].tolist() == [8, 1]
    _, info = env.reset()
    assert info["caps"].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"caps": [9, 1]}, "tenant 'a' has 9; accepted are whole numbers from 1 to 8"),
        ({"caps": [4]}, r"options caps: got \[4\]"),
        ({"caps": [1.5, 2]}, r"options caps: got \[1.5, 2\]"),
        ({"caps": "44"}, "options caps: got '44'"),
        ({"cap": [4, 4]}, "unknown key 'cap'; accepted is 'caps'"),
    ],
)
def test_reset_options_are_checked(options: dict[str, Any], message: str) -> None:
    env = gym.make("VLLMTenantTuning-v0")
    with pytest.raises(ValueError, match=message):
        env.reset(seed=0, options=options)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.array([1, 3]), "tenant 'b': got 3; accepted are whole numbers from 0 to 2"),
        (np.array([-1, 1]), "tenant 'a': got -1"),
        (np.array([1]), r"got shape \(1,\); accepted are integers of shape \(2,\)"),
        (np.array([1, 1, 1]), r"got shape \(3,\)"),
        (np.array([[1, 1]]), r"got shape \(1, 2\)"),
        (np.array(1), r"got shape \(\)"),
        (1, r"got shape \(\)"),
        (np.array([1.0, 1.0]), "got dtype float64"),
        (np.array([np.nan, 1.0]), "got NaN"),
        (np.array([True, False]), "got dtype bool"),
        (["up", "down"], "got dtype <U4"),
        (None, "got dtype object"),
        ([[1], [1, 2]], "not an array"),
        (np.array([2**40, 1]), f"got {2**40}"),
    ],
)
def test_a_wrong_action_is_refused_by_name_and_nothing_runs(action: Any, message: str) -> None:
    env = gym.make("VLLMTenantTuning-v0", disable_env_checker=True)
    env.reset(seed=0)
    env.step(HOLD)
    inner: Any = env.unwrapped
    with pytest.raises(ActionError, match=f"^action.*{message}"):
        env.step(action)
    assert inner.outcomes().admitted_s[~np.isnan(inner.outcomes().admitted_s)].max(initial=0) <= 3
    reference = gym.make("VLLMTenantTuning-v0")
    reference.reset(seed=0)
    reference.step(HOLD)
    np.testing.assert_array_equal(env.step(HOLD)[0], reference.step(HOLD)[0])


def test_lists_and_small_integers_are_actions_too() -> None:
    env = gym.make("VLLMTenantTuning-v0", disable_env_checker=True)
    env.reset(seed=0)
    for action in ([2, 0], (2, 0), np.array([2, 0], np.int32), np.array([2, 0], np.uint8)):
        info = env.step(action)[4]  # type: ignore[arg-type]
    assert info["caps"].tolist() == [8, 1]
    assert info["clipped"].tolist() == [0, -1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "gpu"}, ValueError, "backend: got 'gpu'; accepted are sim"),
        ({"render_mode": "ascii"}, ValueError, "render_mode: got 'ascii'"),
        ({"n_threads": 0}, ValueError, "n_threads: got 0"),
        ({"threads": 1}, ValueError, "threads: the sim backend has no such option"),
        ({"scenario": 3}, ScenarioError, "scenario: got 3; accepted are the name"),
        ({"scenario": None}, ScenarioError, "scenario: got None"),
        ({"scenario": "azure", "trace_dir": "/nonexistent"}, TraceError, "AzureLLMInference"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        vllm_tenant_tuning.VLLMTenantTuningEnv(**arguments)


COPIES = [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))]


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["study", "moving_knee", "h200_chat_batch"])
def test_a_copy_goes_on_like_the_original(name: str, duplicate: Callable[[Any], Any]) -> None:
    def play(env: Any, steps: int) -> list[Any]:
        rng = np.random.default_rng(7)
        return [env.step(rng.integers(0, 3, 2)) for _ in range(steps)]

    def as_bytes(steps: list[Any]) -> list[Any]:
        return [
            (observation.tobytes(), reward, info["telemetry"].tenant_values.tobytes())
            for observation, reward, _, _, info in steps
        ]

    original = vllm_tenant_tuning.VLLMTenantTuningEnv(short(name))
    original.reset(seed=3)
    play(original, 4)
    copied = duplicate(original)
    seen = as_bytes(play(copied, 10))
    assert len(set(seen)) == 10  # its telemetry moves
    assert as_bytes(play(original, 10)) == seen  # and not the original's
    np.testing.assert_array_equal(copied.reset(seed=5)[0], original.reset(seed=5)[0])
    assert as_bytes(play(copied, 5)) == as_bytes(play(original, 5))


def test_step_before_reset_is_refused() -> None:
    with pytest.raises(ResetNeeded):
        vllm_tenant_tuning.VLLMTenantTuningEnv().step(HOLD)
