"""The frozen description of a task: tenants, workload, engine, control and reward.

A scenario is a YAML file read into pydantic models. Every bound is stated in the model, an
unknown key is refused, and each mistake is reported with its path, the value given and what
is accepted. `load_scenario` takes the name of a packaged scenario or a path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from vllm_tenant_tuning.engine import ContinuousBatchingEngine, Engine, SlotsEngine
from vllm_tenant_tuning.schema import (
    Model,
    NonNegativeSeconds,
    PositiveSeconds,
    Tokens,
    explain_errors,
    packaged_names,
    read_yaml,
)

MAX_TENANTS = 64
MAX_ENGINE_EPISODE_S = 1e6
MAX_ENGINE_WINDOW_INTERVALS = 10_000

RatePerSecond = Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)]
PositiveRatePerSecond = Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Cap = Annotated[int, Field(ge=0, le=4096)]


class ScenarioError(ValueError):
    """A scenario that cannot be used: a missing file, broken YAML or a value out of bounds."""


# --- arrivals -----------------------------------------------------------------------------


class PoissonArrivals(Model):
    """A Poisson process of constant rate."""

    process: Literal["poisson"]
    rate_per_s: RatePerSecond


class GammaArrivals(Model):
    """A renewal process with Gamma inter-arrival times; `cv` is their coefficient of variation.

    `cv` = 1 is Poisson; above 1 arrivals clump, below 1 they are more regular.
    """

    process: Literal["gamma"]
    rate_per_s: PositiveRatePerSecond
    cv: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)]


class PeriodicBurstArrivals(Model):
    """Poisson arrivals at `on_rate_per_s` for `on_s` of every `period_s`, else `off_rate_per_s`.

    A burst starts at `phase_s` and every `period_s` before and after it.
    """

    process: Literal["periodic_bursts"]
    on_rate_per_s: RatePerSecond
    off_rate_per_s: RatePerSecond
    period_s: PositiveSeconds
    on_s: PositiveSeconds
    phase_s: NonNegativeSeconds = 0.0

    @model_validator(mode="after")
    def _on_fits_period(self) -> PeriodicBurstArrivals:
        if self.on_s > self.period_s:
            raise ValueError(f"on_s ({self.on_s}) must be at most period_s ({self.period_s})")
        return self


class RandomBurstArrivals(Model):
    """Poisson arrivals whose rate switches on and off after exponential sojourns.

    The two-state Markov-modulated Poisson process; it starts in its stationary distribution.
    """

    process: Literal["random_bursts"]
    on_rate_per_s: RatePerSecond
    off_rate_per_s: RatePerSecond
    mean_on_s: PositiveSeconds
    mean_off_s: PositiveSeconds


class PiecewiseArrivals(Model):
    """Poisson arrivals with rates constant over consecutive segments, repeated for ever.

    `rates_per_s[i]` holds for `durations_s[i]`: a diurnal day is 24 of them.
    """

    process: Literal["piecewise"]
    rates_per_s: Annotated[tuple[RatePerSecond, ...], Field(min_length=1, max_length=10_000)]
    durations_s: Annotated[tuple[PositiveSeconds, ...], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _same_length(self) -> PiecewiseArrivals:
        if len(self.rates_per_s) != len(self.durations_s):
            raise ValueError(
                f"rates_per_s has {len(self.rates_per_s)} entries and durations_s "
                f"{len(self.durations_s)}; they must have the same number"
            )
        return self


class TraceArrivals(Model):
    """Arrivals replayed from a public trace file.

    The window `[window_start_s, window_start_s + window_s)` of the trace is kept, each request of
    it with probability `sample_fraction`, then time is divided by `speedup`. With `start:
    random` an episode begins at a random point of that window, with `start: first` at its
    beginning; with `loop` the window repeats for ever, without it arrivals stop at its end.
    """

    process: Literal["trace"]
    format: Literal["azure", "burstgpt", "mooncake"]
    file: Annotated[str, Field(min_length=1)]
    window_start_s: NonNegativeSeconds = 0.0
    window_s: PositiveSeconds | None = None
    speedup: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)] = 1.0
    sample_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    start: Literal["first", "random"] = "random"
    loop: bool = True
    malformed: Literal["error", "skip"] = "error"


Arrivals = Annotated[
    PoissonArrivals
    | GammaArrivals
    | PeriodicBurstArrivals
    | RandomBurstArrivals
    | PiecewiseArrivals
    | TraceArrivals,
    Field(discriminator="process"),
]


# --- token lengths and service demand -----------------------------------------------------


class FixedTokens(Model):
    """Every request has the same number of tokens."""

    distribution: Literal["fixed"]
    tokens: Tokens


class LognormalTokens(Model):
    """Lognormal lengths of the given median, rounded and clipped to `[min_tokens, max_tokens]`.

    `sigma` is the standard deviation of the logarithm.
    """

    distribution: Literal["lognormal"]
    median_tokens: Annotated[float, Field(ge=1, le=1e7, allow_inf_nan=False)]
    sigma: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)]
    min_tokens: Tokens = 1
    max_tokens: Tokens = 131_072

    @model_validator(mode="after")
    def _ordered(self) -> LognormalTokens:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})"
            )
        return self


class QuantileTokens(Model):
    """Lengths drawn from an empirical quantile function, linear between its points."""

    distribution: Literal["quantiles"]
    probabilities: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=2, max_length=10_000)
    ]
    tokens: Annotated[
        tuple[Annotated[float, Field(ge=1, le=1e7)], ...], Field(min_length=2, max_length=10_000)
    ]

    @model_validator(mode="after")
    def _quantile_function(self) -> QuantileTokens:
        if len(self.probabilities) != len(self.tokens):
            raise ValueError(
                f"probabilities has {len(self.probabilities)} entries and tokens "
                f"{len(self.tokens)}; they must have the same number"
            )
        if self.probabilities[0] != 0 or self.probabilities[-1] != 1:
            raise ValueError("probabilities must begin at 0 and end at 1")
        if any(b <= a for a, b in zip(self.probabilities, self.probabilities[1:], strict=False)):
            raise ValueError("probabilities must increase strictly")
        if any(b < a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError("tokens must not decrease")
        return self


class TraceTokens(Model):
    """Lengths taken from the tenant's own trace, request by request."""

    distribution: Literal["trace"]


TokenLengths = Annotated[
    FixedTokens | LognormalTokens | QuantileTokens | TraceTokens,
    Field(discriminator="distribution"),
]


class ExponentialService(Model):
    """Service demand Exp(`mean_s`), independent of the tokens: the study's."""

    model: Literal["exponential"]
    mean_s: PositiveSeconds


class FixedService(Model):
    """Every request demands the same service."""

    model: Literal["fixed"]
    service_s: PositiveSeconds


class TokenService(Model):
    """Service demand linear in the tokens.

    `first_token_s + per_prompt_token_s * prompt + per_output_token_s * output`.
    """

    model: Literal["tokens"]
    first_token_s: NonNegativeSeconds
    per_prompt_token_s: NonNegativeSeconds
    per_output_token_s: PositiveSeconds


Service = Annotated[ExponentialService | FixedService | TokenService, Field(discriminator="model")]


# --- tenants ------------------------------------------------------------------------------


class Tenant(Model):
    """One tenant: what it sends, what it was promised and what it weighs.

    `patience_s`: a request that waited longer at the gate is dropped (none: waits for ever).
    `queue_limit`: a request that finds this many waiting is dropped (none: no limit).
    `service`: the demand that the slots fidelity serves; the engine fidelity serves the tokens.
    `slo_latency_p99_s`: the promised 99th percentile of the latency, gate to last token.
    `slo_ttft_p99_s`, `slo_itl_p99_s`: of the time to the first token, from arrival at the gate,
    and of the inter-token latency (engine fidelity). A completed request is good when it meets
    all of them, its mean inter-token latency being held against `slo_itl_p99_s`.
    `priority`: lower goes first under the engine's priority scheduling.
    `slo_weight` and `drop_weight`: what a violation and a drop weigh in the reward.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
    arrivals: Arrivals
    prompt_tokens: TokenLengths
    output_tokens: TokenLengths
    service: Service | None = None
    cap_initial: Cap
    slo_latency_p99_s: PositiveSeconds
    slo_ttft_p99_s: PositiveSeconds | None = None
    slo_itl_p99_s: PositiveSeconds | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    patience_s: NonNegativeSeconds | None = None
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    slo_weight: Weight = 1.0
    drop_weight: Weight = 1.0

    @model_validator(mode="after")
    def _trace_lengths_need_a_trace(self) -> Tenant:
        for field in ("prompt_tokens", "output_tokens"):
            lengths = getattr(self, field)
            if lengths.distribution == "trace" and self.arrivals.process != "trace":
                raise ValueError(
                    f"{field}.distribution 'trace' needs arrivals.process 'trace', "
                    f"got '{self.arrivals.process}'"
                )
        return self


# --- control and reward -------------------------------------------------------------------


class Control(Model):
    """The control loop: its clock, the bounds of the caps and of one change.

    `window_s` is the sliding window of the latency percentiles; `total_cap` bounds the sum of
    the caps (with `total_cap` equal to the engine's `max_num_seqs`, caps are hard reservations).
    """

    control_interval_s: Annotated[float, Field(ge=1e-3, le=1e7, allow_inf_nan=False)] = 3.0
    episode_s: PositiveSeconds = 1800.0
    window_s: PositiveSeconds = 6.0
    cap_min: Cap = 1
    cap_max: Annotated[int, Field(ge=1, le=4096)]
    max_delta: Annotated[int, Field(ge=1, le=1024)] = 1
    total_cap: Annotated[int, Field(ge=1, le=MAX_TENANTS * 4096)] | None = None

    @property
    def n_steps(self) -> int:
        """Control intervals in an episode."""
        return round(self.episode_s / self.control_interval_s)

    @model_validator(mode="after")
    def _consistent(self) -> Control:
        if self.cap_min > self.cap_max:
            raise ValueError(f"cap_min ({self.cap_min}) must be at most cap_max ({self.cap_max})")
        if not _divides(self.control_interval_s, self.episode_s):
            raise ValueError(
                f"episode_s ({self.episode_s}) must be a whole multiple of control_interval_s "
                f"({self.control_interval_s})"
            )
        if self.n_steps > 10_000_000:
            raise ValueError(f"an episode has {self.n_steps} steps; at most 10000000 are accepted")
        return self


class Reward(Model):
    """Weights of the reward's terms (see `vllm_tenant_tuning.reward`).

    `throughput_unit`: what counts as completed work, requests or output tokens.
    `slo_clip`: the largest violation that is punished, as a multiple of the SLO.
    """

    w_throughput: Weight = 1.0
    w_slo: Weight = 0.1
    w_drop: Weight = 1.0
    w_cost: Weight = 0.0
    slo_clip: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    throughput_unit: Literal["requests", "output_tokens"] = "requests"


class Scenario(Model):
    """A task, complete: everything but the seed and the backend.

    Raises:
        pydantic.ValidationError: a value out of bounds, an unknown key, or parts that do not
            fit each other (`load_scenario` turns it into a `ScenarioError` of one message).
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    question: Annotated[str, Field(min_length=1, max_length=200)]
    description: str = ""
    tenants: Annotated[tuple[Tenant, ...], Field(min_length=1, max_length=MAX_TENANTS)]
    engine: Engine
    control: Control
    reward: Reward = Reward()

    @property
    def n_tenants(self) -> int:
        """Number of tenants."""
        return len(self.tenants)

    @property
    def tenant_names(self) -> tuple[str, ...]:
        """Names of the tenants, in order."""
        return tuple(tenant.name for tenant in self.tenants)

    @property
    def caps_initial(self) -> tuple[int, ...]:
        """Caps at the start of an episode, in the order of the tenants."""
        return tuple(tenant.cap_initial for tenant in self.tenants)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that the engine runs at once."""
        if isinstance(self.engine, SlotsEngine):
            return self.engine.max_num_seqs
        return self.engine.scheduler.max_num_seqs

    @property
    def total_cap(self) -> int:
        """Bound on the sum of the caps; without one, what the caps can reach together."""
        if self.control.total_cap is not None:
            return self.control.total_cap
        return self.n_tenants * self.control.cap_max

    def check_caps(self, caps: Sequence[int]) -> None:
        """Refuse caps that are out of bounds.

        Raises:
            ValueError: a wrong number of caps, one outside `[cap_min, cap_max]`, or a sum above
                `total_cap`.
        """
        control = self.control
        if len(caps) != self.n_tenants:
            raise ValueError(
                f"caps: got {len(caps)} of them, expected one for each of {self.n_tenants} tenants"
            )
        for name, cap in zip(self.tenant_names, caps, strict=True):
            if int(cap) != cap or not control.cap_min <= cap <= control.cap_max:
                raise ValueError(
                    f"caps: tenant '{name}' has {cap}; accepted are whole numbers from "
                    f"{control.cap_min} to {control.cap_max}"
                )
        if sum(caps) > self.total_cap:
            raise ValueError(f"caps: their sum is {sum(caps)}, above total_cap {self.total_cap}")

    @model_validator(mode="after")
    def _parts_fit(self) -> Scenario:
        names = self.tenant_names
        if len(set(names)) != len(names):
            raise ValueError(f"tenant names must differ, got {', '.join(names)}")
        if self.n_tenants * self.control.cap_min > self.total_cap:
            raise ValueError(
                f"control.total_cap ({self.total_cap}) cannot hold cap_min "
                f"({self.control.cap_min}) for each of {self.n_tenants} tenants"
            )
        self.check_caps(self.caps_initial)
        if isinstance(self.engine, SlotsEngine):
            self._fits_slots(self.engine)
        else:
            self._fits_engine(self.engine)
        return self

    def _fits_slots(self, engine: SlotsEngine) -> None:
        for field in ("control_interval_s", "window_s"):
            if not _divides(engine.tick_s, getattr(self.control, field)):
                raise ValueError(
                    f"control.{field} ({getattr(self.control, field)}) must be a whole multiple "
                    f"of engine.tick_s ({engine.tick_s})"
                )
        for index, tenant in enumerate(self.tenants):
            if tenant.service is None:
                raise ValueError(
                    f"tenants.{index}.service is missing: the slots fidelity needs a demand"
                )
            for field in ("slo_ttft_p99_s", "slo_itl_p99_s"):
                if getattr(tenant, field) is not None:
                    raise ValueError(
                        f"tenants.{index}.{field}: the slots fidelity has no tokens; it is "
                        "accepted with engine.fidelity 'engine'"
                    )

    def _fits_engine(self, engine: ContinuousBatchingEngine) -> None:
        control = self.control
        if not _divides(control.control_interval_s, control.window_s):
            raise ValueError(
                f"control.window_s ({control.window_s}) must be a whole multiple of "
                f"control.control_interval_s ({control.control_interval_s})"
            )
        if control.episode_s > MAX_ENGINE_EPISODE_S:
            raise ValueError(
                f"control.episode_s ({control.episode_s}): the engine fidelity accepts at most "
                f"{MAX_ENGINE_EPISODE_S:g} (its clock counts picoseconds)"
            )
        if control.window_s > MAX_ENGINE_WINDOW_INTERVALS * control.control_interval_s:
            raise ValueError(
                f"control.window_s ({control.window_s}): the engine fidelity accepts at most "
                f"{MAX_ENGINE_WINDOW_INTERVALS} control intervals (it keeps a histogram of each)"
            )
        max_model_len = engine.scheduler.max_model_len
        block_size = engine.profile.kv_cache.block_size
        for index, tenant in enumerate(self.tenants):
            prompt, output = _fewest(tenant.prompt_tokens), _fewest(tenant.output_tokens)
            if prompt + output > max_model_len:
                raise ValueError(
                    f"tenants.{index}: its shortest request, {prompt} prompt and {output} output "
                    f"tokens, is longer than max_model_len ({max_model_len}): the server would "
                    "refuse all of them"
                )
            if prompt + output - 1 > engine.num_gpu_blocks * block_size:
                raise ValueError(
                    f"tenants.{index}: its shortest request, {prompt} prompt and {output} output "
                    f"tokens, does not fit the KV cache of {engine.num_gpu_blocks} blocks of "
                    f"{block_size} tokens: none could be served"
                )


def _fewest(lengths: TokenLengths) -> int:
    """The fewest tokens that a request can have; 1 where only a trace knows."""
    match lengths:
        case FixedTokens():
            return lengths.tokens
        case LognormalTokens():
            return lengths.min_tokens
        case QuantileTokens():
            return math.floor(lengths.tokens[0])
        case TraceTokens():
            return 1


def _divides(part: float, whole: float) -> bool:
    ratio = whole / part
    return round(ratio) >= 1 and math.isclose(ratio, round(ratio), rel_tol=1e-9)


# --- loading ------------------------------------------------------------------------------


def scenario_names() -> list[str]:
    """Names of the packaged scenarios, sorted."""
    return packaged_names("scenarios")


def family_names() -> list[str]:
    """Names of the packaged families of scenarios (`vllm_tenant_tuning.family`), sorted."""
    return packaged_names("families")


def load_scenario(source: str | Path | Scenario) -> Scenario:
    """Read a scenario.

    Args:
        source: the name of a packaged scenario or family, the path of a YAML file, or a scenario,
            which is returned as it is.

    Raises:
        ScenarioError: no such scenario or file, YAML that cannot be read, or values that are
            not accepted; each is named with its path, the value and what is accepted.
    """
    if isinstance(source, Scenario):
        return source
    if not isinstance(source, str | Path):
        raise ScenarioError(
            f"scenario: got {source!r}; accepted are the name of a packaged scenario, the path of "
            "a YAML file or a Scenario (parse_scenario makes one of a mapping)"
        )
    return parse_scenario(read_scenario(source), str(Path(source)))


def read_scenario(source: str | Path) -> Any:
    """What the file of a scenario or family holds, in plain Python types.

    Raises:
        ScenarioError: no such scenario or file, or YAML that cannot be read.
    """
    packaged = {"scenarios": "a packaged scenario", "families": "a family"}
    return read_yaml("scenario", source, packaged, ScenarioError)


def is_family(content: Any) -> bool:
    """Whether plain data is of a family."""
    return isinstance(content, dict) and ("base" in content or "variation" in content)


def parse_scenario(content: object, label: str = "scenario") -> Scenario:
    """Make a scenario of plain data (what YAML or JSON gives).

    Args:
        content: a mapping with the keys of a scenario, or of a family (`family.parse_family`).
        label: how messages name the source.

    Raises:
        ScenarioError: values that are not accepted.
    """
    if not isinstance(content, dict):
        raise ScenarioError(
            f"scenario {label}: got {type(content).__name__}, expected a mapping of the keys "
            f"{', '.join(Scenario.model_fields)}"
        )
    try:
        if is_family(content):
            from vllm_tenant_tuning.family import parse_family  # it builds on this module

            return parse_family(content, label)
        return Scenario.model_validate(content)
    except ValidationError as error:
        raise ScenarioError(f"scenario {label}: {explain_errors(error)}") from error
