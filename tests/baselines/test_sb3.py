"""The Stable-Baselines3 adapter against SB3's own vector of scalar environments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")

from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from test_env import short, traces_of

from vllm_tenant_tuning import VLLMTenantTuningEnv, VLLMTenantTuningVectorEnv, scenario_names
from vllm_tenant_tuning.backends import Outcome
from vllm_tenant_tuning.baselines.sb3 import SB3VecEnv
from vllm_tenant_tuning.scenario import Scenario

N = 3
STEPS_PER_EPISODE = 20


def adapter(scenario: Scenario, num_envs: int = N) -> SB3VecEnv:
    env = VLLMTenantTuningVectorEnv(num_envs, scenario, autoreset_mode="SAME_STEP")
    return SB3VecEnv(env)


def reference(scenario: Scenario, num_envs: int = N) -> DummyVecEnv:
    def make() -> Any:
        return gym.make("VLLMTenantTuning-v0", scenario=scenario, disable_env_checker=True)

    return DummyVecEnv([make] * num_envs)


def same_info(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["telemetry"] == theirs["telemetry"]
    assert ours["reward_terms"] == theirs["reward_terms"]
    for name in ("caps", "clipped"):
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("name", ["study", "reserved", "premium_burst", "moving_knee"])
def test_it_gives_what_dummy_vec_env_gives(name: str) -> None:
    scenario = short(name)
    ours, theirs = adapter(scenario), reference(scenario)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.seed(10_000) == theirs.seed(10_000)
    np.testing.assert_array_equal(ours.reset(), theirs.reset())
    rng = np.random.default_rng(5)
    n_ended = 0
    for step in range(3 * STEPS_PER_EPISODE + 7):
        for mine, his in zip(ours.reset_infos, theirs.reset_infos, strict=True):
            same_info(mine, his)
        actions = rng.integers(0, 3, (N, 2))
        observations, rewards, dones, infos = ours.step(actions)
        expected = theirs.step(actions)
        for mine, his in zip((observations, rewards, dones), expected[:3], strict=True):
            assert mine.dtype == np.asarray(his).dtype
            np.testing.assert_array_equal(mine, his)
        assert dones.tolist() == [step % STEPS_PER_EPISODE == STEPS_PER_EPISODE - 1] * N
        assert len(infos) == N
        for info, expected_info, done in zip(infos, expected[3], dones, strict=True):
            assert bool(info) == done
            assert info.get("TimeLimit.truncated", False) == expected_info["TimeLimit.truncated"]
            if done:
                n_ended += 1
                np.testing.assert_array_equal(
                    info["terminal_observation"], expected_info["terminal_observation"]
                )
                assert info["truncation_reason"] == expected_info["truncation_reason"]
                same_info(info, expected_info)
    assert n_ended == 3 * N


def test_what_it_returned_does_not_change_later() -> None:
    env = adapter(short())
    kept = [env.reset()]
    copies = [kept[0].copy()]
    for _ in range(STEPS_PER_EPISODE):
        observations, rewards, dones, infos = env.step(np.ones((N, 2), np.int64))
        kept += [observations, rewards, dones]
        copies += [observations.copy(), rewards.copy(), dones.copy()]
    kept.append(infos[0]["terminal_observation"])
    copies.append(infos[0]["terminal_observation"].copy())
    infos[0]["mine"] = 1
    _, _, _, infos = env.step(np.ones((N, 2), np.int64))
    assert infos == [{}] * N
    infos[0]["mine"] = 1
    assert infos[1] == {}
    assert env.step(np.ones((N, 2), np.int64))[3] == [{}] * N
    for array, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_episode_sums_are_those_of_single_requests() -> None:
    scenario = short("reserved", 60.0)
    env = VecMonitor(adapter(scenario), info_keywords=("drops", "throughput_rps"))
    env.seed(10_000)
    env.reset()
    actions = np.random.default_rng(0).integers(0, 3, (STEPS_PER_EPISODE, N, 2))
    returned = np.zeros(N)
    for action in actions:
        _, rewards, _, infos = env.step(action)
        returned += rewards
    dropped = 0.0
    for i in range(N):
        scalar = VLLMTenantTuningEnv(scenario)
        scalar.reset(seed=10_000 + i)
        for action in actions:
            scalar.step(action[i])
        outcome = scalar.outcomes().outcome
        episode = infos[i]["episode"]
        assert episode["drops"] == (outcome == Outcome.DROPPED).sum()
        assert episode["throughput_rps"] == (outcome == Outcome.COMPLETED).sum() / 60.0
        dropped += episode["drops"]
        assert episode["l"] == STEPS_PER_EPISODE
        assert episode["r"] == pytest.approx(returned[i], rel=1e-5)
    assert dropped > 0


def test_seeds_hold_for_one_reset_and_unseeded_episodes_differ() -> None:
    env = adapter(short())
    env.seed(10_000)
    first = rollout(env)
    second = rollout(env)
    env.seed(10_000)
    np.testing.assert_array_equal(rollout(env), first)
    np.testing.assert_array_equal(rollout(env), second)
    assert not np.array_equal(first, second)


def rollout(env: Any) -> np.ndarray:
    env.reset()
    return np.array([env.step(np.full((N, 2), 2))[0] for _ in range(5)])


def test_start_caps_can_be_set_for_one_or_all() -> None:
    ours, theirs = adapter(short("study")), reference(short("study"))
    for options in ({"caps": [2, 6]}, [{}, {"caps": [1, 8]}, {}]):
        for env in (ours, theirs):
            env.seed(10_000)
            env.set_options(options)  # type: ignore[arg-type]
        np.testing.assert_array_equal(ours.reset(), theirs.reset())
    assert [info["caps"].tolist() for info in ours.reset_infos] == [[4, 4], [1, 8], [4, 4]]
    ours.set_options({"cap": [1, 1]})
    with pytest.raises(ValueError, match="unknown key 'cap'"):
        ours.reset()


def test_masks_are_those_of_the_scalar_environments() -> None:
    scenario = short("reserved")
    ours, theirs = adapter(scenario), reference(scenario)
    wrapped = VecNormalize(VecMonitor(ours))
    assert is_masking_supported(wrapped)
    for env in (ours, theirs):
        env.seed(10_000)
        env.reset()
    rng = np.random.default_rng(1)
    different = False
    for _ in range(2 * STEPS_PER_EPISODE):
        masks = get_action_masks(wrapped)
        assert masks.shape == (N, 6)
        np.testing.assert_array_equal(masks, get_action_masks(theirs))
        np.testing.assert_array_equal(masks[1], ours.get_attr("action_masks", [1])[0]())
        np.testing.assert_array_equal(
            masks[[2, 0]], ours.env_method("action_masks", indices=[2, 0])
        )
        different |= bool((masks != masks[0]).any())
        actions = rng.integers(0, 3, (N, 2))
        ours.step(actions)
        theirs.step(actions)
    assert different


def test_attributes_are_those_of_the_environments() -> None:
    env = adapter(short())
    assert env.get_attr("scenario", [0, 2]) == [short(), short()]
    assert env.get_attr("render_mode", 1) == [None]
    assert env.env_is_wrapped(Monitor) == [False] * N
    assert not env.has_attr("reset")
    with pytest.raises(AttributeError, match="'reset'; accepted are"):
        env.env_method("reset")
    with pytest.raises(AttributeError, match="'scenario' cannot be set"):
        env.set_attr("scenario", None)


def test_a_cut_off_episode_is_bootstrapped() -> None:
    """The last reward that PPO learns from holds gamma times the value of what was cut off."""
    env = adapter(short())
    settings: dict[str, Any] = {"n_steps": STEPS_PER_EPISODE, "batch_size": N * STEPS_PER_EPISODE}
    model = PPO("MlpPolicy", env, gamma=0.9, seed=0, device="cpu", **settings)
    seen: list[Any] = []

    def remember(local: dict[str, Any], _: dict[str, Any]) -> bool:
        seen.append((local["rewards"].copy(), local["infos"]))
        return True

    model.learn(STEPS_PER_EPISODE * N, callback=remember)
    as_it_was = PPO("MlpPolicy", env, seed=0, device="cpu", **settings)
    rewards, infos = seen[-1]
    for i in range(N):
        observation = as_it_was.policy.obs_to_tensor(infos[i]["terminal_observation"])[0]
        value = as_it_was.policy.predict_values(observation).item()
        assert abs(value) > 1e-3
        learned = model.rollout_buffer.rewards[-1, i]
        assert learned == pytest.approx(rewards[i] + 0.9 * value, rel=1e-5)


def test_maskable_ppo_chooses_only_what_the_masks_allow() -> None:
    env = adapter(short("study", cap_max=5), 8)
    model = MaskablePPO(
        "MlpPolicy", env, n_steps=STEPS_PER_EPISODE, batch_size=160, seed=0, device="cpu"
    )
    forbidden = []

    def remember(local: dict[str, Any], _: dict[str, Any]) -> bool:
        masks = local["action_masks"].reshape(8, 2, 3)
        chosen = np.take_along_axis(masks, local["actions"][:, :, None].astype(int), axis=2)
        assert chosen.all()
        forbidden.append((~masks).sum())
        return True

    model.learn(8 * STEPS_PER_EPISODE, callback=remember)
    assert len(forbidden) == STEPS_PER_EPISODE
    assert sum(forbidden) > 0


def test_other_autoreset_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="got NEXT_STEP; Stable-Baselines3 needs SAME_STEP"):
        SB3VecEnv(VLLMTenantTuningVectorEnv(2, short()))


@pytest.mark.parametrize("name", scenario_names())
def test_sb3_checker_finds_nothing(name: str, shared: Callable[[str], Path]) -> None:
    traces = traces_of(name)
    trace_dir = shared(f"traces/{traces[0]}").parent if traces else None
    env = VLLMTenantTuningEnv(name, trace_dir=trace_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)
