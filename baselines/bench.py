"""Speed, beside a public reference in the same run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from vllm_tenant_tuning.baselines.bench_engine import run_engine_bench
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

REPEATS = 5


PPO_ENVS = 64
PPO_TIMESTEPS = 200_000


def run_bench(scenario: str = "study", num_envs: int = 1024) -> dict[str, Any]:
    """Measure environment steps per second, CartPole-v1 and ours turn by turn, and PPO's share.

    Random actions drawn beforehand; resets included. Of `REPEATS` turns the best counts, since
    whatever else the machine does can only slow one down.

    Args:
        scenario: what ours plays.
        num_envs: size of the vector environments.

    Returns:
        `cartpole` and `vllm_tenant_tuning`, each with `scalar_steps_per_s` and
        `vector_steps_per_s`; `scalar_ratio` and `vector_ratio` (ours over CartPole's);
        `ppo` with `timesteps_per_s` and `environment_share`, the share of training time that
        the environment takes (None without the extra `train`); `engine`, see
        `run_engine_bench`; `cpu_count`, `num_envs` and versions.
    """
    scalar: dict[str, Callable[[], float]] = {
        "cartpole": _scalar("CartPole-v1"),
        "vllm_tenant_tuning": _scalar("VLLMTenantTuning-v0", scenario=scenario),
    }
    vector: dict[str, Callable[[], float]] = {
        "cartpole": _vector("CartPole-v1", num_envs),
        "vllm_tenant_tuning": _vector("VLLMTenantTuning-v0", num_envs, scenario=scenario),
    }
    result: dict[str, Any] = {name: {} for name in scalar}
    for kind, measures in (("scalar", scalar), ("vector", vector)):
        best = dict.fromkeys(measures, 0.0)
        for _ in range(REPEATS):
            for name, measure in measures.items():
                best[name] = max(best[name], measure())
        for name, rate in best.items():
            result[name][f"{kind}_steps_per_s"] = rate
        result[f"{kind}_ratio"] = best["vllm_tenant_tuning"] / best["cartpole"]
    return result | {
        "ppo": _ppo(scenario),
        "engine": run_engine_bench(),
        "scenario": scenario,
        "num_envs": num_envs,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }


def _scalar(name: str, n_steps: int = 20_000, **arguments: Any) -> Callable[[], float]:
    env = gym.make(name, **arguments)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(1000)]

    def measure() -> float:
        env.reset(seed=0)
        began = time.perf_counter()
        for i in range(n_steps):
            _, _, terminated, truncated, _ = env.step(actions[i % 1000])
            if terminated or truncated:
                env.reset()
        return n_steps / (time.perf_counter() - began)

    return measure


def _vector(name: str, num_envs: int, n_steps: int = 1200, **arguments: Any) -> Callable[[], float]:
    env = gym.make_vec(
        name, num_envs=num_envs, vectorization_mode="vector_entry_point", **arguments
    )
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(100)]

    def measure() -> float:
        env.reset(seed=0)
        began = time.perf_counter()
        for i in range(n_steps):
            env.step(actions[i % 100])
        return num_envs * n_steps / (time.perf_counter() - began)

    return measure


def _ppo(scenario: str) -> dict[str, float] | None:
    try:
        import torch
        from stable_baselines3 import PPO
        from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

        from vllm_tenant_tuning.baselines.sb3 import SB3VecEnv
    except ModuleNotFoundError:
        return None
    from vllm_tenant_tuning.baselines.training_config import load_training_config

    torch.set_num_threads(1)  # as training does: the networks are too small to share
    spent_s = 0.0

    class Timed(SB3VecEnv):
        def step_wait(self) -> Any:
            nonlocal spent_s
            began = time.perf_counter()
            result = super().step_wait()
            spent_s += time.perf_counter() - began
            return result

    training = load_training_config("ppo", scenario, n_envs=PPO_ENVS)
    env = Timed(
        VLLMTenantTuningVectorEnv(PPO_ENVS, scenario, autoreset_mode="SAME_STEP", n_threads=1)
    )
    model = PPO(
        "MlpPolicy",
        VecNormalize(VecMonitor(env)),
        n_steps=training.n_steps,
        batch_size=training.batch_size,
        n_epochs=training.n_epochs,
        policy_kwargs={"net_arch": list(training.net_arch)},
        seed=0,
        device="cpu",
    )
    model.learn(PPO_ENVS * training.n_steps)  # compiles and warms up
    spent_s = 0.0
    began = time.perf_counter()
    model.learn(PPO_TIMESTEPS)
    total_s = time.perf_counter() - began
    env.close()
    return {
        "timesteps_per_s": model.num_timesteps / total_s,
        "environment_share": spent_s / total_s,
    }
