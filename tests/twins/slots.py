"""One cluster of the slots fidelity in plain Python: lists, objects and one tick at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twins.readings import NAN, named, percentiles
from vllm_tenant_tuning.backends.base import Outcome
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import RequestStream

EPSILON = 1e-9
"""Far above the rounding of a sum of ticks, far below a tick: times this close are equal."""

INTERVAL_COUNTS = (
    "arrived",
    "admitted",
    "completed",
    "good",
    "dropped",
    "prompt_tokens",
    "output_tokens",
)


@dataclass(eq=False)
class Request:
    """A request on its way; times are numbers of ticks."""

    arrival: int
    service_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: Outcome = Outcome.PENDING
    admitted: int | None = None
    finished: int | None = None


@dataclass(eq=False)
class TenantState:
    """What a tenant has at the gate, in flight and behind it."""

    requests: list[Request]
    queue: list[Request] = field(default_factory=list)
    in_flight: list[Request] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    """Requests in flight in each tick interval of the control interval."""
    itl_readings: list[tuple[int, float]] = field(default_factory=list)
    """(tick, seconds) of each tick interval with something in flight."""
    latency_s: list[float] = field(default_factory=lambda: [NAN] * 3)
    itl_s: list[float] = field(default_factory=lambda: [NAN] * 3)

    def completions(self) -> list[Request]:
        return [request for request in self.requests if request.outcome == Outcome.COMPLETED]

    def number(self, outcome: Outcome) -> int:
        return sum(request.outcome == outcome for request in self.requests)


class SlotsTwin:
    """One cluster; `reset` and `advance` return what the interval showed.

    An observation is `{"tenants": [...], "cluster": {...}}`, dicts of the telemetry's fields.
    """

    OUTCOME_FIELDS = ("outcome", "arrival_s", "admitted_s", "finished_s")

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.tick_s = scenario.engine.tick_s
        self.ticks_per_interval = round(scenario.control.control_interval_s / self.tick_s)
        self.window_ticks = round(scenario.control.window_s / self.tick_s)

    def reset(self, stream: RequestStream, caps: Sequence[int]) -> dict[str, Any]:
        self.tick = 0
        self.latency_s = [NAN] * 3
        self.caps = [int(cap) for cap in caps]
        self.tenants = [
            TenantState(
                [
                    Request(
                        arrival=math.ceil(float(stream.arrival_s[r]) / self.tick_s - EPSILON),
                        service_s=float(stream.service_s[r]),
                        prompt_tokens=int(stream.prompt_tokens[r]),
                        output_tokens=int(stream.output_tokens[r]),
                    )
                    for r in range(int(stream.offsets[i]), int(stream.offsets[i + 1]))
                ]
            )
            for i in range(self.scenario.n_tenants)
        ]
        self._begin_interval()
        self._arrivals()
        return self._observe()

    def advance(self, caps: Sequence[int]) -> dict[str, Any]:
        self.caps = [int(cap) for cap in caps]
        self._begin_interval()
        for _ in range(self.ticks_per_interval):
            self._admission()
            self._drops()
            speed = self._speed()
            self.tick += 1
            self._progress(speed)
            self._arrivals()
        return self._observe()

    def outcomes(self) -> list[tuple[float, ...]]:
        """A row of `OUTCOME_FIELDS` for every request of the stream."""

        def seconds(tick: int | None) -> float:
            return NAN if tick is None else tick * self.tick_s

        return [
            (
                request.outcome,
                seconds(request.arrival),
                seconds(request.admitted),
                seconds(request.finished),
            )
            for tenant in self.tenants
            for request in tenant.requests
        ]

    # --- what happens in a tick -----------------------------------------------------------

    def _begin_interval(self) -> None:
        for tenant in self.tenants:
            tenant.counts = dict.fromkeys(INTERVAL_COUNTS, 0)
            tenant.held = []

    def _n_running(self) -> int:
        return sum(len(tenant.in_flight) for tenant in self.tenants)

    def _speed(self) -> float:
        """The speed of the tick interval that begins now."""
        knee = self.scenario.engine.knee
        if knee is None:
            return 1.0
        period_s = sum(segment.duration_s for segment in knee.segments)
        left_s = self.tick * self.tick_s + EPSILON
        left_s -= math.floor(left_s / period_s) * period_s
        for segment in knee.segments:
            if left_s < segment.duration_s:
                break
            left_s -= segment.duration_s
        return 1.0 / (1.0 + knee.slowdown * max(0.0, self._n_running() - segment.knee))

    def _progress(self, speed: float) -> None:
        for tenant, description in zip(self.tenants, self.scenario.tenants, strict=True):
            tenant.held.append(len(tenant.in_flight))
            if tenant.in_flight:
                itl_s = self.scenario.engine.inter_token_latency_s / speed
                tenant.itl_readings.append((self.tick, itl_s))
            for request in list(tenant.in_flight):
                request.service_s -= self.tick_s * speed
                if request.service_s > EPSILON:
                    continue
                tenant.in_flight.remove(request)
                request.outcome = Outcome.COMPLETED
                request.finished = self.tick
                tenant.counts["completed"] += 1
                tenant.counts["output_tokens"] += request.output_tokens
                if self._latency_s(request) <= description.slo_latency_p99_s + EPSILON:
                    tenant.counts["good"] += 1

    def _arrivals(self) -> None:
        for tenant in self.tenants:
            for request in tenant.requests:
                if request.arrival == self.tick:
                    request.outcome = Outcome.QUEUED
                    tenant.queue.append(request)
                    tenant.counts["arrived"] += 1

    def _admission(self) -> None:
        n_tenants = len(self.tenants)
        admitted_in_round = True
        while admitted_in_round:
            admitted_in_round = False
            for turn in range(n_tenants):
                i = (self.tick + turn) % n_tenants
                tenant = self.tenants[i]
                slot_free = self._n_running() < self.scenario.engine.max_num_seqs
                if tenant.queue and len(tenant.in_flight) < self.caps[i] and slot_free:
                    request = tenant.queue.pop(0)
                    request.outcome = Outcome.IN_FLIGHT
                    request.admitted = self.tick
                    tenant.in_flight.append(request)
                    tenant.counts["admitted"] += 1
                    tenant.counts["prompt_tokens"] += request.prompt_tokens
                    admitted_in_round = True

    def _drops(self) -> None:
        for tenant, description in zip(self.tenants, self.scenario.tenants, strict=True):
            dropped = []
            if description.patience_s is not None:
                for request in tenant.queue:
                    waited_s = (self.tick - request.arrival) * self.tick_s
                    if waited_s > description.patience_s + EPSILON:
                        dropped.append(request)
            if description.queue_limit is not None:
                patient = [request for request in tenant.queue if request not in dropped]
                dropped += patient[description.queue_limit :]
            for request in dropped:
                tenant.queue.remove(request)
                request.outcome = Outcome.DROPPED
                request.finished = self.tick
                tenant.counts["dropped"] += 1

    # --- what is seen at the end of an interval -------------------------------------------

    def _latency_s(self, request: Request) -> float:
        assert request.finished is not None
        return (request.finished - request.arrival) * self.tick_s

    def _window(self, tenant: TenantState) -> list[float]:
        """Latencies of the tenant's completions in the window that ends now."""
        return [
            self._latency_s(request)
            for request in tenant.completions()
            if request.finished is not None and request.finished > self.tick - self.window_ticks
        ]

    def _observe(self) -> dict[str, Any]:
        tenants = [self._observe_tenant(i) for i in range(len(self.tenants))]
        window = [latency for tenant in self.tenants for latency in self._window(tenant)]
        self.latency_s = percentiles(window, self.latency_s)
        running = self._n_running()
        cluster = {
            "time_s": self.tick * self.tick_s,
            "num_requests_running": running,
            "num_requests_waiting": 0,
            "kv_cache_usage": running / self.scenario.engine.max_num_seqs,
            "gpu_memory_utilization": NAN,
            "preemptions": 0,
            "prompt_tokens": NAN,
            "generation_tokens": NAN,
            "energy_j": NAN,
            "mean_running": sum(tenant["mean_in_flight"] for tenant in tenants),
            "window_completions": len(window),
            **named("latency", self.latency_s),
        }
        return {"tenants": tenants, "cluster": cluster}

    def _observe_tenant(self, i: int) -> dict[str, float]:
        tenant = self.tenants[i]
        window = self._window(tenant)
        tenant.latency_s = percentiles(window, tenant.latency_s)
        if self.scenario.engine.knee is None:
            # One constant, seen once something was in flight.
            if tenant.itl_readings:
                tenant.itl_s = [self.scenario.engine.inter_token_latency_s] * 3
        else:
            first = self.tick - self.window_ticks
            readings = [itl_s for tick, itl_s in tenant.itl_readings if tick > first]
            tenant.itl_s = percentiles(readings, tenant.itl_s)
        arrived = len(tenant.requests) - tenant.number(Outcome.PENDING)
        return {
            "cap": self.caps[i],
            "queued": len(tenant.queue),
            "in_flight": len(tenant.in_flight),
            **tenant.counts,
            "failed": 0,
            "mean_in_flight": sum(tenant.held) / len(tenant.held) if tenant.held else 0,
            "window_completions": len(window),
            **named("latency", tenant.latency_s),
            **named("ttft", [NAN] * 3),
            **named("itl", tenant.itl_s),
            "arrived_total": arrived,
            "completed_total": tenant.number(Outcome.COMPLETED),
            "dropped_total": tenant.number(Outcome.DROPPED),
            "failed_total": 0,
        }
