"""The slots fidelity's clockwork, compiled: one tick after another for a range of clusters.

A tick k stands for the time `k * tick_s`. In order:

1. **progress**: with n running the speed is `1 / (1 + slowdown * max(0, n - knee))`, the knee
   being the one in force when the tick's interval began; what a request still demands falls
   by `tick_s * speed`, and at zero it completes, stamped k;
2. **arrivals** in `((k - 1) tick_s, k tick_s]` join their tenant's queue, stamped k;
3. on a control tick the interval ends: it is observed, and new caps come into force;
4. **admission**: in rounds of one request a tenant, first the tenant `k % n_tenants`, while a
   tenant has a request queued, fewer than `cap` in flight, and a slot is free;
5. **drops**: of requests that have waited more than the patience, then of the youngest beyond
   the queue limit.

`tests/twins/slots.py` says the same in plain Python.

The parts are inlined: a call would copy some twenty array headers, several times in a tick, which
took half of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np

from vllm_tenant_tuning.backends.sim.quantiles import rank, sort

# Outcome, repeated as plain integers because compiled code knows no enums of another module.
QUEUED, IN_FLIGHT, COMPLETED, DROPPED = 1, 2, 3, 4

DEMAND_EPSILON_S = 1e-9
"""A demand this small is served: the rounding of repeated subtraction."""

CLUSTER_STATE = np.dtype([("tick", "i8"), ("n_running", "i8")])

REQUEST = np.dtype(
    [
        ("service_s", "f8"),
        ("arrival_tick", "i4"),
        ("admitted_tick", "i4"),
        ("finished_tick", "i4"),
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),
        ("outcome", "i4"),
    ]
)
"""One request; a cluster's are stored tenant by tenant."""

LOG = np.dtype([("queued_request", "i4"), ("done_tick", "i4"), ("done_latency", "i4")])
"""Two logs of a tenant, from its first request on: its queue, and its completions in order."""

RUNNING = np.dtype([("remaining_s", "f8"), ("request", "i4"), ("tenant", "i4")])

TENANT_STATE = np.dtype(
    [
        ("first_request", "i8"),  # index in the cluster; the others count from it
        ("n_requests", "i8"),
        ("patience_ticks", "i8"),  # of the episode
        ("next_arrival", "i8"),
        ("queue_head", "i8"),
        ("queue_tail", "i8"),
        ("window_head", "i8"),  # first completion inside the sliding window
    ]
)

TENANT_PARAMETERS = np.dtype(
    [
        ("queue_limit", "i8"),
        ("slo_ticks", "i8"),
    ]
)

ENGINE_PARAMETERS = np.dtype(
    [
        ("tick_s", "f8"),
        ("max_num_seqs", "i8"),
        ("ticks_per_interval", "i8"),
        ("window_ticks", "i8"),
        ("inter_token_latency_s", "f8"),
        ("slowdown", "f8"),
        ("knee_period_s", "f8"),  # 0: no knee
    ]
)

KNEE_SEGMENT = np.dtype([("until_s", "f8"), ("knee", "f8")])
"""A segment of the knee's schedule and where it ends within the period."""


class World(NamedTuple):
    """All arrays of N clusters with T tenants, R requests at most and S slots."""

    engine: Any  # one record of ENGINE_PARAMETERS
    tenant_parameters: Any  # (T,)
    knee_segments: Any  # (segments,)
    cluster_state: Any  # (N,)
    tenant_state: Any  # (N, T)
    requests: Any  # (N, R)
    logs: Any  # (N, R)
    running: Any  # (N, S)
    itl_history: Any  # (N, T, window_ticks) float64, NaN where nothing was in flight
    tenants: Any  # (N, T) of telemetry.TENANT_DTYPE
    clusters: Any  # (N,) of telemetry.CLUSTER_DTYPE


@nb.njit(nogil=True, cache=True)
def start(
    c: int,
    parameters: Any,
    tenant_parameters: Any,
    knee_segments: Any,
    cluster_state: Any,
    tenant_state: Any,
    requests: Any,
    logs: Any,
    running: Any,
    itl_history: Any,
    tenants: Any,
    clusters: Any,
) -> None:
    """Begin an episode on cluster c: tick 0, with what arrives at time 0, is observed."""
    world = World(
        parameters[0],
        tenant_parameters,
        knee_segments,
        cluster_state,
        tenant_state,
        requests,
        logs,
        running,
        itl_history,
        tenants,
        clusters,
    )
    cluster_state[c].tick = 0
    cluster_state[c].n_running = 0
    itl_history[c] = np.nan
    for t in range(tenants.shape[1]):
        state = tenant_state[c, t]
        state.next_arrival = 0
        state.queue_head = 0
        state.queue_tail = 0
        state.window_head = 0
    _arrive(c, world)
    _observe(c, world, np.empty(1, np.int32), np.empty(1, np.float64))


@nb.njit(nogil=True, cache=True)
def advance(
    first: int,
    last: int,
    active: Any,
    caps: Any,
    parameters: Any,
    tenant_parameters: Any,
    knee_segments: Any,
    cluster_state: Any,
    tenant_state: Any,
    requests: Any,
    logs: Any,
    running: Any,
    itl_history: Any,
    tenants: Any,
    clusters: Any,
) -> None:
    """Run one control interval on the active clusters of `[first, last)`."""
    # Built here because a tuple of arrays from outside costs several times the kernel's call.
    world = World(
        parameters[0],
        tenant_parameters,
        knee_segments,
        cluster_state,
        tenant_state,
        requests,
        logs,
        running,
        itl_history,
        tenants,
        clusters,
    )
    engine = parameters[0]
    n_tenants = tenants.shape[1]
    scratch = np.empty(requests.shape[1] + 1, np.int32)
    scratch_itl = np.empty(engine.window_ticks + 1, np.float64)
    for c in range(first, last):
        if not active[c]:
            continue
        state = cluster_state[c]
        for t in range(n_tenants):
            seen = tenants[c, t]
            seen.cap = caps[c, t]
            seen.arrived = 0.0
            seen.admitted = 0.0
            seen.completed = 0.0
            seen.good = 0.0
            seen.dropped = 0.0
            seen.prompt_tokens = 0.0
            seen.output_tokens = 0.0
            seen.mean_in_flight = 0.0
        for _ in range(engine.ticks_per_interval):
            _admit(c, world)
            _drop(c, world)
            state.tick += 1
            _progress(c, world)
            _arrive(c, world)
        for t in range(n_tenants):
            tenants[c, t].mean_in_flight /= engine.ticks_per_interval
        _observe(c, world, scratch, scratch_itl)


@nb.njit(nogil=True, cache=True, inline="always")
def _knee_at(time_s: float, period_s: float, segments: Any) -> float:
    within_s = time_s % period_s
    for i in range(segments.shape[0]):
        # A boundary that rounding puts a hair early belongs to the segment that begins there.
        if within_s < segments[i].until_s - 1e-9:
            return float(segments[i].knee)
    return float(segments[0].knee)


@nb.njit(nogil=True, cache=True, inline="always")
def _progress(c: int, world: Any) -> None:
    engine = world.engine
    state = world.cluster_state[c]
    tick = state.tick
    n_running = state.n_running
    speed = 1.0
    if engine.knee_period_s > 0.0:
        began_s = (tick - 1) * engine.tick_s
        knee = _knee_at(began_s, engine.knee_period_s, world.knee_segments)
        if n_running > knee:
            speed = 1.0 / (1.0 + engine.slowdown * (n_running - knee))
        slot = tick % engine.window_ticks
        for t in range(world.tenants.shape[1]):
            world.itl_history[c, t, slot] = (
                engine.inter_token_latency_s / speed
                if world.tenants[c, t].in_flight > 0
                else np.nan
            )
    served_s = engine.tick_s * speed
    for t in range(world.tenants.shape[1]):
        world.tenants[c, t].mean_in_flight += world.tenants[c, t].in_flight
    kept = 0
    for i in range(n_running):
        left_s = world.running[c, i].remaining_s - served_s
        request = world.running[c, i].request
        t = world.running[c, i].tenant
        if left_s > DEMAND_EPSILON_S:
            world.running[c, kept].remaining_s = left_s
            world.running[c, kept].request = request
            world.running[c, kept].tenant = t
            kept += 1
            continue
        seen = world.tenants[c, t]
        latency = tick - world.requests[c, request].arrival_tick
        log = world.tenant_state[c, t].first_request + np.int64(seen.completed_total)
        world.logs[c, log].done_tick = tick
        world.logs[c, log].done_latency = latency
        world.requests[c, request].outcome = COMPLETED
        world.requests[c, request].finished_tick = tick
        seen.in_flight -= 1.0
        seen.completed += 1.0
        seen.completed_total += 1.0
        seen.output_tokens += world.requests[c, request].output_tokens
        if latency <= world.tenant_parameters[t].slo_ticks:
            seen.good += 1.0
    state.n_running = kept


@nb.njit(nogil=True, cache=True, inline="always")
def _arrive(c: int, world: Any) -> None:
    tick = world.cluster_state[c].tick
    for t in range(world.tenants.shape[1]):
        state = world.tenant_state[c, t]
        seen = world.tenants[c, t]
        base = state.first_request
        while (
            state.next_arrival < state.n_requests
            and world.requests[c, base + state.next_arrival].arrival_tick <= tick
        ):
            request = base + state.next_arrival
            world.logs[c, base + state.queue_tail].queued_request = request
            state.queue_tail += 1
            state.next_arrival += 1
            world.requests[c, request].outcome = QUEUED
            seen.queued += 1.0
            seen.arrived += 1.0
            seen.arrived_total += 1.0


@nb.njit(nogil=True, cache=True, inline="always")
def _admit(c: int, world: Any) -> None:
    max_num_seqs = world.engine.max_num_seqs
    cluster = world.cluster_state[c]
    n_tenants = world.tenants.shape[1]
    first = cluster.tick % n_tenants
    admitted = True
    while admitted and cluster.n_running < max_num_seqs:
        admitted = False
        for turn in range(n_tenants):
            t = (first + turn) % n_tenants
            seen = world.tenants[c, t]
            if (
                seen.queued == 0.0
                or seen.in_flight >= seen.cap
                or cluster.n_running >= max_num_seqs
            ):
                continue
            state = world.tenant_state[c, t]
            request = world.logs[c, state.first_request + state.queue_head].queued_request
            state.queue_head += 1
            slot = cluster.n_running
            world.running[c, slot].request = request
            world.running[c, slot].tenant = t
            world.running[c, slot].remaining_s = world.requests[c, request].service_s
            cluster.n_running += 1
            world.requests[c, request].outcome = IN_FLIGHT
            world.requests[c, request].admitted_tick = cluster.tick
            seen.queued -= 1.0
            seen.in_flight += 1.0
            seen.admitted += 1.0
            seen.prompt_tokens += world.requests[c, request].prompt_tokens
            admitted = True


@nb.njit(nogil=True, cache=True, inline="always")
def _drop(c: int, world: Any) -> None:
    tick = world.cluster_state[c].tick
    for t in range(world.tenants.shape[1]):
        seen = world.tenants[c, t]
        state = world.tenant_state[c, t]
        base = state.first_request
        while seen.queued > 0.0:
            request = world.logs[c, base + state.queue_head].queued_request
            if tick - world.requests[c, request].arrival_tick > state.patience_ticks:
                state.queue_head += 1
            elif seen.queued > world.tenant_parameters[t].queue_limit:
                state.queue_tail -= 1
                request = world.logs[c, base + state.queue_tail].queued_request
            else:
                break
            world.requests[c, request].outcome = DROPPED
            world.requests[c, request].finished_tick = tick
            seen.queued -= 1.0
            seen.dropped += 1.0
            seen.dropped_total += 1.0


@nb.njit(nogil=True, cache=True, inline="always")
def _observe(c: int, world: Any, scratch: Any, scratch_itl: Any) -> None:
    engine = world.engine
    state = world.cluster_state[c]
    cluster = world.clusters[c]
    n_tenants = world.tenants.shape[1]
    oldest = state.tick - engine.window_ticks
    n_all = 0
    mean_running = 0.0
    for t in range(n_tenants):
        seen = world.tenants[c, t]
        base = world.tenant_state[c, t].first_request
        n_done = np.int64(seen.completed_total)
        head = world.tenant_state[c, t].window_head
        while head < n_done and world.logs[c, base + head].done_tick <= oldest:
            head += 1
        world.tenant_state[c, t].window_head = head
        n = n_done - head
        seen.window_completions = n
        mean_running += seen.mean_in_flight
        if n > 0:
            window = scratch[n_all : n_all + n]
            for i in range(n):
                window[i] = world.logs[c, base + head + i].done_latency
            sort(window)
            seen.latency_p50_s = window[rank(0.50, n)] * engine.tick_s
            seen.latency_p95_s = window[rank(0.95, n)] * engine.tick_s
            seen.latency_p99_s = window[rank(0.99, n)] * engine.tick_s
            n_all += n
        if engine.knee_period_s > 0.0:
            n_itl = 0
            for i in range(engine.window_ticks):
                value = world.itl_history[c, t, i]
                if value == value:
                    scratch_itl[n_itl] = value
                    n_itl += 1
            if n_itl > 0:
                itl = scratch_itl[:n_itl]
                sort(itl)
                seen.itl_p50_s = itl[rank(0.50, n_itl)]
                seen.itl_p95_s = itl[rank(0.95, n_itl)]
                seen.itl_p99_s = itl[rank(0.99, n_itl)]
        elif seen.mean_in_flight > 0.0:
            seen.itl_p50_s = engine.inter_token_latency_s
            seen.itl_p95_s = engine.inter_token_latency_s
            seen.itl_p99_s = engine.inter_token_latency_s
    cluster.time_s = state.tick * engine.tick_s
    cluster.num_requests_running = state.n_running
    cluster.kv_cache_usage = state.n_running / engine.max_num_seqs
    cluster.mean_running = mean_running
    cluster.window_completions = n_all
    if n_all > 0:
        everyone = scratch[:n_all]
        sort(everyone)
        cluster.latency_p50_s = everyone[rank(0.50, n_all)] * engine.tick_s
        cluster.latency_p95_s = everyone[rank(0.95, n_all)] * engine.tick_s
        cluster.latency_p99_s = everyone[rank(0.99, n_all)] * engine.tick_s
