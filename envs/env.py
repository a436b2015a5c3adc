"""The environment: one cluster under one controller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ResetNeeded

from vllm_tenant_tuning.backends import RequestOutcomes
from vllm_tenant_tuning.control_loop import ControlLoop
from vllm_tenant_tuning.rendering import HUMAN_FRAMES_PER_S, RENDER_MODES, EpisodeView
from vllm_tenant_tuning.reward import REWARD_TERMS
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

_ACTIVE = np.ones(1, np.bool_)


class VLLMTenantTuningEnv(gym.Env[npt.NDArray[np.float32], npt.NDArray[np.int64]]):
    """Several tenants share one vLLM server; the agent re-tunes how many requests each may have.

    ## Description

    Every tenant sends requests to a gate in front of the server. The gate holds a FIFO queue for
    each tenant and sends a request when the tenant has fewer than its cap in flight and the
    engine accepts it. A request is dropped when it has waited longer than the tenant's patience,
    or when a bounded queue is full. The caps (client-side admission concurrency) are the lever,
    because vLLM cannot change `max_num_seqs` without a restart. Once in every control interval
    the agent changes each cap by a bounded step; lowering a cap cancels nothing, the tenant
    drains down.

    ## Action Space

    `MultiDiscrete([2 * max_delta + 1] * n_tenants)`: entry i moves tenant i's cap by
    `entry - max_delta`; with the default `max_delta` of 1, 0 lowers by one, 1 holds, 2 raises by
    one. Caps stay in `[cap_min, cap_max]` and their sum within `total_cap`, where the scenario
    has one; what a bound cuts off is `info["clipped"]`, and `action_masks()` tells beforehand.

    ## Observation Space

    `Box` of shape (12 * n_tenants + 5,), or (15 * n_tenants + 5,) where the engine has tokens
    (fidelity "engine"), float32. Each entry is `clip(reading / reference, 0, high)`, without a
    unit and from 0 to High; a reading that is not available is 0. The unit in the tables is that
    of reading and reference. `env.unwrapped.observation_names` names the entries.
    For each tenant, in order:

    | Feature            | Reading                                             | Unit     | Reference                            | High |
    |--------------------|-----------------------------------------------------|----------|--------------------------------------|------|
    | queued             | waiting at the gate                                 | requests | cap_max                              | 10   |
    | in_flight          | sent and not finished                               | requests | cap_max                              | 10   |
    | cap                | the cap                                             | requests | cap_max                              | 1    |
    | arrival_rate       | arrivals in the interval                            | requests | offered in an interval               | 10   |
    | drop_rate          | drops in the interval                               | requests | offered in an interval               | 10   |
    | latency_p50        | gate to last token, median of the sliding window    | s        | slo_latency_p99_s                    | 10   |
    | latency_p95        | the same, 95th percentile                           | s        | slo_latency_p99_s                    | 10   |
    | latency_p99        | the same, 99th percentile                           | s        | slo_latency_p99_s                    | 10   |
    | window_completions | completions in the sliding window                   | requests | offered in a window                  | 10   |
    | itl_p50            | inter-token latency, median of the sliding window   | s        | slo_itl_p99_s, or one alone          | 10   |
    | itl_p95            | the same, 95th percentile                           | s        | the same                             | 10   |
    | itl_p99            | the same, 99th percentile                           | s        | the same                             | 10   |
    | ttft_p50 (tokens)  | gate to first token, median of the sliding window   | s        | slo_ttft_p99_s, or slo_latency_p99_s | 10   |
    | ttft_p95 (tokens)  | the same, 95th percentile                           | s        | the same                             | 10   |
    | ttft_p99 (tokens)  | the same, 99th percentile                           | s        | the same                             | 10   |

    Then, for the cluster:

    | Feature                | Reading                                 | Unit     | Reference    | High |
    |------------------------|-----------------------------------------|----------|--------------|------|
    | gpu_memory_utilization | share of the GPU's memory in use        | 1        | 1            | 1    |
    | kv_cache_usage         | share of the KV cache (or slots) in use | 1        | 1            | 1    |
    | num_requests_running   | sequences in the running batch          | requests | max_num_seqs | 1    |
    | num_requests_waiting   | waiting inside the engine               | requests | max_num_seqs | 10   |
    | preemptions            | in the interval                         | requests | max_num_seqs | 10   |

    A window without completions keeps the last percentiles; `window_completions` says how much
    to trust them. "Offered" is the mean over the whole episode; "one alone" the inter-token
    latency of a sequence that has the engine for itself.

    ## Rewards

        w_throughput * completed / offered
        - w_slo  * sum_i slo_weight_i * clip(max(p99_i / slo_i) - 1, 0, slo_clip)
        - w_drop * sum_i drop_weight_i * (dropped_i + failed_i) / offered_i
        - w_cost * mean_running / max_num_seqs

    for the interval, with the scenario's weights; the largest ratio counts of latency and, where
    the tenant has SLOs on them, of TTFT and inter-token latency. Each term, signed, is in
    `info["reward_terms"]`.

    ## Starting State

    An empty cluster and the scenario's initial caps (`reset(options={"caps": [...]})` for
    others). The seed draws all requests of the episode: their arrival times, tokens and service
    demands are the same for every policy and backend.

    ## Episode End

    Truncated after `episode_s` (`info["truncation_reason"]` is "time_limit") or when the backend
    fails (then it names the fault). Never terminated.

    ## Arguments

    * `scenario`: the name of a packaged scenario ("study" by default) or family, the path of a
      YAML file, or a `Scenario`. A family's loads are drawn for each episode by its seed
      (`env.unwrapped.drawn`); spaces and references are those of its base.
    * `backend`: "sim", where the scenario's engine section chooses the fidelity, the study's slots
      or vLLM's continuous batching at token level; or "live", a real vLLM server: steps take the
      wall clock's time, `info["live"]` tells how the load was delivered, and docs/live.md the rest.
    * `render_mode`: None, "ansi" (text), "rgb_array" (frames of 640 x 960 pixels; needs matplotlib)
      or "human" (a live view in the terminal or a window; needs rich or matplotlib).
    * `trace_dir`: the folder of the trace files, for scenarios that replay traces (else the
      environment variable `VLLM_TENANT_TRACE_DIR`).
    * further keyword arguments go to the backend (live: `url`, or `serve` and `model`, `out_dir`
      and the others of `LiveOptions`).

    ```python
    import gymnasium as gym
    import vllm_tenant_tuning

    env = gym.make("VLLMTenantTuning-v0", scenario="moving_knee")
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    ```

    ## Version History

    * v0: the first version.
    """

    metadata = {  # noqa: RUF012  (Gymnasium declares it an instance variable)
        "render_modes": list(RENDER_MODES),
        "render_fps": HUMAN_FRAMES_PER_S,
    }

    def __init__(
        self,
        scenario: str | Path | Scenario = "study",
        backend: str = "sim",
        render_mode: str | None = None,
        trace_dir: str | Path | None = None,
        **backend_options: Any,
    ) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(
                f"render_mode: got {render_mode!r}; accepted are None, {', '.join(RENDER_MODES)}"
            )
        self._loop = ControlLoop(scenario, backend, 1, trace_dir, backend_options)
        self.scenario = self._loop.scenario
        self.observation_space = self._loop.layout.space
        self.action_space = self._loop.decoder.space
        self.observation_names = self._loop.layout.names
        self.render_mode = render_mode
        self._view = EpisodeView(self.scenario, render_mode) if render_mode else None
        self._running = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: the seed of its requests; None goes on with the generator at hand.
            options: `{"caps": [...]}` starts with other caps than the scenario's, one whole
                number per tenant.

        Returns:
            The observation at time 0, and `info` (see `step`, without a reward).

        Raises:
            ValueError: options that are refused.
        """
        super().reset(seed=seed)
        loop = self._loop
        loop.start(0, self.np_random, loop.caps_of(options)[0])
        loop.observe()
        self._running = True
        info = self._info()
        if self._view is not None:
            self._view.start(info["telemetry"])
            self._render_human()
        return loop.observations[0].copy(), info

    def step(
        self, action: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Change the caps, run one control interval, observe.

        Args:
            action: (n_tenants,) integers, 0 to `2 * max_delta`.

        Returns:
            observation, reward, terminated (never), truncated, and `info` with `telemetry`
            (`Telemetry`), `caps` and `clipped` ((n_tenants,) int64), `reward_terms` (a dict),
            and at the end `truncation_reason` ("time_limit", or the backend's fault).

        Raises:
            ActionError: an action out of the action space; nothing has run then.
            ResetNeeded: the episode has ended or not begun.
        """
        loop = self._loop
        if not self._running:
            raise ResetNeeded("step() needs a running episode: call reset() first")
        loop.step(action[None] if type(action) is np.ndarray else [action], _ACTIVE)
        info = self._info()
        faults = loop.backend.faults()
        truncated = bool(faults) or bool(loop.time_s[0] > loop.end_s)
        if truncated:
            self._running = False
            info["truncation_reason"] = faults.get(0, "time_limit")
        if self._view is not None:
            self._view.add(info["telemetry"])
            self._render_human()
        return loop.observations[0].copy(), float(loop.rewards[0]), False, truncated, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Which choices no bound would cut, (n_tenants * (2 * max_delta + 1),) bool.

        The convention of sb3-contrib's MaskablePPO.
        """
        mask: npt.NDArray[np.bool_] = self._loop.decoder.mask(self._loop.caps)[0]
        return mask

    @property
    def drawn(self) -> Mapping[str, Mapping[str, float]]:
        """What a family drew for the episode: values by tenant and parameter, else empty."""
        return self._loop.drawn[0]

    def outcomes(self) -> RequestOutcomes:
        """What has become of every request of the episode so far."""
        return self._loop.backend.outcomes(0)

    def render(self) -> Any:
        """The episode so far: text for `ansi`, (height, width, 3) uint8 for `rgb_array`."""
        if self._view is None:
            gym.logger.warn("render() needs a render_mode: gym.make(..., render_mode='ansi')")
            return None
        return self._view.render()

    def close(self) -> None:
        """Release the backend and the window, if there is one."""
        self._running = False
        self._loop.backend.close()
        if self._view is not None:
            self._view.close()

    def _render_human(self) -> None:
        if self.render_mode == "human":
            self.render()

    def _info(self) -> dict[str, Any]:
        loop = self._loop
        return {
            "telemetry": Telemetry(
                loop.telemetry.tenant_values[0].copy(), loop.telemetry.cluster_values[0].copy()
            ),
            "caps": loop.caps[0].copy(),
            "clipped": loop.clipped[0].copy(),
            "reward_terms": dict(zip(REWARD_TERMS, loop.reward_terms[0].tolist())),  # noqa: B905,
            **loop.backend.extra_info(0),
        }
