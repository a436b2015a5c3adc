"""The vector environment as Stable-Baselines3 takes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from vllm_tenant_tuning.telemetry import Telemetry
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

SHARED_ATTRIBUTES = ("metadata", "observation_names", "render_mode", "scenario", "spec")
ELEMENT_METHODS = ("action_masks", "outcomes")


class SB3VecEnv(VecEnv):
    """One compiled vector environment behind Stable-Baselines3's interface.

    Gives what SB3's `DummyVecEnv` gives over as many scalar environments, with one difference:
    only the infos of ended episodes are filled (and `reset_infos`), the others are empty.
    An ended episode's info is the scalar environment's last one with

    - `terminal_observation`, (D,) float32, and `TimeLimit.truncated`, True: algorithms bootstrap
      the value of the state that was cut off;
    - `drops`, requests of all tenants in the episode, and `throughput_rps`, completions per
      second.

    Attributes of the environments (`get_attr`) are those of `SHARED_ATTRIBUTES`, methods
    (`env_method`) those of `ELEMENT_METHODS`. Start caps given with `set_options` hold for the
    episodes that follow by themselves too.

    Args:
        env: the vector environment; `autoreset_mode` must be SAME_STEP.

    Raises:
        ValueError: another autoreset mode.
    """

    def __init__(self, env: VLLMTenantTuningVectorEnv) -> None:
        if env.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode: got {env.autoreset_mode.name}; Stable-Baselines3 needs SAME_STEP"
            )
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> np.ndarray:
        """Start episodes in all environments, with the seeds and options set since the last.

        Returns:
            (N, D) float32.
        """
        observations, infos = self.env.reset(seed=self._seeds, options=self._start_options())
        self.reset_infos = [_element_info(infos, i) for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions, (N, n_tenants) integers, for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Run one control interval in every environment.

        Returns:
            Observations (N, D) float32, rewards (N,) float32, dones (N,) bool, and N infos.
        """
        observations, rewards, terminated, truncated, infos = self.env.step(self._actions)
        dones = terminated | truncated
        element_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(dones).tolist():
            info = _element_info(infos["final_info"], i)
            info["truncation_reason"] = infos["final_info"]["truncation_reason"][i]
            info["terminal_observation"] = infos["final_obs"][i]
            info["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            telemetry = info["telemetry"]
            info["drops"] = float(telemetry.tenants["dropped_total"].sum())
            completed = float(telemetry.tenants["completed_total"].sum())
            info["throughput_rps"] = completed / float(telemetry.cluster["time_s"])
            element_infos[i] = info
            self.reset_infos[i] = _element_info(infos, i)
        return observations, rewards.astype(np.float32), dones, element_infos

    def close(self) -> None:
        """Release the backend."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The attribute, or the bound method, of each environment.

        Raises:
            AttributeError: not one of `SHARED_ATTRIBUTES` and `ELEMENT_METHODS`.
        """
        chosen = list(self._get_indices(indices))
        if attr_name in ELEMENT_METHODS:
            return [partial(self._call, attr_name, i) for i in chosen]
        if attr_name in SHARED_ATTRIBUTES:
            return [getattr(self.env, attr_name)] * len(chosen)
        accepted = ", ".join((*SHARED_ATTRIBUTES, *ELEMENT_METHODS))
        raise AttributeError(f"the environments show no '{attr_name}'; accepted are {accepted}")

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Not possible: the environments are one compiled kernel.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"'{attr_name}' cannot be set in a compiled vector environment")

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call one of `ELEMENT_METHODS` on each environment.

        Raises:
            AttributeError: another method.
        """
        if method_name == "action_masks":  # asked for in every step: one call for all
            masks = self.env.action_masks()
            return [masks[i] for i in self._get_indices(indices)]
        methods = self.get_attr(method_name, indices)
        return [method(*method_args, **method_kwargs) for method in methods]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """False for each: there is nothing to wrap."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """None for each: the vector environment does not render."""
        return [None] * self.num_envs

    def _call(self, method_name: str, index: int) -> Any:
        if method_name == "action_masks":
            return self.env.action_masks()[index]
        return getattr(self.env, method_name)(index)

    def _start_options(self) -> dict[str, Any] | None:
        """The options of single environments as those of the vector environment."""
        names = {name for options in self._options for name in options}
        if not names:
            return None
        merged: dict[str, Any] = {
            name: [options.get(name) for options in self._options] for name in names
        }
        if "caps" in merged:
            initial = self.env.scenario.caps_initial
            merged["caps"] = [initial if caps is None else caps for caps in merged["caps"]]
        return merged


def _element_info(infos: dict[str, Any], index: int) -> dict[str, Any]:
    """The info that the scalar environment would have given."""
    seen = infos["telemetry"]
    tenants = seen["tenants"][index]
    return {
        "telemetry": Telemetry(
            tenants.view(np.float64).reshape(len(tenants), -1).copy(),
            seen["cluster"][index : index + 1].view(np.float64).copy(),
        ),
        "caps": infos["caps"][index].copy(),
        "clipped": infos["clipped"][index].copy(),
        "reward_terms": {
            name: float(values[index])
            for name, values in infos["reward_terms"].items()
            if not name.startswith("_")
        },
    }
