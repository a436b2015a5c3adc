"""Speed, beside a public reference in the same run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import vllm_tenant_tuning  # noqa: F401  (registers the environment)

REPEATS = 5


def run_bench(scenario: str = "study", num_envs: int = 1024) -> dict[str, Any]:
    """Measure environment steps per second, CartPole-v1 and ours turn by turn.

    Random actions drawn beforehand; resets included. Of `REPEATS` turns the best counts, since
    whatever else the machine does can only slow one down.

    Args:
        scenario: what ours plays.
        num_envs: size of the vector environments.

    Returns:
        `cartpole` and `vllm_tenant_tuning`, each with `scalar_steps_per_s` and
        `vector_steps_per_s`; `scalar_ratio` and `vector_ratio` (ours over CartPole's);
        `cpu_count`, `num_envs` and versions.
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
