"""The vector environment equals the scalar one, in every autoreset mode."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from test_env import short

from vllm_tenant_tuning.backends.sim.clusters import MIN_CLUSTERS_PER_THREAD
from vllm_tenant_tuning.spaces import ActionError
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

N = 5
MODES = list(AutoresetMode)


def scalar_envs(scenario: Any, n: int = N) -> list[Any]:
    return [gym.make("VLLMTenantTuning-v0", scenario=scenario) for _ in range(n)]


def assert_info_equal(infos: dict[str, Any], i: int, info: dict[str, Any]) -> None:
    for name in ("caps", "clipped"):
        assert infos[f"_{name}"][i]
        np.testing.assert_array_equal(infos[name][i], info[name])
    for name, value in info["reward_terms"].items():
        assert infos["reward_terms"][name][i] == value
    telemetry = infos["telemetry"]
    assert telemetry["tenants"][i].tobytes() == info["telemetry"].tenants.tobytes()
    assert telemetry["cluster"][i].tobytes() == info["telemetry"].cluster.tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["study", "reserved", "moving_knee", "azure_like"])
def test_element_i_equals_the_scalar_environment_across_resets(
    name: str, mode: AutoresetMode
) -> None:
    scenario = short(name, 60.0)
    vector = gym.make_vec(
        "VLLMTenantTuning-v0",
        num_envs=N,
        vectorization_mode="vector_entry_point",
        scenario=scenario,
        autoreset_mode=mode,
    )
    assert vector.metadata["autoreset_mode"] is mode
    scalars = scalar_envs(scenario)
    rng = np.random.default_rng(1)
    observations, infos = vector.reset(seed=40)
    for i, env in enumerate(scalars):
        observation, info = env.reset(seed=40 + i)
        assert observations[i].tobytes() == observation.tobytes()
        assert_info_equal(infos, i, info)
    ended = [False] * N
    n_ends = 0
    for _ in range(70):  # three episodes of twenty steps, and more
        actions = rng.integers(0, 3, (N, 2))
        if mode is AutoresetMode.DISABLED and any(ended):
            observations, infos = vector.reset(options={"reset_mask": np.array(ended)})
            for i, env in enumerate(scalars):
                observation, info = env.reset()
                assert observations[i].tobytes() == observation.tobytes()
                assert_info_equal(infos, i, info)
            ended = [False] * N
        observations, rewards, terminated, truncated, infos = vector.step(actions)
        assert not terminated.any()
        for i, env in enumerate(scalars):
            if mode is AutoresetMode.NEXT_STEP and ended[i]:
                observation, info = env.reset()
                assert observations[i].tobytes() == observation.tobytes()
                assert rewards[i] == 0.0
                assert not truncated[i]
                ended[i] = False
                continue
            observation, reward, _, ended[i], info = env.step(actions[i])
            assert rewards[i] == reward
            assert truncated[i] == ended[i]
            n_ends += ended[i]
            if ended[i] and mode is AutoresetMode.SAME_STEP:
                assert infos["_final_obs"][i]
                assert infos["_final_info"][i]
                assert infos["final_obs"][i].tobytes() == observation.tobytes()
                final = infos["final_info"]
                assert_info_equal(final, i, info)
                assert final["truncation_reason"][i] == info["truncation_reason"]
                observation, info = env.reset()
                ended[i] = False
            elif ended[i]:
                assert infos["truncation_reason"][i] == info["truncation_reason"]
            assert observations[i].tobytes() == observation.tobytes()
            assert_info_equal(infos, i, info)
    assert n_ends == 3 * N


def test_environments_reset_one_by_one_run_out_of_step() -> None:
    scenario = short("study", 30.0)
    vector = VLLMTenantTuningVectorEnv(2, scenario, autoreset_mode="DISABLED")
    first, second = scalar_envs(scenario, 2)
    vector.reset(seed=[7, 8])
    first.reset(seed=7)
    second.reset(seed=8)
    hold = np.ones((2, 2), np.int64)
    for _ in range(4):
        vector.step(hold)
        first.step(hold[0])
        second.step(hold[1])
    vector.reset(seed=[9, None], options={"reset_mask": np.array([True, False])})
    first.reset(seed=9)
    for step in range(6):
        observations, _, _, truncated, _ = vector.step(hold)
        assert observations[0].tobytes() == first.step(hold[0])[0].tobytes()
        assert observations[1].tobytes() == second.step(hold[1])[0].tobytes()
        assert truncated.tolist() == [False, step == 5]
    with pytest.raises(ResetNeeded, match="environment 1 has ended"):
        vector.step(hold)


def test_thread_count_does_not_matter() -> None:
    results = []
    for n_threads in (1, 3):
        env = VLLMTenantTuningVectorEnv(130, short("moving_knee", 60.0), n_threads=n_threads)
        env.action_space.seed(0)
        env.reset(seed=0)
        parts = [env.step(env.action_space.sample())[0].tobytes() for _ in range(30)]
        results.append(b"".join(parts))
        env.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_copy_goes_on_like_the_original(n_threads: int) -> None:
    n = 2 * MIN_CLUSTERS_PER_THREAD
    original = VLLMTenantTuningVectorEnv(n, short("reserved"), n_threads=n_threads)
    original.reset(seed=[np.int64(i) for i in range(n)])
    up = np.full((n, 2), 2)
    original.step(up)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(original)))
    for _ in range(25):  # across an autoreset
        seen, reward, _, _, infos = copied.step(up)
        expected, expected_reward, _, _, expected_infos = original.step(up)
        np.testing.assert_array_equal(seen, expected)
        np.testing.assert_array_equal(reward, expected_reward)
        for i in range(n):
            telemetry = expected_infos["telemetry"]["tenants"][i]
            assert infos["telemetry"]["tenants"][i].tobytes() == telemetry.tobytes()
    assert infos["telemetry"]["tenants"]["completed_total"].any()
    copied.close()
    original.close()


def test_gymnasium_wrappers_work() -> None:
    scenario = short("study", 30.0)
    env = RecordEpisodeStatistics(VLLMTenantTuningVectorEnv(3, scenario))
    env.reset(seed=0)
    total = np.zeros(3)
    for _ in range(10):
        _, rewards, _, truncated, infos = env.step(np.ones((3, 2), np.int64))
        total += rewards
    assert truncated.all()
    np.testing.assert_allclose(infos["episode"]["r"], total)
    np.testing.assert_array_equal(infos["episode"]["l"], 10)


def test_caps_can_differ_between_environments_and_hold_for_autoresets() -> None:
    env = VLLMTenantTuningVectorEnv(2, short("study", 30.0))
    caps = np.array([[1, 2], [8, 3]])
    _, infos = env.reset(seed=0, options={"caps": caps})
    np.testing.assert_array_equal(infos["caps"], caps)
    for _ in range(11):
        infos = env.step(np.full((2, 2), 2))[4]
    np.testing.assert_array_equal(infos["caps"], caps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "num_envs: got 0"),
        ({"num_envs": 1.5}, "num_envs: got 1.5; accepted is a whole number"),
        ({"num_envs": "3"}, "num_envs: got '3'"),
        ({"autoreset_mode": "never"}, "autoreset_mode: got 'never'; accepted are NEXT_STEP"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMTenantTuningVectorEnv(**arguments)


def test_wrong_calls_are_refused() -> None:
    env = VLLMTenantTuningVectorEnv(3)
    with pytest.raises(ResetNeeded):
        env.step(np.ones((3, 2), np.int64))
    with pytest.raises(ValueError, match="got 2 seeds"):
        env.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="the first reset must start all"):
        env.reset(options={"reset_mask": np.array([True, False, False])})
    env.reset(seed=0)
    for mask in (np.zeros(3, np.bool_), np.ones(2, np.bool_), [True, True, True]):
        with pytest.raises(ValueError, match="reset_mask: got"):
            env.reset(options={"reset_mask": mask})
    with pytest.raises(ActionError, match="tenant 'b' of environment 1: got 7"):
        env.step(np.array([[1, 1], [1, 7], [1, 1]]))
    with pytest.raises(ActionError, match=r"got shape \(2,\); accepted are .* \(3, 2\)"):
        env.step(np.array([1, 1]))
