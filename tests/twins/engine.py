"""One server of the engine fidelity in plain Python: lists, objects and one step at a time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twins.readings import NAN, named, percentiles
from vllm_tenant_tuning.backends.base import Outcome
from vllm_tenant_tuning.backends.sim.step_time import step_tables
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import RequestStream

PS = 10**12
NEVER = math.inf
ITL_EDGES_PS = [round(1e8 * 2 ** (b / 32)) for b in range(641)]

INTERVAL_COUNTS = (
    "arrived",
    "admitted",
    "completed",
    "good",
    "dropped",
    "failed",
    "prompt_tokens",
    "output_tokens",
)


def picoseconds(seconds: float | None) -> float:
    return NEVER if seconds is None else round(seconds * PS)


@dataclass(eq=False)
class Request:
    """A request on its way; times in picoseconds, `number` in the order of sending."""

    tenant: int
    arrival: int
    prompt: int
    output: int
    outcome: Outcome = Outcome.PENDING
    number: int = -1
    sent: int | None = None
    ready: int = -1
    scheduled: int | None = None
    finished: int | None = None
    token_times: list[int] = field(default_factory=list)
    computed: int = 0
    chunk: int = 0
    """Tokens in the step in progress."""
    blocks: int = 0
    decoding: bool = False
    """All tokens up to the last one were computed since the last preemption."""
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens, as vLLM's `num_tokens`."""
        return self.prompt + len(self.token_times)


@dataclass(eq=False)
class TenantState:
    """A tenant's requests, its gate's queue and what it has at the server."""

    requests: list[Request]
    queue: list[Request] = field(default_factory=list)
    in_flight: list[Request] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    held_ps: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(when, how long) of every inter-token latency."""
    latency_s: list[float] = field(default_factory=lambda: [NAN] * 3)
    ttft_s: list[float] = field(default_factory=lambda: [NAN] * 3)
    itl_s: list[float] = field(default_factory=lambda: [NAN] * 3)

    def number(self, outcome: Outcome) -> int:
        return sum(request.outcome == outcome for request in self.requests)


class EngineTwin:
    """One server; `reset` and `advance` return what the interval showed.

    An observation is `{"tenants": [...], "cluster": {...}}`, dicts of the telemetry's fields.
    After each scheduled step `on_step`, when set, is called with the twin.
    """

    OUTCOME_FIELDS = (
        "outcome",
        "arrival_s",
        "admitted_s",
        "scheduled_s",
        "first_token_s",
        "finished_s",
        "preemptions",
    )

    on_step: Any = None

    def __init__(self, scenario: Scenario) -> None:
        assert isinstance(scenario.engine, ContinuousBatchingEngine)
        self.scenario = scenario
        self.engine = scenario.engine
        self.limits = scenario.engine.scheduler
        self.block_size = scenario.engine.profile.kv_cache.block_size
        self.interval_ps = int(picoseconds(scenario.control.control_interval_s))
        n_window = round(scenario.control.window_s / scenario.control.control_interval_s)
        self.window_ps = n_window * self.interval_ps
        self.tables = step_tables(
            scenario.engine.profile.step_time,
            self.limits.max_num_batched_tokens,
            self.limits.max_num_seqs,
        )

    def reset(self, stream: RequestStream, caps: Sequence[int]) -> dict[str, Any]:
        self.now = 0
        self.caps = [int(cap) for cap in caps]
        self.latency_s = [NAN] * 3
        self.tenants = [
            TenantState(
                [
                    Request(
                        tenant=i,
                        arrival=int(picoseconds(float(stream.arrival_s[r]))),
                        prompt=int(stream.prompt_tokens[r]),
                        output=int(stream.output_tokens[r]),
                    )
                    for r in range(int(stream.offsets[i]), int(stream.offsets[i + 1]))
                ]
            )
            for i in range(self.scenario.n_tenants)
        ]
        self.arrivals = sorted(
            (request for tenant in self.tenants for request in tenant.requests),
            key=lambda request: request.arrival,
        )
        self.api_free: float = 0
        self.n_sent = 0
        self.on_their_way: list[Request] = []
        """Sent, and not through the API server yet; in the order of sending."""
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.step_start: int | None = None
        self.step_end: float = NEVER
        self._begin_interval()
        self._play_until(0)
        return self._observe()

    def advance(self, caps: Sequence[int]) -> dict[str, Any]:
        self._begin_interval()
        self.caps = [int(cap) for cap in caps]
        for i in range(len(self.tenants)):
            self._send_queued(i)
        self._play_until(self.now + self.interval_ps)
        return self._observe()

    def outcomes(self) -> list[tuple[float, ...]]:
        """A row of `OUTCOME_FIELDS` for every request of the stream."""

        def seconds(time_ps: int | None) -> float:
            return NAN if time_ps is None else time_ps / PS

        return [
            (
                request.outcome,
                seconds(request.arrival),
                seconds(request.sent),
                seconds(request.scheduled),
                seconds(request.token_times[0] if request.token_times else None),
                seconds(request.finished),
                request.preemptions,
            )
            for tenant in self.tenants
            for request in tenant.requests
        ]

    # --- the clock ------------------------------------------------------------------------

    def _play_until(self, until: int) -> None:
        self._ready_and_step()
        while True:
            instant = min(
                self.step_end,
                self.arrivals[0].arrival if self.arrivals else NEVER,
                min((self._expiry(r) for t in self.tenants for r in t.queue), default=NEVER),
                min((r.ready for r in self.on_their_way), default=NEVER),
            )
            if instant > until:
                break
            self._let_pass(int(instant))
            if self.step_end == self.now:
                self._finish_step()
            self._gate()
            self._ready_and_step()
        self._let_pass(until)

    def _let_pass(self, instant: int) -> None:
        passed = instant - self.now
        for tenant in self.tenants:
            tenant.held_ps += passed * len(tenant.in_flight)
        self.running_ps += passed * len(self.running)
        if self.step_start is not None:
            self.busy_ps += passed
        self.now = instant

    def _begin_interval(self) -> None:
        self.running_ps = self.busy_ps = 0
        self.preemptions = self.prompt_tokens = self.generation_tokens = 0
        for tenant in self.tenants:
            tenant.counts = dict.fromkeys(INTERVAL_COUNTS, 0)
            tenant.held_ps = 0

    # --- gate and API server --------------------------------------------------------------

    def _expiry(self, request: Request) -> float:
        patience = picoseconds(self.scenario.tenants[request.tenant].patience_s)
        return request.arrival + patience

    def _gate(self) -> None:
        while self.arrivals and self.arrivals[0].arrival <= self.now:
            request = self.arrivals.pop(0)
            i = request.tenant
            tenant, limit = self.tenants[i], self.scenario.tenants[i].queue_limit
            tenant.counts["arrived"] += 1
            request.outcome = Outcome.QUEUED
            if len(tenant.in_flight) < self.caps[i] and not tenant.queue:
                self._send(request)
            elif limit is not None and len(tenant.queue) >= limit:
                self._drop(request)
            else:
                tenant.queue.append(request)
        for tenant in self.tenants:
            for request in [r for r in tenant.queue if self._expiry(r) <= self.now]:
                tenant.queue.remove(request)
                self._drop(request)

    def _drop(self, request: Request) -> None:
        request.outcome = Outcome.DROPPED
        request.finished = self.now
        self.tenants[request.tenant].counts["dropped"] += 1

    def _send_queued(self, i: int) -> None:
        tenant = self.tenants[i]
        while tenant.queue and len(tenant.in_flight) < self.caps[i]:
            self._send(tenant.queue.pop(0))

    def _send(self, request: Request) -> None:
        tenant = self.tenants[request.tenant]
        request.sent = self.now
        tenant.counts["admitted"] += 1
        tenant.counts["prompt_tokens"] += request.prompt
        # The last token is never computed, since nothing comes after it.
        too_long = request.prompt + request.output > self.limits.max_model_len
        too_large = self._blocks(request.prompt + request.output - 1) > self.engine.num_gpu_blocks
        at_server = sum(len(tenant.in_flight) for tenant in self.tenants)
        most = self.engine.max_num_queued_reqs
        if too_long or too_large or (most is not None and at_server + 1 > most):
            request.outcome = Outcome.FAILED
            request.finished = self.now
            tenant.counts["failed"] += 1
            return
        request.outcome = Outcome.IN_FLIGHT
        tenant.in_flight.append(request)
        frontend = self.engine.profile.frontend
        self.api_free = max(self.api_free, self.now) + picoseconds(frontend.request_s)
        self.api_free += picoseconds(frontend.prompt_token_s) * request.prompt
        request.ready = int(self.api_free + picoseconds(frontend.delay_s))
        request.number = self.n_sent
        self.n_sent += 1
        self.on_their_way.append(request)

    # --- scheduler ------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.block_size)

    def _free_blocks(self) -> int:
        return self.engine.num_gpu_blocks - sum(request.blocks for request in self.running)

    def _priority(self, request: Request) -> int:
        return self.scenario.tenants[request.tenant].priority

    def _ready_and_step(self) -> None:
        for request in list(self.on_their_way):
            if request.ready <= self.now:
                self.on_their_way.remove(request)
                self.waiting.append(request)
        while self.step_start is None and (self.running or self.waiting):
            self._schedule()

    def _schedule(self) -> None:
        """vLLM's V1 scheduler: RUNNING, then WAITING unless something was preempted."""
        budget = self.limits.max_num_batched_tokens
        threshold = self.engine.long_prefill_token_threshold
        if threshold == 0 or len(self.running) + len(self.waiting) == 1:
            threshold = budget
        for request in self.running:
            request.chunk = 0
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            chunk = min(request.tokens - request.computed, threshold, budget)
            needed = self._blocks(request.computed + chunk) - request.blocks
            while needed > self._free_blocks():
                victim = self._victim()
                preempted = True
                if self.running.index(victim) < index:
                    index -= 1
                budget += victim.chunk
                self._preempt(victim)
                if victim is request:
                    break
            if request not in self.running:
                break
            request.blocks += needed
            request.chunk = chunk
            budget -= chunk
            index += 1
        while not preempted and self.waiting and budget > 0:
            if len(self.running) == self.limits.max_num_seqs:
                break
            request = self._next_waiting()
            chunk = min(request.tokens, threshold, budget)
            reserved = request.tokens if self.engine.scheduler_reserve_full_isl else chunk
            if self._blocks(reserved) > self._free_blocks():
                break
            self.waiting.remove(request)
            self.running.append(request)
            request.blocks = self._blocks(chunk)
            request.chunk = chunk
            budget -= chunk
            if request.scheduled is None:
                request.scheduled = self.now
        if all(request.chunk == 0 for request in self.running):
            return  # all were preempted; the next call begins with WAITING
        self.step_start = self.now
        self.step_end = self.now + self._step_ps()
        if self.on_step is not None:
            self.on_step(self)

    def _victim(self) -> Request:
        if self.engine.scheduling_policy == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda request: (self._priority(request), request.ready))

    def _next_waiting(self) -> Request:
        if self.engine.scheduling_policy == "fcfs":
            return self.waiting[0]
        return min(
            self.waiting,
            key=lambda request: (self._priority(request), request.ready, request.number),
        )

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.insert(0, request)
        request.computed = request.blocks = request.chunk = 0
        request.decoding = False
        request.preemptions += 1
        self.preemptions += 1

    def _step_ps(self) -> int:
        scheduled = [request for request in self.running if request.chunk > 0]
        decodes = [request for request in scheduled if request.decoding]
        prefills = [request for request in scheduled if not request.decoding]
        tokens = sum(request.chunk for request in scheduled)
        context = sum(request.computed + 1 for request in decodes)
        pairs_twice = sum(
            2 * (request.computed + position) + 2
            for request in prefills
            for position in range(request.chunk)
        )
        n = len(decodes)
        return int(
            self.tables.dense_ps[tokens]
            + self.tables.sequence_ps[n]
            + self.tables.kv_ps[n] * context
            + self.tables.prefill_pair_fs * pairs_twice // 1000
        )

    def _finish_step(self) -> None:
        completed = []
        for request in self.running:
            request.computed += request.chunk
            if request.chunk == 0 or request.computed < request.tokens:
                continue
            tenant = self.tenants[request.tenant]
            self.generation_tokens += 1
            if request.token_times:
                tenant.gaps.append((self.now, self.now - request.token_times[-1]))
            else:
                self.prompt_tokens += request.prompt
            request.token_times.append(self.now)
            request.decoding = True
            if len(request.token_times) == request.output:
                completed.append(request)
        self.step_start, self.step_end = None, NEVER
        for request in completed:
            self._complete(request)

    def _complete(self, request: Request) -> None:
        self.running.remove(request)
        tenant, promise = self.tenants[request.tenant], self.scenario.tenants[request.tenant]
        tenant.in_flight.remove(request)
        request.outcome = Outcome.COMPLETED
        request.finished = self.now
        tenant.counts["completed"] += 1
        tenant.counts["output_tokens"] += request.output
        first = request.token_times[0]
        if (
            self.now - request.arrival <= picoseconds(promise.slo_latency_p99_s)
            and first - request.arrival <= picoseconds(promise.slo_ttft_p99_s)
            and (
                request.output == 1
                or (self.now - first) / (request.output - 1) <= picoseconds(promise.slo_itl_p99_s)
            )
        ):
            tenant.counts["good"] += 1
        self._send_queued(request.tenant)

    # --- what is seen at the end of an interval -------------------------------------------

    def _in_window(self, time_ps: int | None) -> bool:
        return time_ps is not None and self.now - self.window_ps < time_ps <= self.now

    def _latencies(self, tenant: TenantState) -> list[float]:
        return [
            (request.finished - request.arrival) / PS
            for request in tenant.requests
            if request.outcome == Outcome.COMPLETED
            and request.finished is not None
            and self._in_window(request.finished)
        ]

    def _observe(self) -> dict[str, Any]:
        tenants = [self._observe_tenant(i) for i in range(len(self.tenants))]
        window = [latency for tenant in self.tenants for latency in self._latencies(tenant)]
        self.latency_s = percentiles(window, self.latency_s)
        profile = self.engine.profile
        energy_j = NAN
        if profile.power is not None:
            idle_ps = self.interval_ps - self.busy_ps
            energy_j = (profile.power.idle_w * idle_ps + profile.power.busy_w * self.busy_ps) / PS
        cluster = {
            "time_s": self.now / PS,
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage": sum(r.blocks for r in self.running) / self.engine.num_gpu_blocks,
            "gpu_memory_utilization": profile.gpu_memory_utilization,
            "preemptions": self.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "energy_j": energy_j,
            "mean_running": self.running_ps / self.interval_ps,
            "window_completions": len(window),
            **named("latency", self.latency_s),
        }
        return {"tenants": tenants, "cluster": cluster}

    def _observe_tenant(self, i: int) -> dict[str, float]:
        tenant = self.tenants[i]
        latencies = self._latencies(tenant)
        tenant.latency_s = percentiles(latencies, tenant.latency_s)
        ttfts = [
            (request.token_times[0] - request.arrival) / PS
            for request in tenant.requests
            if request.token_times and self._in_window(request.token_times[0])
        ]
        tenant.ttft_s = percentiles(ttfts, tenant.ttft_s)
        gaps = [middle_s(gap) for when, gap in tenant.gaps if self._in_window(when)]
        tenant.itl_s = percentiles(gaps, tenant.itl_s)
        return {
            "cap": self.caps[i],
            "queued": len(tenant.queue),
            "in_flight": len(tenant.in_flight),
            **tenant.counts,
            "mean_in_flight": tenant.held_ps / self.interval_ps,
            "window_completions": len(latencies),
            **named("latency", tenant.latency_s),
            **named("ttft", tenant.ttft_s),
            **named("itl", tenant.itl_s),
            "arrived_total": len(tenant.requests) - tenant.number(Outcome.PENDING),
            "completed_total": tenant.number(Outcome.COMPLETED),
            "dropped_total": tenant.number(Outcome.DROPPED),
            "failed_total": tenant.number(Outcome.FAILED),
        }


def middle_s(gap_ps: int) -> float:
    """An inter-token latency as the histogram tells it: the geometric middle of its bin."""
    b = min(max(bisect.bisect_right(ITL_EDGES_PS, gap_ps) - 1, 0), len(ITL_EDGES_PS) - 2)
    return math.sqrt(ITL_EDGES_PS[b] * ITL_EDGES_PS[b + 1]) / PS
