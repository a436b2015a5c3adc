"""The workload of a scenario: what its tenants send in an episode."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.family import ScenarioFamily, TenantVariation, varied_tenant
from vllm_tenant_tuning.scenario import (
    ExponentialService,
    FixedService,
    Scenario,
    ScenarioError,
    Service,
    Tenant,
    TokenLengths,
    TokenService,
    TraceArrivals,
    TraceTokens,
)
from vllm_tenant_tuning.workload.arrivals import arrival_sampler
from vllm_tenant_tuning.workload.lengths import LengthSampler, TraceLengths, length_sampler
from vllm_tenant_tuning.workload.replay import TraceReplay
from vllm_tenant_tuning.workload.stream import RequestStream
from vllm_tenant_tuning.workload.traces import Trace, find_trace, read_trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
TenantRequests = tuple[FloatArray, IntArray, IntArray, FloatArray]
"""Arrival times, prompt tokens, output tokens and service demands of one tenant."""

_SMALLEST_SERVICE_S = float(np.finfo(np.float64).tiny)


class Workload:
    """Draws the requests of a scenario's episodes. Traces are read once, here.

    Args:
        scenario: the task.
        trace_dir: folder of trace files given by a relative name (none: the folder that the
            environment variable VLLM_TENANT_TRACE_DIR names, else the current directory).

    Raises:
        TraceError: a trace that is missing, malformed, or empty in its window.
        ScenarioError: an episode would have more requests than fit into memory.

    Attributes:
        offered_rate_per_s: (n_tenants,) float64, mean arrival rate over an episode.
        mean_output_tokens: (n_tenants,) float64, mean output length.
        mean_service_s: (n_tenants,) float64, mean service demand.
        skipped_rows: malformed rows that were skipped in the traces, by tenant; tenants
            without a trace are left out.
    """

    def __init__(self, scenario: Scenario, trace_dir: str | Path | None = None) -> None:
        self.skipped_rows: dict[str, int] = {}
        self._tenants: list[_TenantSampler] = []
        traces: dict[tuple[Path, str, str], Trace] = {}
        variation = scenario.variation if isinstance(scenario, ScenarioFamily) else {}
        for index, tenant in enumerate(scenario.tenants):
            trace = None
            if isinstance(tenant.arrivals, TraceArrivals):
                path = find_trace(tenant.arrivals.file, trace_dir)
                key = (path, tenant.arrivals.format, tenant.arrivals.malformed)
                if key not in traces:
                    traces[key] = read_trace(
                        path, tenant.arrivals.format, tenant.arrivals.malformed
                    )
                trace = traces[key]
                self.skipped_rows[tenant.name] = trace.skipped_rows
            varies = variation.get(tenant.name, TenantVariation())
            try:
                sampler = _TenantSampler(tenant, trace, scenario.control.episode_s, varies)
            except ScenarioError as error:
                raise ScenarioError(f"scenario {scenario.name}: tenants.{index}.{error}") from error
            self._tenants.append(sampler)
        self.offered_rate_per_s = np.array([tenant.mean_rate_per_s for tenant in self._tenants])
        self.mean_output_tokens = np.array([tenant.mean_output_tokens for tenant in self._tenants])
        self.mean_service_s = np.array([tenant.mean_service_s for tenant in self._tenants])

    def sample(self, rng: np.random.Generator) -> RequestStream:
        """Draw the requests of an episode.

        The generator spawns one child for the episode, and that child one for each tenant: in
        every episode, a further tenant leaves the requests of the others as they are. No
        number is drawn from `rng` itself. What a family varies is drawn by a child of the
        tenant's: an episode in which nothing changed has the base's requests.

        Raises:
            TypeError: `rng` has no seed sequence to spawn from.
        """
        seeds = cast(np.random.SeedSequence, rng.bit_generator.seed_seq)
        children = seeds.spawn(1)[0].spawn(len(self._tenants))
        samplers = [
            tenant.varied(_generator(child.spawn(1)[0])) if tenant.varies else tenant
            for tenant, child in zip(self._tenants, children, strict=True)
        ]
        requests = [
            sampler.sample(_generator(child))
            for sampler, child in zip(samplers, children, strict=True)
        ]
        arrival_s, prompt_tokens, output_tokens, service_s = zip(*requests, strict=True)
        offsets = np.zeros(len(requests) + 1, np.int64)
        np.cumsum([times.size for times in arrival_s], out=offsets[1:])
        return RequestStream(
            offsets=offsets,
            arrival_s=np.concatenate(arrival_s),
            prompt_tokens=np.concatenate(prompt_tokens),
            output_tokens=np.concatenate(output_tokens),
            service_s=np.concatenate(service_s),
            patience_s=tuple(sampler.patience_s for sampler in samplers),
            drawn={sampler.name: sampler.drawn for sampler in samplers if sampler.drawn},
        )


def _generator(seed: np.random.SeedSequence) -> np.random.Generator:
    # NumPy's recommendation where many streams run side by side
    return np.random.Generator(np.random.PCG64DXSM(seed))


class _TenantSampler:
    """Draws the requests of one tenant."""

    def __init__(
        self, tenant: Tenant, trace: Trace | None, horizon_s: float, variation: TenantVariation
    ) -> None:
        self._tenant = tenant
        self._horizon_s = horizon_s
        self._variation = variation
        self.name = tenant.name
        self.varies = bool(variation.ranges)
        self.patience_s = tenant.patience_s
        self.drawn: dict[str, float] = {}
        self._service = tenant.service
        self._replay: TraceReplay | None = None
        if isinstance(tenant.arrivals, TraceArrivals):
            assert trace is not None
            self._replay = TraceReplay(tenant.arrivals, trace, horizon_s)
            self.mean_rate_per_s = self._replay.mean_rate_per_s
        else:
            self._arrivals = arrival_sampler(tenant.arrivals, horizon_s)
            self.mean_rate_per_s = self._arrivals.mean_rate_per_s
        self._prompt = self._lengths(tenant.prompt_tokens, "prompt_tokens")
        self._output = self._lengths(tenant.output_tokens, "output_tokens")
        self.mean_output_tokens = self._output.mean_tokens
        self.mean_service_s = _mean_service_s(
            self._service, self._prompt.mean_tokens, self._output.mean_tokens
        )

    def varied(self, rng: np.random.Generator) -> _TenantSampler:
        """The sampler of one episode, what varies of the tenant drawn."""
        drawn = self._variation.draw(rng)
        tenant = varied_tenant(self._tenant, drawn)
        sampler = copy.copy(self)
        sampler.drawn = drawn
        sampler.patience_s = tenant.patience_s
        if tenant.arrivals != self._tenant.arrivals:
            assert not isinstance(tenant.arrivals, TraceArrivals)  # the family's own check
            sampler._arrivals = arrival_sampler(tenant.arrivals, self._horizon_s)
        return sampler

    def sample(self, rng: np.random.Generator) -> TenantRequests:
        rows = None
        if self._replay is not None:
            arrival_s, rows = self._replay.sample(rng)
        else:
            arrival_s = self._arrivals.sample(rng)
        n = arrival_s.size
        prompt = self._prompt.sample(rng, n, rows)
        output = self._output.sample(rng, n, rows)
        return arrival_s, prompt, output, _service_s(self._service, rng, prompt, output)

    def _lengths(self, lengths: TokenLengths, column: str) -> LengthSampler:
        if isinstance(lengths, TraceTokens):
            assert self._replay is not None  # the scenario's own check
            return TraceLengths(getattr(self._replay, column), self._replay.expected_uses)
        return length_sampler(lengths)


def _service_s(
    service: Service | None, rng: np.random.Generator, prompt: IntArray, output: IntArray
) -> FloatArray:
    """(n,) service demands in seconds, above 0; NaN where the tenant states none."""
    match service:
        case None:
            return np.full(prompt.size, np.nan)
        case ExponentialService():
            demand_s = rng.standard_exponential(prompt.size) * service.mean_s
            # An exponential variate can be 0, once in 2**53 draws.
            return np.maximum(demand_s, _SMALLEST_SERVICE_S)
        case FixedService():
            return np.full(prompt.size, service.service_s)
        case TokenService():
            return (
                service.first_token_s
                + service.per_prompt_token_s * prompt
                + service.per_output_token_s * output
            )


def _mean_service_s(service: Service | None, prompt_tokens: float, output_tokens: float) -> float:
    match service:
        case None:
            return float("nan")
        case ExponentialService():
            return service.mean_s
        case FixedService():
            return service.service_s
        case TokenService():
            return (
                service.first_token_s
                + service.per_prompt_token_s * prompt_tokens
                + service.per_output_token_s * output_tokens
            )
