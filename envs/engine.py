"""The engine section of a scenario: the study's slots, or vLLM's continuous batching."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from vllm_tenant_tuning.profile import EngineProfile, ProfileError, Scheduler, load_profile
from vllm_tenant_tuning.schema import Model, PositiveSeconds, Tokens

LONGEST_STEP_S: Final = 1000.0
"""Longer steps are a mistake in the profile, and sums of them would leave int64 picoseconds."""


class KneeSegment(Model):
    """For `duration_s` the engine runs up to `knee` sequences at full speed."""

    duration_s: PositiveSeconds
    knee: Annotated[float, Field(gt=0, le=4096)]


class Knee(Model):
    """A capacity knee that moves: beyond it every running sequence slows down.

    With n running the speed is `1 / (1 + slowdown * max(0, n - knee))`; the segments repeat.
    """

    slowdown: Annotated[float, Field(ge=0, le=100)]
    segments: Annotated[tuple[KneeSegment, ...], Field(min_length=1, max_length=10_000)]


class SlotsEngine(Model):
    """The study's queue: `max_num_seqs` slots, one request each, on a clock of `tick_s`.

    `inter_token_latency_s` is the time between two tokens at full speed; telemetry reports it
    stretched by the slowdown beyond the knee.
    """

    fidelity: Literal["slots"]
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)]
    tick_s: Annotated[float, Field(ge=0.001, le=60)] = 0.5
    inter_token_latency_s: PositiveSeconds = 0.025
    knee: Knee | None = None


class ContinuousBatchingEngine(Model):
    """vLLM's continuous batching at token level, on the model and GPU of an engine profile.

    `profile` is a packaged profile's name, a path, or the profile itself; the parsed section
    holds the profile. The other fields go by the names of vLLM's arguments; those that are None
    take the profile's value. `max_num_queued_reqs` bounds the requests that the server holds,
    waiting or running (beyond it: HTTP 503). `gpu_price_per_hour_usd` is an assumption of the
    scenario; with it, evaluations report cost.
    """

    fidelity: Literal["engine"]
    profile: EngineProfile
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_model_len: Tokens | None = None
    num_gpu_blocks_override: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_reserve_full_isl: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max_num_queued_reqs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    gpu_price_per_hour_usd: Annotated[float, Field(gt=0, le=1e4)] | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler's limits: the profile's, with this section's own in their place."""
        own = {name: getattr(self, name) for name in Scheduler.model_fields}
        return Scheduler.model_validate(
            self.profile.scheduler.model_dump()
            | {name: value for name, value in own.items() if value is not None}
        )

    @property
    def num_gpu_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.num_gpu_blocks_override or self.profile.kv_cache.num_gpu_blocks

    @field_validator("profile", mode="before")
    @classmethod
    def _load(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                return load_profile(value)
            except ProfileError as error:
                raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ContinuousBatchingEngine:
        limits, law = self.scheduler, self.profile.step_time
        tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        context = min(
            sequences * limits.max_model_len,
            self.num_gpu_blocks * self.profile.kv_cache.block_size,
        )
        longest_s = 1e-3 * (
            law.base_ms
            + law.weights_ms
            + law.dense_ms_per_token * tokens
            + law.sequence_ms * sequences
            + law.kv_read_ms_per_token * context
            + law.prefill_attention_ms_per_pair * tokens * limits.max_model_len
        )
        if longest_s > LONGEST_STEP_S:
            raise ValueError(
                f"profile.step_time: a step of {tokens} tokens and {sequences} sequences could "
                f"take {longest_s:g} s; accepted are at most {LONGEST_STEP_S:g} s"
            )
        return self


Engine = Annotated[SlotsEngine | ContinuousBatchingEngine, Field(discriminator="fidelity")]
