"""The vector environment: many clusters, advanced together in compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vllm_tenant_tuning.backends import RequestOutcomes
from vllm_tenant_tuning.control_loop import ControlLoop
from vllm_tenant_tuning.reward import REWARD_TERMS
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

BoolArray = npt.NDArray[np.bool_]


class VLLMTenantTuningVectorEnv(
    gym.vector.VectorEnv[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[Any]]
):
    """`num_envs` copies of `VLLMTenantTuningEnv` over one compiled kernel.

    Element i gives what the scalar environment gives for the same seed, bit for bit, episode
    after episode. `reset(seed=s)` seeds element i with `s + i`.

    Args:
        num_envs: number of environments N.
        scenario: see `VLLMTenantTuningEnv`.
        backend: see `VLLMTenantTuningEnv`.
        trace_dir: see `VLLMTenantTuningEnv`.
        autoreset_mode: when an ended episode starts anew: in the next step (Gymnasium's
            default), in the same one (`info` then has `final_obs` and `final_info`), or never
            (call `reset(options={"reset_mask": mask})`).
        backend_options: keyword arguments of the backend (sim: `n_threads`).

    Infos:
        `caps` and `clipped` (N, n_tenants), `reward_terms` (a dict of (N,) arrays),
        `telemetry` (a dict of the structured arrays `tenants` (N, n_tenants) and `cluster`
        (N,)), and `truncation_reason` ((N,) objects) where episodes end; each with its mask
        `_name`, as in Gymnasium's own vector environments.
    """

    def __init__(
        self,
        num_envs: int = 1,
        scenario: str | Path | Scenario = "study",
        backend: str = "sim",
        trace_dir: str | Path | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        **backend_options: Any,
    ) -> None:
        self.closed = True  # nothing to release yet, should the arguments be refused
        if not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ValueError(
                f"num_envs: got {num_envs!r}; accepted is a whole number of at least 1"
            )
        self.num_envs = num_envs
        self.autoreset_mode = _autoreset_mode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.autoreset_mode}
        self._loop = ControlLoop(scenario, backend, num_envs, trace_dir, backend_options)
        self.scenario = self._loop.scenario
        self.observation_names = self._loop.layout.names
        self.single_observation_space = self._loop.layout.space
        self.single_action_space = self._loop.decoder.space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rngs: list[np.random.Generator | None] = [None] * num_envs
        self._caps_initial = self._loop.caps_of(None)
        self.closed = False
        self._started = False
        self._done = np.zeros(num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Start episodes in all environments, or in those of a mask.

        Args:
            seed: s for the seeds s, s + 1, ..., or one seed (or None) for each environment.
            options: `caps`, one for each tenant or (N, n_tenants) (they hold for autoresets too);
                `reset_mask`, (N,) bool, starts only these.

        Raises:
            ValueError: seeds or options that are refused.
        """
        options = dict(options or {})
        mask = self._mask(options.pop("reset_mask", None))
        if seed is None:
            seeds: Sequence[int | None] = [None] * self.num_envs
        elif isinstance(seed, int | np.integer):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = [None if each is None else int(each) for each in seed]
        if len(seeds) != self.num_envs:
            raise ValueError(
                f"seed: got {len(seeds)} seeds; accepted are None, one whole number, or one for "
                f"each of {self.num_envs} environments"
            )
        self._caps_initial = self._loop.caps_of(options)
        for i in np.flatnonzero(mask).tolist():
            if seeds[i] is not None or self._rngs[i] is None:
                self._rngs[i] = seeding.np_random(seeds[i])[0]
        self._start(mask)
        self._started = True
        return self._loop.observations.copy(), self._infos(mask)

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[
        npt.NDArray[np.float32],
        npt.NDArray[np.float64],
        BoolArray,
        BoolArray,
        dict[str, Any],
    ]:
        """Change the caps, run one control interval and observe, in every environment.

        Args:
            actions: (N, n_tenants) integers, 0 to `2 * max_delta`.

        Raises:
            ActionError: an action out of the action space; nothing has run then.
            ResetNeeded: no episode has begun, or autoreset is disabled and one has ended.
        """
        loop = self._loop
        if not self._started:
            raise ResetNeeded("step() needs running episodes: call reset() first")
        ended = self._done
        if self.autoreset_mode is AutoresetMode.DISABLED and ended.any():
            raise ResetNeeded(
                f"environment {int(np.flatnonzero(ended)[0])} has ended: call "
                "reset(options={'reset_mask': mask})"
            )
        active = ~ended
        loop.step(actions, active)
        faults = loop.backend.faults()
        truncated = active & (loop.time_s > loop.end_s)
        truncated[list(faults)] = True
        rewards = loop.rewards.copy()
        infos: dict[str, Any] = {}
        if ended.any():  # NEXT_STEP: this step is their reset, its reward is none
            rewards[ended] = 0.0
            self._start(ended)
        if truncated.any():
            reasons = np.full(self.num_envs, None, object)
            for i in np.flatnonzero(truncated):
                reasons[i] = faults.get(int(i), "time_limit")
            infos = {"truncation_reason": reasons, "_truncation_reason": truncated.copy()}
        if truncated.any() and self.autoreset_mode is AutoresetMode.SAME_STEP:
            final_obs = np.full(self.num_envs, None, object)
            for i in np.flatnonzero(truncated):
                final_obs[i] = loop.observations[i].copy()
            infos = {
                "final_obs": final_obs,
                "_final_obs": truncated.copy(),
                "final_info": infos | self._infos(truncated),
                "_final_info": truncated.copy(),
            }
            self._start(truncated)
            self._done = np.zeros(self.num_envs, np.bool_)
        else:
            self._done = truncated.copy()
        infos |= self._infos(np.ones(self.num_envs, np.bool_))
        return (
            loop.observations.copy(),
            rewards,
            np.zeros(self.num_envs, np.bool_),
            truncated,
            infos,
        )

    def action_masks(self) -> BoolArray:
        """Which choices no bound would cut, (N, n_tenants * (2 * max_delta + 1)) bool."""
        return self._loop.decoder.mask(self._loop.caps)

    @property
    def drawn(self) -> list[Mapping[str, Mapping[str, float]]]:
        """What a family drew for the episode of each environment (see the scalar one)."""
        return list(self._loop.drawn)

    def outcomes(self, index: int) -> RequestOutcomes:
        """What has become of every request of one environment's episode so far."""
        return self._loop.backend.outcomes(index)

    def close_extras(self, **kwargs: Any) -> None:
        """Release the backend."""
        self._loop.backend.close()

    def _start(self, mask: BoolArray) -> None:
        for i in np.flatnonzero(mask):
            rng = self._rngs[i]
            assert rng is not None
            self._loop.start(int(i), rng, self._caps_initial[i])
        self._loop.observe()
        self._done[mask] = False

    def _infos(self, mask: BoolArray) -> dict[str, Any]:
        loop = self._loop
        terms: dict[str, Any] = {}
        for i, name in enumerate(REWARD_TERMS):
            terms |= {name: loop.reward_terms[:, i].copy(), f"_{name}": mask.copy()}
        seen = Telemetry(loop.telemetry.tenant_values.copy(), loop.telemetry.cluster_values.copy())
        telemetry = {
            "tenants": seen.tenants,
            "_tenants": mask.copy(),
            "cluster": seen.cluster,
            "_cluster": mask.copy(),
        }
        infos: dict[str, Any] = {}
        for name, value in (
            ("caps", loop.caps.copy()),
            ("clipped", loop.clipped.copy()),
            ("reward_terms", terms),
            ("telemetry", telemetry),
        ):
            infos |= {name: value, f"_{name}": mask.copy()}
        return infos

    def _mask(self, mask: Any) -> BoolArray:
        if mask is None:
            return np.ones(self.num_envs, np.bool_)
        if (
            not isinstance(mask, np.ndarray)
            or mask.dtype != np.bool_
            or mask.shape != (self.num_envs,)
            or not mask.any()
        ):
            raise ValueError(
                f"options reset_mask: got {mask!r}; accepted is a bool array of shape "
                f"({self.num_envs},) with at least one True"
            )
        if not self._started and not mask.all():
            raise ValueError("options reset_mask: the first reset must start all environments")
        return mask


def _autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    for accepted in AutoresetMode:
        if mode is accepted or mode in (accepted.value, accepted.name):
            return accepted
    raise ValueError(
        f"autoreset_mode: got {mode!r}; accepted are {', '.join(m.name for m in AutoresetMode)}"
    )
