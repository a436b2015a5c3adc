"""Engine profiles: what a model on a GPU costs in time and memory under vLLM.

A profile is a YAML file, written by `vllm-tenant-tuning calibrate` or by hand; the packaged
ones are in `configs/engines`. Scenarios of the engine fidelity name one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, model_validator

from vllm_tenant_tuning.schema import Model, Tokens, explain_errors, packaged_names, read_yaml

Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Watts = Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)]
FrontendSeconds = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class ProfileError(ValueError):
    """An engine profile that cannot be used: a missing file, broken YAML, a wrong value."""


class StepTimeCoefficients(Model):
    """Coefficients of the time of one engine step (the law is in `backends.sim.step_time`).

    `base_ms` (c0) is what every step costs, `weights_ms` (w) reading the weights once,
    `dense_ms_per_token` (g) the matrix products of a token, `sequence_ms` (c1) the host's work
    for a decoding sequence, `kv_read_ms_per_token` (c2) reading a token of context,
    `prefill_attention_ms_per_pair` (c3) the attention of a prompt token to a token before it.
    """

    base_ms: Milliseconds
    weights_ms: Milliseconds
    dense_ms_per_token: Milliseconds
    sequence_ms: Milliseconds
    kv_read_ms_per_token: Milliseconds
    prefill_attention_ms_per_pair: Milliseconds

    def prompt_ms(self, prompt_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What a whole prompt adds to the steps that compute it: its products and attention.

        Args:
            prompt_tokens: any shape, from 0 on.

        Returns:
            Milliseconds, of the same shape.
        """
        products_ms = self.dense_ms_per_token * prompt_tokens
        return products_ms + self.prefill_attention_ms_per_pair * prompt_tokens**2 / 2

    @model_validator(mode="after")
    def _takes_time(self) -> StepTimeCoefficients:
        if self.base_ms + self.weights_ms + self.dense_ms_per_token < 1e-3:
            raise ValueError(
                "base_ms, weights_ms and dense_ms_per_token give a step of under a microsecond"
            )
        return self


class KVCache(Model):
    """The KV cache: `num_gpu_blocks` blocks of `block_size` tokens (vLLM's own terms)."""

    num_gpu_blocks: Annotated[int, Field(ge=1, le=100_000_000)]
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16


class Scheduler(Model):
    """Limits of vLLM's scheduler, under its argument names."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)]
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_000_000)]
    max_model_len: Tokens

    @model_validator(mode="after")
    def _consistent(self) -> Scheduler:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), as vLLM demands"
            )
        return self


class Frontend(Model):
    """What the API server adds before the scheduler sees a request.

    One request after another takes `request_s` of it and `prompt_token_s` for each token of its
    prompt; then `delay_s` passes.
    """

    request_s: FrontendSeconds = 0.0
    prompt_token_s: FrontendSeconds = 0.0
    delay_s: FrontendSeconds = 0.0


class RegionFit(Model):
    """How well the step times of some points are met: absolute relative errors."""

    points: Annotated[int, Field(ge=1)]
    mean_relative_error: Annotated[float, Field(ge=0)]
    p95_relative_error: Annotated[float, Field(ge=0)]


class Fit(RegionFit):
    """The errors over all fitted points, and over each region of them where that is kept."""

    regions: dict[str, RegionFit] | None = None


class Power(Model):
    """The GPU's draw while no step runs and while one does, and where the figures come from."""

    idle_w: Watts
    busy_w: Watts
    source: str


class EngineProfile(Model):
    """One model on one GPU under vLLM, complete.

    Raises:
        pydantic.ValidationError: a value out of bounds or an unknown key (`load_profile` turns
            it into a `ProfileError` of one message).
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]
    description: str = ""
    model: str
    gpu: str
    source: str
    step_time: StepTimeCoefficients
    kv_cache: KVCache
    scheduler: Scheduler
    frontend: Frontend = Frontend()
    fit: Fit | None = None
    power: Power | None = None
    gpu_memory_utilization: Share = 0.92


def profile_names() -> list[str]:
    """Names of the packaged engine profiles, sorted."""
    return packaged_names("engines")


def load_profile(source: str | Path) -> EngineProfile:
    """Read an engine profile.

    Args:
        source: the name of a packaged profile, or the path of a YAML file.

    Raises:
        ProfileError: no such profile or file, YAML that cannot be read, or values that are not
            accepted; each is named with its path, the value and what is accepted.
    """
    content = read_yaml("engine profile", source, {"engines": "a packaged one"}, ProfileError)
    if not isinstance(content, dict):
        raise ProfileError(
            f"engine profile {source}: got {type(content).__name__}, expected a mapping of the "
            f"keys {', '.join(EngineProfile.model_fields)}"
        )
    try:
        return EngineProfile.model_validate(content)
    except ValidationError as error:
        raise ProfileError(f"engine profile {source}: {explain_errors(error)}") from error
