"""What a model's most probable actions return, over many episodes at once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from vllm_tenant_tuning.agents.rl import MODEL_FILE, NORMALIZATION_FILE, algorithm_class
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv


class ModelReturns:
    """Plays one episode of each seed, all side by side; uses no random numbers of PyTorch.

    Args:
        scenario: the task.
        seeds: of the episodes.
        trace_dir: the folder of the trace files.
    """

    def __init__(
        self, scenario: Scenario, seeds: Sequence[int], trace_dir: str | Path | None = None
    ) -> None:
        self._seeds = list(seeds)
        self._n_steps = scenario.control.n_steps
        self._env = VLLMTenantTuningVectorEnv(
            len(self._seeds), scenario, trace_dir=trace_dir, n_threads=1
        )

    def mean(self, model: OnPolicyAlgorithm, normalization: VecNormalize, n_stack: int) -> float:
        """Mean return of the episodes.

        Args:
            model: chooses the actions.
            normalization: of its observations; left as it is.
            n_stack: observations that it sees at once.
        """
        observations, _ = self._env.reset(seed=self._seeds)
        n, n_observed = observations.shape
        stack = np.zeros((n, n_stack * n_observed), np.float32)
        state: Any = None
        starts = np.ones(n, np.bool_)
        total = np.zeros(n)
        for _ in range(self._n_steps):
            stack[:, :-n_observed] = stack[:, n_observed:]
            stack[:, -n_observed:] = normalization.normalize_obs(observations)
            masks: dict[str, Any] = {}
            if isinstance(model, MaskablePPO):
                masks = {"action_masks": self._env.action_masks()}
            actions, state = model.predict(
                stack, state=state, episode_start=starts, deterministic=True, **masks
            )
            starts = np.zeros(n, np.bool_)
            observations, rewards, _, _, _ = self._env.step(actions)
            total += rewards
        return float(total.mean())

    def close(self) -> None:
        """Release the environments."""
        self._env.close()


def load_model(run_dir: Path, algorithm: str) -> tuple[OnPolicyAlgorithm, VecNormalize]:
    """The newest model of a run and its normalisation. Reading it can run code it holds.

    Args:
        run_dir: the run's folder.
        algorithm: the run's.
    """
    model = algorithm_class(algorithm).load(run_dir / MODEL_FILE, device="cpu")
    normalization: VecNormalize = pickle.loads((run_dir / NORMALIZATION_FILE).read_bytes())
    return model, normalization
