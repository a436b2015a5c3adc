"""The engine fidelity's scheduler and clockwork, compiled: vLLM's continuous batching.

The clock counts picoseconds in int64, so that a jump over many steps lands exactly where
stepping would. At one instant t, in order:

1. the gate's events before t, then the outputs of a step that ends at t: tokens, then
   completions in the order of the running list, each followed by what its tenant's gate sends;
2. the gate's events at t: arrivals, then expiries of patience;
3. requests that have come through the API server by t enter WAITING;
4. if no step is in progress and there is work, the next step is scheduled and begins.

A step is scheduled as vLLM 0.32's V1 scheduler does (`vllm/v1/core/sched/scheduler.py`): RUNNING
in order under the token budget, with preemption by recompute where blocks run out; then, if
nothing was preempted, WAITING while budget, sequences and blocks last. Its time is

    dense[p + n] + sequence[n] + kv[n] * context tokens + pair * prefill attention

(see `step_time.py`). While a batch only decodes, its steps form an arithmetic series, and
`_jump` goes over all those at whose boundaries nothing can change.

Decoding sequences are not touched step by step: a cluster counts its steps in `counter`, and
a sequence holds `base` with `computed = base + counter`, the step it finishes at (a heap), and
the residue of `base` that says when it needs a block. Steps in which the budget or the cache
does not suffice for all that run take the slow way, one sequence after another.

`tests/twins/engine.py` says the same step by step in plain Python. All is in one file because
numba's cache notices changes in a compiled function's own file only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba as nb
import numpy as np

from vllm_tenant_tuning.backends.sim.quantiles import rank, sort

# Outcome, repeated as plain integers because compiled code knows no enums of another module.
QUEUED, IN_FLIGHT, COMPLETED, DROPPED, FAILED = 1, 2, 3, 4, 5

NEVER = 2**62
PS = 1e12
ITL_BINS = 640
ITL_BINS_PER_OCTAVE = 32
ITL_FIRST_EDGE_PS = 1e8

ENGINE_PARAMETERS = np.dtype(
    [
        ("interval_ps", "i8"),
        ("window_ps", "i8"),
        ("max_num_seqs", "i8"),
        ("max_num_batched_tokens", "i8"),
        ("max_model_len", "i8"),
        ("num_gpu_blocks", "i8"),
        ("block_size", "i8"),
        ("priority_scheduling", "i8"),
        ("reserve_full_isl", "i8"),
        ("long_prefill_token_threshold", "i8"),
        ("max_num_queued_reqs", "i8"),
        ("request_ps", "i8"),
        ("prompt_token_ps", "i8"),
        ("delay_ps", "i8"),
        ("prefill_pair_fs", "i8"),
        ("idle_w", "f8"),  # NaN: the profile knows no power
        ("busy_w", "f8"),
    ]
)

TENANT_PARAMETERS = np.dtype(
    [
        ("queue_limit", "i8"),
        ("priority", "i8"),
        ("slo_latency_ps", "i8"),
        ("slo_ttft_ps", "i8"),
        ("slo_itl_ps", "i8"),
    ]
)

CLUSTER_STATE = np.dtype(
    [
        ("time_ps", "i8"),  # of the last observation
        ("stepping", "i8"),
        ("step_start_ps", "i8"),
        ("step_end_ps", "i8"),
        ("decode_only", "i8"),  # the step in progress has no prefill and followed the fast way
        ("by_sequence", "i8"),  # the step in progress followed the slow way
        ("n_step_decodes", "i8"),  # decoding sequences in the step in progress
        ("counter", "i8"),  # steps that have ended
        ("n_running", "i8"),
        ("n_decoding", "i8"),
        ("n_prefilling", "i8"),
        ("n_stalled", "i8"),  # decoding sequences that a step has left out since their last token
        ("n_waiting", "i8"),
        ("untried", "i8"),  # whether any of WAITING came since the last step was scheduled
        ("kv_tokens", "i8"),  # computed tokens of the decoding sequences
        ("used_blocks", "i8"),
        ("next_order", "i8"),
        ("head", "i8"),  # the running list
        ("tail", "i8"),
        ("free_slot", "i8"),
        ("n_requests", "i8"),
        ("next_arrival", "i8"),
        ("next_expiry_ps", "i8"),  # not after the first expiry at any gate
        ("n_sent", "i8"),
        ("n_ready", "i8"),
        ("api_free_ps", "i8"),
        ("in_flight", "i8"),
        ("running_since_ps", "i8"),
        ("running_sum_ps", "i8"),
        ("busy_since_ps", "i8"),
        ("busy_sum_ps", "i8"),
        ("preemptions", "i8"),
        ("prompt_tokens", "i8"),
        ("generation_tokens", "i8"),
        ("itl_slot", "i8"),
    ]
)

TENANT_STATE = np.dtype(
    [
        ("first_request", "i8"),
        ("n_requests", "i8"),
        ("patience_ps", "i8"),  # of the episode
        ("cap", "i8"),
        ("in_flight", "i8"),
        ("queue_head", "i8"),  # requests linked by `next`; -1: none
        ("queue_tail", "i8"),
        ("n_queued", "i8"),
        ("waiting_head", "i8"),
        ("waiting_tail", "i8"),
        ("n_decoding", "i8"),
        ("n_stalled", "i8"),
        ("in_flight_since_ps", "i8"),
        ("in_flight_sum_ps", "i8"),
        ("n_done", "i8"),
        ("n_first", "i8"),
        ("window_done", "i8"),  # first completion inside the sliding window
        ("window_first", "i8"),
    ]
)

REQUEST = np.dtype(
    [
        ("arrival_ps", "i8"),
        ("sent_ps", "i8"),
        ("ready_ps", "i8"),
        ("scheduled_ps", "i8"),
        ("first_token_ps", "i8"),
        ("last_token_ps", "i8"),  # kept up to date only where a gap is not one step
        ("finished_ps", "i8"),
        ("prompt", "i4"),
        ("output", "i4"),
        ("generated", "i4"),  # as of the last preemption
        ("next", "i4"),  # in its gate's queue, then in WAITING
        ("order", "i4"),  # of sending
        ("preemptions", "i4"),
        ("tenant", "i4"),
        ("outcome", "i4"),
    ]
)
"""One request; a cluster's are stored tenant by tenant. Times not reached are -1."""

LOG = np.dtype([("arrival", "i4"), ("sent", "i4"), ("first", "i4"), ("done", "i4")])
"""Requests in the order of arrival and of sending (cluster), of first token and of completion
(tenant by tenant, each from its first request on)."""

RUNNING = np.dtype(
    [
        ("base", "i8"),  # decoding: computed - counter; prefilling: computed
        ("remaining", "i8"),  # prefilling: tokens to compute before the next token comes
        ("finish", "i8"),  # decoding: the counter at which it completes
        ("order", "i8"),  # of admission
        ("last_token_ps", "i8"),  # of a stalled sequence; else -1
        ("request", "i4"),
        ("tenant", "i4"),
        ("previous", "i4"),
        ("next", "i4"),  # also links the free slots
        ("chunk", "i4"),  # tokens in the step in progress (decoding: the slow way only)
        ("decoding", "i4"),
    ]
)

FINISH = np.dtype([("key", "i8"), ("slot", "i8")])
"""An entry of the heap of completions; key: finish << 32 | order of admission."""


class Arrays(NamedTuple):
    """C clusters with T tenants, R requests, S sequences, B tokens in a block, W intervals."""

    engine: Any  # (1,) of ENGINE_PARAMETERS
    dense_ps: Any
    sequence_ps: Any
    kv_ps: Any
    itl_edges_ps: Any
    parameters: Any  # (T,) of TENANT_PARAMETERS
    state: Any  # (C,) of CLUSTER_STATE
    tenants: Any  # (C, T) of TENANT_STATE
    requests: Any  # (C, R) of REQUEST
    logs: Any  # (C, R) of LOG
    running: Any  # (C, S) of RUNNING
    prefilling: Any  # (C, S) slots in the order of the running list
    heap: Any  # (C, S) of FINISH
    residues: Any  # (C, B) decoding sequences by base % B
    itl: Any  # (C, W, T, ITL_BINS) gaps of the last intervals
    itl_window: Any  # (C, T, ITL_BINS) their sum
    itl_range: Any  # (C, W, 2) bins in use
    seen_tenants: Any  # (C, T) of telemetry.TENANT_DTYPE
    seen: Any  # (C,) of telemetry.CLUSTER_DTYPE


class World(NamedTuple):
    """One cluster of `Arrays`."""

    engine: Any
    dense_ps: Any
    sequence_ps: Any
    kv_ps: Any
    itl_edges_ps: Any
    parameters: Any
    state: Any
    tenants: Any
    requests: Any
    logs: Any
    running: Any
    prefilling: Any
    heap: Any
    residues: Any
    itl: Any
    itl_window: Any
    itl_range: Any
    seen_tenants: Any
    seen: Any


Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def _outlined(function: Compiled) -> Compiled:
    """Compile a function that is called, not inlined, without reference counting.

    Nothing here allocates, and numba's counting of `World`'s arrays at every call takes more
    than half of the time.
    """
    compiled: Compiled = nb.njit(nogil=True, cache=True, _nrt=False)(function)  # type: ignore[call-overload]
    return compiled


@nb.njit(nogil=True, cache=True, inline="always")
def _world(arrays: Arrays, c: int) -> World:
    return World(
        arrays.engine[0],
        arrays.dense_ps,
        arrays.sequence_ps,
        arrays.kv_ps,
        arrays.itl_edges_ps,
        arrays.parameters,
        arrays.state[c],
        arrays.tenants[c],
        arrays.requests[c],
        arrays.logs[c],
        arrays.running[c],
        arrays.prefilling[c],
        arrays.heap[c],
        arrays.residues[c],
        arrays.itl[c],
        arrays.itl_window[c],
        arrays.itl_range[c],
        arrays.seen_tenants[c],
        arrays.seen[c],
    )


@nb.njit(nogil=True, cache=True)
def start(c: int, arrays: Arrays) -> None:
    """Begin an episode on cluster c: time 0, with what happens at that instant, is observed."""
    world = _world(arrays, c)
    state = world.state
    n_slots = world.running.shape[0]
    for slot in range(n_slots):
        world.running[slot].next = slot + 1
    world.running[n_slots - 1].next = -1
    world.residues[:] = 0
    world.itl[:] = 0
    world.itl_window[:] = 0
    for i in range(world.itl_range.shape[0]):
        world.itl_range[i, 0] = ITL_BINS
        world.itl_range[i, 1] = -1
    state.head = -1
    state.tail = -1
    state.next_expiry_ps = NEVER
    for t in range(world.tenants.shape[0]):
        world.tenants[t].queue_head = -1
        world.tenants[t].queue_tail = -1
        world.tenants[t].waiting_head = -1
        world.tenants[t].waiting_tail = -1
    _run(world, state.time_ps)
    _observe(world, np.empty(arrays.requests.shape[1], np.int64))


@nb.njit(nogil=True, cache=True)
def advance(first: int, last: int, active: Any, caps: Any, arrays: Arrays) -> None:
    """Run one control interval on the active clusters of `[first, last)`."""
    scratch = np.empty(arrays.requests.shape[1], np.int64)
    for c in range(first, last):
        if not active[c]:
            continue
        world = _world(arrays, c)
        state = world.state
        now_ps = state.time_ps
        _begin_interval(world)
        for t in range(world.tenants.shape[0]):
            world.tenants[t].cap = caps[c, t]
            world.seen_tenants[t].cap = caps[c, t]
        state.time_ps = now_ps + world.engine.interval_ps
        _run(world, now_ps)
        _observe(world, scratch)


@nb.njit(nogil=True, cache=True, inline="always")
def _begin_interval(world: World) -> None:
    state = world.state
    state.running_sum_ps = 0
    state.busy_sum_ps = 0
    state.preemptions = 0
    state.prompt_tokens = 0
    state.generation_tokens = 0
    state.itl_slot = (state.itl_slot + 1) % world.itl.shape[0]
    slot = state.itl_slot
    # what leaves the window
    for b in range(world.itl_range[slot, 0], world.itl_range[slot, 1] + 1):
        for t in range(world.tenants.shape[0]):
            world.itl_window[t, b] -= world.itl[slot, t, b]
            world.itl[slot, t, b] = 0
    world.itl_range[slot, 0] = ITL_BINS
    world.itl_range[slot, 1] = -1
    for t in range(world.tenants.shape[0]):
        world.tenants[t].in_flight_sum_ps = 0
        seen = world.seen_tenants[t]
        seen.arrived = 0.0
        seen.admitted = 0.0
        seen.completed = 0.0
        seen.good = 0.0
        seen.dropped = 0.0
        seen.failed = 0.0
        seen.prompt_tokens = 0.0
        seen.output_tokens = 0.0


@_outlined
def _run(world: World, now_ps: int) -> None:
    """Go on from an instant up to the cluster's time."""
    state = world.state
    until_ps = state.time_ps
    for t in range(world.tenants.shape[0]):
        _send_queued(world, t, now_ps)  # caps may have risen
    while True:
        ends = False
        due_ps = now_ps
        if state.stepping != 0:
            if state.decode_only != 0:
                _jump(world, until_ps)
            ends = state.step_end_ps <= until_ps
            now_ps = state.step_end_ps if ends else until_ps
            due_ps = now_ps - 1 if ends else until_ps
        while True:
            _gate(world, due_ps)
            if not ends or due_ps == now_ps:
                break
            _finish_step(world, now_ps)
            due_ps = now_ps
        _take_ready(world, now_ps)
        if state.stepping != 0 and not ends:
            break
        if state.n_running + state.n_waiting > 0:
            if state.stepping == 0:
                state.busy_since_ps = now_ps
            _schedule(world, now_ps)
            continue
        state.stepping = 0
        if now_ps == until_ps:
            break
        now_ps = until_ps
        if state.n_ready < state.n_sent:
            now_ps = min(now_ps, world.requests[world.logs[state.n_ready].sent].ready_ps)
        now_ps = min(now_ps, _next_arrival_ps(world))


@nb.njit(nogil=True, cache=True, inline="always")
def _next_arrival_ps(world: World) -> int:
    state = world.state
    if state.next_arrival >= state.n_requests:
        return NEVER
    arrival_ps: int = world.requests[world.logs[state.next_arrival].arrival].arrival_ps
    return arrival_ps


# --- gate and API server ------------------------------------------------------------------


@nb.njit(nogil=True, cache=True, inline="always")
def _gate(world: World, until_ps: int) -> None:
    """All arrivals and expiries up to an instant, in order of time."""
    state = world.state
    while True:
        arrival_ps = _next_arrival_ps(world)
        if min(arrival_ps, state.next_expiry_ps) > until_ps:
            return
        if arrival_ps <= state.next_expiry_ps:
            request = world.logs[state.next_arrival].arrival
            state.next_arrival += 1
            _arrive(world, request, arrival_ps)
        else:
            _expire(world)


@nb.njit(nogil=True, cache=True, inline="always")
def _arrive(world: World, request: int, now_ps: int) -> None:
    t = world.requests[request].tenant
    tenant = world.tenants[t]
    seen = world.seen_tenants[t]
    seen.arrived += 1.0
    seen.arrived_total += 1.0
    if tenant.in_flight < tenant.cap and tenant.n_queued == 0:
        _send(world, request, t, now_ps)
    elif tenant.n_queued >= world.parameters[t].queue_limit:
        _drop(world, request, t, now_ps)
    else:
        world.requests[request].outcome = QUEUED
        world.requests[request].next = -1
        if tenant.n_queued == 0:
            tenant.queue_head = request
            expiry_ps = now_ps + tenant.patience_ps
            if expiry_ps < world.state.next_expiry_ps:
                world.state.next_expiry_ps = expiry_ps
        else:
            world.requests[tenant.queue_tail].next = request
        tenant.queue_tail = request
        tenant.n_queued += 1


@nb.njit(nogil=True, cache=True, inline="always")
def _expire(world: World) -> None:
    """Drop the request whose patience ends first, and find the next such instant."""
    expiry_ps = NEVER
    chosen = -1
    for t in range(world.tenants.shape[0]):
        if world.tenants[t].n_queued > 0:
            head = world.tenants[t].queue_head
            at_ps = world.requests[head].arrival_ps + world.tenants[t].patience_ps
            if at_ps < expiry_ps:
                expiry_ps = at_ps
                chosen = t
    if chosen >= 0 and expiry_ps <= world.state.next_expiry_ps:
        tenant = world.tenants[chosen]
        head = tenant.queue_head
        tenant.queue_head = world.requests[head].next
        tenant.n_queued -= 1
        _drop(world, head, chosen, expiry_ps)
    else:
        world.state.next_expiry_ps = expiry_ps  # it was sent or dropped before


@nb.njit(nogil=True, cache=True, inline="always")
def _drop(world: World, request: int, t: int, now_ps: int) -> None:
    world.requests[request].outcome = DROPPED
    world.requests[request].finished_ps = now_ps
    world.seen_tenants[t].dropped += 1.0
    world.seen_tenants[t].dropped_total += 1.0


@nb.njit(nogil=True, cache=True, inline="always")
def _send_queued(world: World, t: int, now_ps: int) -> None:
    tenant = world.tenants[t]
    while tenant.n_queued > 0 and tenant.in_flight < tenant.cap:
        request = tenant.queue_head
        tenant.queue_head = world.requests[request].next
        tenant.n_queued -= 1
        _send(world, request, t, now_ps)


@nb.njit(nogil=True, cache=True, inline="always")
def _send(world: World, request: int, t: int, now_ps: int) -> None:
    """Send a request to the server, which may refuse it: too long (400), or too many (503)."""
    engine = world.engine
    state = world.state
    r = world.requests[request]
    seen = world.seen_tenants[t]
    r.sent_ps = now_ps
    seen.admitted += 1.0
    seen.prompt_tokens += r.prompt
    longest = r.prompt + r.output - 1
    if (
        longest + 1 > engine.max_model_len
        or _blocks(longest, engine.block_size) > engine.num_gpu_blocks
        or state.in_flight + 1 > engine.max_num_queued_reqs
    ):
        r.outcome = FAILED
        r.finished_ps = now_ps
        seen.failed += 1.0
        seen.failed_total += 1.0
        return
    r.outcome = IN_FLIGHT
    tenant = world.tenants[t]
    tenant.in_flight_sum_ps += tenant.in_flight * (now_ps - tenant.in_flight_since_ps)
    tenant.in_flight_since_ps = now_ps
    tenant.in_flight += 1
    state.in_flight += 1
    state.api_free_ps = (
        max(state.api_free_ps, now_ps) + engine.request_ps + engine.prompt_token_ps * r.prompt
    )
    r.ready_ps = state.api_free_ps + engine.delay_ps
    r.order = state.n_sent
    world.logs[state.n_sent].sent = request
    state.n_sent += 1


@nb.njit(nogil=True, cache=True, inline="always")
def _take_ready(world: World, now_ps: int) -> None:
    state = world.state
    while state.n_ready < state.n_sent:
        request = world.logs[state.n_ready].sent
        r = world.requests[request]
        if r.ready_ps > now_ps:
            return
        state.n_ready += 1
        # one queue under FCFS, one for each tenant (all of one priority) else
        queue = world.tenants[r.tenant if world.engine.priority_scheduling != 0 else 0]
        r.next = -1
        if queue.waiting_head < 0:
            queue.waiting_head = request
        else:
            world.requests[queue.waiting_tail].next = request
        queue.waiting_tail = request
        state.n_waiting += 1
        state.untried = 1


@nb.njit(nogil=True, cache=True, inline="always")
def _first_waiting_queue(world: World) -> int:
    """The queue whose head is next: lowest priority value, then the earliest, as vLLM's heap."""
    if world.engine.priority_scheduling == 0:
        return 0
    chosen = -1
    for t in range(world.tenants.shape[0]):
        head = world.tenants[t].waiting_head
        if head < 0:
            continue
        if chosen >= 0:
            best = world.requests[world.tenants[chosen].waiting_head]
            priority, best_priority = (
                world.parameters[t].priority,
                world.parameters[chosen].priority,
            )
            r = world.requests[head]
            if priority > best_priority or (
                priority == best_priority
                and (
                    r.ready_ps > best.ready_ps
                    or (r.ready_ps == best.ready_ps and r.order > best.order)
                )
            ):
                continue
        chosen = t
    return chosen


# --- scheduling ---------------------------------------------------------------------------


@nb.njit(nogil=True, cache=True, inline="always")
def _blocks(tokens: int, block_size: int) -> int:
    return (tokens + block_size - 1) // block_size


@nb.njit(nogil=True, cache=True, inline="always")
def _schedule(world: World, now_ps: int) -> None:
    """Schedule the step that begins now."""
    engine = world.engine
    state = world.state
    running = world.running
    state.running_sum_ps += state.n_running * (now_ps - state.running_since_ps)
    state.running_since_ps = now_ps
    state.untried = 0
    while True:
        threshold = engine.max_num_batched_tokens
        if engine.long_prefill_token_threshold > 0 and state.n_running + state.n_waiting > 1:
            threshold = min(threshold, engine.long_prefill_token_threshold)
        n = state.n_decoding
        budget = engine.max_num_batched_tokens - n
        free = engine.num_gpu_blocks - state.used_blocks
        free -= world.residues[-state.counter % engine.block_size]
        kv_tokens = state.kv_tokens + n
        prefill_tokens = 0
        pairs = 0
        fits = free >= 0
        for i in range(state.n_prefilling):
            slot = world.prefilling[i]
            chunk = min(running[slot].remaining, threshold)
            if chunk > budget:
                # Cut without harm only where nothing that runs comes after it.
                fits = fits and slot == state.tail
                chunk = budget
            computed = running[slot].base
            free -= _blocks(computed + chunk, engine.block_size) - _blocks(
                computed, engine.block_size
            )
            running[slot].chunk = chunk
            budget -= chunk
            prefill_tokens += chunk
            pairs += chunk * (2 * computed + chunk + 1)
            fits = fits and free >= 0
        preempted = False
        by_sequence = not fits
        if by_sequence:
            n, kv_tokens, prefill_tokens, pairs, budget, free, preempted = _schedule_by_sequence(
                world, threshold, now_ps
            )
        if not preempted:
            while budget > 0 and state.n_waiting > 0 and state.n_running < engine.max_num_seqs:
                queue = world.tenants[_first_waiting_queue(world)]
                request = queue.waiting_head
                r = world.requests[request]
                tokens = r.prompt + r.generated
                chunk = min(min(tokens, threshold), budget)
                needed = _blocks(chunk, engine.block_size)
                if needed > free or (
                    engine.reserve_full_isl != 0 and _blocks(tokens, engine.block_size) > free
                ):
                    break
                queue.waiting_head = r.next
                state.n_waiting -= 1
                free -= needed
                budget -= chunk
                prefill_tokens += chunk
                pairs += chunk * (chunk + 1)
                if r.scheduled_ps < 0:
                    r.scheduled_ps = now_ps
                _append_running(world, request, tokens, chunk)
        state.used_blocks = engine.num_gpu_blocks - free
        if n + prefill_tokens > 0:
            break
    state.stepping = 1
    state.by_sequence = by_sequence
    state.decode_only = prefill_tokens == 0 and not by_sequence and state.n_stalled == 0
    state.n_step_decodes = n
    state.step_start_ps = now_ps
    state.step_end_ps = (
        now_ps
        + world.dense_ps[prefill_tokens + n]
        + world.sequence_ps[n]
        + world.kv_ps[n] * kv_tokens
        + engine.prefill_pair_fs * pairs // 1000
    )


@nb.njit(nogil=True, cache=True, inline="always")
def _append_running(world: World, request: int, tokens: int, chunk: int) -> None:
    state = world.state
    slot = state.free_slot
    entry = world.running[slot]
    state.free_slot = entry.next
    entry.base = 0
    entry.remaining = tokens
    entry.chunk = chunk
    entry.decoding = 0
    entry.last_token_ps = -1
    entry.request = request
    entry.tenant = world.requests[request].tenant
    entry.order = state.next_order
    state.next_order += 1
    entry.previous = state.tail
    entry.next = -1
    if state.tail < 0:
        state.head = slot
    else:
        world.running[state.tail].next = slot
    state.tail = slot
    world.prefilling[state.n_prefilling] = slot
    state.n_prefilling += 1
    state.n_running += 1


@nb.njit(nogil=True, cache=True, inline="always")
def _remove_running(world: World, slot: int) -> None:
    state = world.state
    entry = world.running[slot]
    if entry.previous < 0:
        state.head = entry.next
    else:
        world.running[entry.previous].next = entry.next
    if entry.next < 0:
        state.tail = entry.previous
    else:
        world.running[entry.next].previous = entry.previous
    entry.next = state.free_slot
    state.free_slot = slot
    state.n_running -= 1


@_outlined
def _schedule_by_sequence(
    world: World, threshold: int, now_ps: int
) -> tuple[int, int, int, int, int, int, bool]:
    """Schedule RUNNING one sequence after another, preempting where blocks run out.

    Returns decoding sequences, their context, prefill tokens and pairs, what is left of the
    budget and of the blocks, and whether anything was preempted.
    """
    engine = world.engine
    state = world.state
    running = world.running
    counter = state.counter
    budget = engine.max_num_batched_tokens
    free = engine.num_gpu_blocks - state.used_blocks
    slot = state.head
    while slot >= 0:
        running[slot].chunk = 0
        slot = running[slot].next
    preempted = False
    slot = state.head
    while slot >= 0 and budget > 0:
        entry = running[slot]
        computed = entry.base + counter if entry.decoding != 0 else entry.base
        chunk = 1 if entry.decoding != 0 else min(min(entry.remaining, threshold), budget)
        needed = _blocks(computed + chunk, engine.block_size) - _blocks(computed, engine.block_size)
        stop = False
        while needed > free:
            victim = state.tail
            if engine.priority_scheduling != 0:
                victim = _lowest_priority(world)
            budget += running[victim].chunk
            free += _preempt(world, victim, now_ps)
            preempted = True
            if victim == slot:
                stop = True
                break
        if stop:
            break
        entry.chunk = chunk
        free -= needed
        budget -= chunk
        slot = entry.next
    n = 0
    kv_tokens = 0
    prefill_tokens = 0
    pairs = 0
    state.n_prefilling = 0
    world.residues[:] = 0
    n_heap = 0
    takes_place = budget < engine.max_num_batched_tokens
    slot = state.head
    while slot >= 0:
        entry = running[slot]
        chunk = entry.chunk
        if entry.decoding != 0:
            if chunk > 0:
                n += 1
                kv_tokens += entry.base + counter + 1
            elif takes_place:
                # Left out: it stays where it is while the counter goes on.
                entry.base -= 1
                entry.finish += 1
                if entry.last_token_ps < 0:
                    entry.last_token_ps = now_ps
                    state.n_stalled += 1
                    world.tenants[entry.tenant].n_stalled += 1
            world.residues[entry.base % engine.block_size] += 1
            world.heap[n_heap].key = entry.finish << 32 | entry.order
            world.heap[n_heap].slot = slot
            n_heap += 1
        else:
            world.prefilling[state.n_prefilling] = slot
            state.n_prefilling += 1
            prefill_tokens += chunk
            pairs += chunk * (2 * entry.base + chunk + 1)
        slot = entry.next
    for i in range(n_heap // 2 - 1, -1, -1):
        _sift_down(world.heap, i, n_heap)
    return n, kv_tokens, prefill_tokens, pairs, budget, free, preempted


@nb.njit(nogil=True, cache=True, inline="always")
def _lowest_priority(world: World) -> int:
    """The running sequence that goes first: highest priority value, then the latest arrival."""
    slot: int = world.state.head
    victim = slot
    while slot >= 0:
        entry, worst = world.running[slot], world.running[victim]
        priority = world.parameters[entry.tenant].priority
        worst_priority = world.parameters[worst.tenant].priority
        if priority > worst_priority or (
            priority == worst_priority
            and world.requests[entry.request].ready_ps > world.requests[worst.request].ready_ps
        ):
            victim = slot
        slot = entry.next
    return victim


@_outlined
def _preempt(world: World, slot: int, now_ps: int) -> int:
    """Put a running sequence back into WAITING; returns the blocks that it frees."""
    engine = world.engine
    state = world.state
    entry = world.running[slot]
    r = world.requests[entry.request]
    computed = entry.base
    if entry.decoding != 0:
        computed += state.counter
        r.generated = r.output - (entry.finish - state.counter)
        r.last_token_ps = now_ps if entry.last_token_ps < 0 else entry.last_token_ps
        state.n_decoding -= 1
        state.kv_tokens -= computed
        tenant = world.tenants[entry.tenant]
        tenant.n_decoding -= 1
        if entry.last_token_ps >= 0:
            state.n_stalled -= 1
            tenant.n_stalled -= 1
    freed = _blocks(computed + entry.chunk, engine.block_size)
    r.preemptions += 1
    state.preemptions += 1
    _remove_running(world, slot)
    state.n_waiting += 1
    queue = world.tenants[entry.tenant if engine.priority_scheduling != 0 else 0]
    before = -1
    if engine.priority_scheduling != 0:
        after = queue.waiting_head
        while after >= 0 and world.requests[after].order < r.order:
            before = after
            after = world.requests[after].next
    if before < 0:
        r.next = queue.waiting_head
        if queue.waiting_head < 0:
            queue.waiting_tail = entry.request
        queue.waiting_head = entry.request
    else:
        r.next = world.requests[before].next
        world.requests[before].next = entry.request
        if r.next < 0:
            queue.waiting_tail = entry.request
    return freed


# --- outputs ------------------------------------------------------------------------------


@nb.njit(nogil=True, cache=True, inline="always")
def _finish_step(world: World, now_ps: int) -> None:
    engine = world.engine
    state = world.state
    running = world.running
    counter = state.counter + 1
    state.counter = counter
    state.busy_sum_ps += now_ps - state.busy_since_ps
    state.busy_since_ps = now_ps
    n = state.n_step_decodes
    state.kv_tokens += n
    state.generation_tokens += n
    if state.by_sequence != 0 or state.n_stalled != 0:
        _emit_by_sequence(world, now_ps)
    elif n > 0:
        _add_gaps(
            world.state,
            world.tenants,
            world.itl_edges_ps,
            world.itl,
            world.itl_range,
            now_ps - state.step_start_ps,
            0,
            1,
        )
    kept = 0
    for i in range(state.n_prefilling):
        slot = world.prefilling[i]
        entry = running[slot]
        entry.base += entry.chunk
        entry.remaining -= entry.chunk
        if entry.remaining > 0:
            world.prefilling[kept] = slot
            kept += 1
            continue
        r = world.requests[entry.request]
        tenant = world.tenants[entry.tenant]
        if r.first_token_ps < 0:
            r.first_token_ps = now_ps
            world.logs[tenant.first_request + tenant.n_first].first = entry.request
            tenant.n_first += 1
            state.prompt_tokens += r.prompt
        else:
            _add_gap(world, entry.tenant, now_ps - r.last_token_ps)
        state.generation_tokens += 1
        computed = entry.base
        entry.decoding = 1
        entry.base = computed - counter
        entry.finish = counter + r.output - r.generated - 1
        entry.last_token_ps = -1
        state.kv_tokens += computed
        world.residues[entry.base % engine.block_size] += 1
        world.heap[state.n_decoding].key = entry.finish << 32 | entry.order
        world.heap[state.n_decoding].slot = slot
        _sift_up(world.heap, state.n_decoding)
        state.n_decoding += 1
        tenant.n_decoding += 1
    state.n_prefilling = kept
    if state.n_decoding > 0 and world.heap[0].key >> 32 == counter:
        state.running_sum_ps += state.n_running * (now_ps - state.running_since_ps)
        state.running_since_ps = now_ps
        while state.n_decoding > 0 and world.heap[0].key >> 32 == counter:
            _complete(world, now_ps)


@nb.njit(nogil=True, cache=True, inline="always")
def _complete(world: World, now_ps: int) -> None:
    """Complete the sequence at the top of the heap, and send what its tenant's gate holds."""
    engine = world.engine
    state = world.state
    slot = world.heap[0].slot
    state.n_decoding -= 1
    last = state.n_decoding
    world.heap[0].key = world.heap[last].key
    world.heap[0].slot = world.heap[last].slot
    _sift_down(world.heap, 0, last)
    entry = world.running[slot]
    t = entry.tenant
    computed = entry.base + state.counter
    state.kv_tokens -= computed
    state.used_blocks -= _blocks(computed, engine.block_size)
    world.residues[entry.base % engine.block_size] -= 1
    _remove_running(world, slot)

    r = world.requests[entry.request]
    r.outcome = COMPLETED
    r.finished_ps = now_ps
    tenant = world.tenants[t]
    tenant.n_decoding -= 1
    world.logs[tenant.first_request + tenant.n_done].done = entry.request
    tenant.n_done += 1
    tenant.in_flight_sum_ps += tenant.in_flight * (now_ps - tenant.in_flight_since_ps)
    tenant.in_flight_since_ps = now_ps
    tenant.in_flight -= 1
    state.in_flight -= 1
    seen = world.seen_tenants[t]
    seen.completed += 1.0
    seen.completed_total += 1.0
    seen.output_tokens += r.output
    slo = world.parameters[t]
    if (
        now_ps - r.arrival_ps <= slo.slo_latency_ps
        and r.first_token_ps - r.arrival_ps <= slo.slo_ttft_ps
        and (
            r.output == 1
            or slo.slo_itl_ps == NEVER
            or now_ps - r.first_token_ps <= slo.slo_itl_ps * (r.output - 1)
        )
    ):
        seen.good += 1.0
    _send_queued(world, t, now_ps)


@_outlined
def _emit_by_sequence(world: World, now_ps: int) -> None:
    """The tokens of a step in which some sequences were left out or had been before."""
    state = world.state
    gap_ps = now_ps - state.step_start_ps
    slot = state.head
    while slot >= 0:
        entry = world.running[slot]
        if entry.decoding != 0 and (state.by_sequence == 0 or entry.chunk > 0):
            if entry.last_token_ps < 0:
                _add_gap(world, entry.tenant, gap_ps)
            else:
                _add_gap(world, entry.tenant, now_ps - entry.last_token_ps)
                entry.last_token_ps = -1
                state.n_stalled -= 1
                world.tenants[entry.tenant].n_stalled -= 1
        slot = entry.next


@nb.njit(nogil=True, cache=True, inline="always")
def _jump(world: World, until_ps: int) -> None:
    """Go over the steps of a constant batch at whose ends nothing can happen.

    The step in progress has only decodes and takes d, the next ones d + x, d + 2x, ...: j of
    them take `j d + x j (j - 1) / 2`.
    """
    engine = world.engine
    state = world.state
    n = state.n_decoding
    # the last of these leaves the step of the first completion in progress
    most = (world.heap[0].key >> 32) - state.counter - 1
    if most <= 0 or state.untried != 0:
        return
    limit_ps = until_ps
    if state.n_waiting == 0 or engine.priority_scheduling != 0:
        # A request that becomes ready may be scheduled at the next boundary. (Where one waits
        # already, under FCFS, only a completion can let it in.)
        if state.n_ready < state.n_sent:
            ready_ps = world.requests[world.logs[state.n_ready].sent].ready_ps
            limit_ps = min(limit_ps, ready_ps - 1)
        ready_ps = _next_arrival_ps(world) + engine.request_ps + engine.delay_ps
        limit_ps = min(limit_ps, ready_ps - 1)
    within_ps = limit_ps - state.step_start_ps
    first_ps = state.step_end_ps - state.step_start_ps
    if within_ps < first_ps:
        return
    growth_ps = world.kv_ps[n] * n
    j = _steps_within(first_ps, growth_ps, within_ps, most)
    free = engine.num_gpu_blocks - state.used_blocks
    new_blocks = j // engine.block_size * n
    if free < new_blocks + n:  # else they are there
        j, new_blocks = _steps_with_blocks(world, j, free)
        if j == 0:
            return
    else:
        residue = -state.counter % engine.block_size
        for _ in range(j % engine.block_size):
            residue = residue - 1 if residue > 0 else engine.block_size - 1
            new_blocks += world.residues[residue]
    state.used_blocks += new_blocks
    state.counter += j
    state.kv_tokens += n * j
    state.generation_tokens += n * j
    _add_gaps(
        world.state,
        world.tenants,
        world.itl_edges_ps,
        world.itl,
        world.itl_range,
        first_ps,
        growth_ps,
        j,
    )
    state.step_start_ps += j * first_ps + growth_ps * (j * (j - 1) // 2)
    state.step_end_ps = state.step_start_ps + first_ps + growth_ps * j
    state.busy_sum_ps += state.step_start_ps - state.busy_since_ps
    state.busy_since_ps = state.step_start_ps


@nb.njit(nogil=True, cache=True, inline="always")
def _steps_within(first_ps: int, growth_ps: int, within_ps: int, most: int) -> int:
    """The most steps, up to `most`, that end within a time."""
    if most * first_ps + growth_ps * (most * (most - 1) // 2) <= within_ps:
        return most
    # the root of a quadratic, in the form without cancellation; then exact in integers
    b = first_ps - 0.5 * growth_ps
    j = int(2.0 * within_ps / (b + math.sqrt(b * b + 2.0 * growth_ps * within_ps)))
    while j > 0 and j * first_ps + growth_ps * (j * (j - 1) // 2) > within_ps:
        j -= 1
    while (j + 1) * first_ps + growth_ps * (j * (j + 1) // 2) <= within_ps:
        j += 1
    return j


@_outlined
def _steps_with_blocks(world: World, most: int, free: int) -> tuple[int, int]:
    """The most steps, up to `most`, for which the blocks last, and the blocks that they take."""
    new_blocks = 0
    for i in range(1, most + 1):
        needed = world.residues[-(world.state.counter + i) % world.engine.block_size]
        if new_blocks + needed > free:
            return i - 1, new_blocks
        new_blocks += needed
    return most, new_blocks


# --- inter-token latencies ----------------------------------------------------------------


@nb.njit(nogil=True, cache=True, inline="always")
def _bin(edges_ps: Any, gap_ps: int) -> int:
    guess = int(ITL_BINS_PER_OCTAVE * math.log2(max(gap_ps, 1) / ITL_FIRST_EDGE_PS))
    b = min(max(guess, 0), ITL_BINS - 1)
    # The logarithm may round across an edge.
    while b > 0 and gap_ps < edges_ps[b]:
        b -= 1
    while b < ITL_BINS - 1 and gap_ps >= edges_ps[b + 1]:
        b += 1
    return b


@nb.njit(nogil=True, cache=True, inline="always")
def _use_bin(itl_range: Any, slot: int, b: int) -> None:
    if b < itl_range[slot, 0]:
        itl_range[slot, 0] = b
    if b > itl_range[slot, 1]:
        itl_range[slot, 1] = b


@_outlined
def _add_gap(world: World, t: int, gap_ps: int) -> None:
    slot = world.state.itl_slot
    b = _bin(world.itl_edges_ps, gap_ps)
    _use_bin(world.itl_range, slot, b)
    world.itl[slot, t, b] += 1


@_outlined
def _add_gaps(
    state: Any,
    tenants: Any,
    edges_ps: Any,
    itl: Any,
    itl_range: Any,
    first_ps: int,
    growth_ps: int,
    steps: int,
) -> None:
    """Every decoding sequence's gaps of some steps that take first, first + growth, ..."""
    slot = state.itl_slot
    b = _bin(edges_ps, first_ps)
    while steps > 0:
        _use_bin(itl_range, slot, b)
        inside = steps
        last_ps = first_ps + growth_ps * (steps - 1)
        if b < ITL_BINS - 1 and last_ps >= edges_ps[b + 1]:
            inside = -((first_ps - edges_ps[b + 1]) // growth_ps)
        for t in range(tenants.shape[0]):
            itl[slot, t, b] += tenants[t].n_decoding * inside
        first_ps += growth_ps * inside
        steps -= inside
        b += 1


# --- the heap of completions --------------------------------------------------------------


@nb.njit(nogil=True, cache=True, inline="always")
def _sift_up(heap: Any, i: int) -> None:
    key, slot = heap[i].key, heap[i].slot
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent].key <= key:
            break
        heap[i].key = heap[parent].key
        heap[i].slot = heap[parent].slot
        i = parent
    heap[i].key = key
    heap[i].slot = slot


@nb.njit(nogil=True, cache=True, inline="always")
def _sift_down(heap: Any, i: int, n: int) -> None:
    if n == 0:
        return
    key, slot = heap[i].key, heap[i].slot
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1].key < heap[child].key:
            child += 1
        if heap[child].key >= key:
            break
        heap[i].key = heap[child].key
        heap[i].slot = heap[child].slot
        i = child
    heap[i].key = key
    heap[i].slot = slot


# --- telemetry ----------------------------------------------------------------------------


@nb.njit(nogil=True, cache=True)
def _observe(world: World, scratch: Any) -> None:
    engine = world.engine
    state = world.state
    now_ps = state.time_ps
    oldest_ps = now_ps - engine.window_ps
    interval_ps = engine.interval_ps
    seen = world.seen
    first_bin = ITL_BINS
    last_bin = -1
    current = state.itl_slot
    for b in range(world.itl_range[current, 0], world.itl_range[current, 1] + 1):
        for t in range(world.tenants.shape[0]):
            world.itl_window[t, b] += world.itl[current, t, b]
    for i in range(world.itl_range.shape[0]):
        first_bin = min(first_bin, world.itl_range[i, 0])
        last_bin = max(last_bin, world.itl_range[i, 1])
    n_all = 0
    for t in range(world.tenants.shape[0]):
        tenant = world.tenants[t]
        mine = world.seen_tenants[t]
        mine.queued = tenant.n_queued
        mine.in_flight = tenant.in_flight
        tenant.in_flight_sum_ps += tenant.in_flight * (now_ps - tenant.in_flight_since_ps)
        tenant.in_flight_since_ps = now_ps
        mine.mean_in_flight = tenant.in_flight_sum_ps / interval_ps
        base = tenant.first_request

        head = tenant.window_first
        while (
            head < tenant.n_first
            and world.requests[world.logs[base + head].first].first_token_ps <= oldest_ps
        ):
            head += 1
        tenant.window_first = head
        n = tenant.n_first - head
        if n > 0:
            ttft = scratch[n_all : n_all + n]
            for i in range(n):
                r = world.requests[world.logs[base + head + i].first]
                ttft[i] = r.first_token_ps - r.arrival_ps
            sort(ttft)
            mine.ttft_p50_s = ttft[rank(0.50, n)] / PS
            mine.ttft_p95_s = ttft[rank(0.95, n)] / PS
            mine.ttft_p99_s = ttft[rank(0.99, n)] / PS

        head = tenant.window_done
        while (
            head < tenant.n_done
            and world.requests[world.logs[base + head].done].finished_ps <= oldest_ps
        ):
            head += 1
        tenant.window_done = head
        n = tenant.n_done - head
        mine.window_completions = n
        if n > 0:
            latency = scratch[n_all : n_all + n]
            for i in range(n):
                r = world.requests[world.logs[base + head + i].done]
                latency[i] = r.finished_ps - r.arrival_ps
            sort(latency)
            mine.latency_p50_s = latency[rank(0.50, n)] / PS
            mine.latency_p95_s = latency[rank(0.95, n)] / PS
            mine.latency_p99_s = latency[rank(0.99, n)] / PS
            n_all += n

        n_gaps = 0
        for b in range(first_bin, last_bin + 1):
            n_gaps += world.itl_window[t, b]
        if n_gaps > 0:
            below = 0
            p50, p95, p99 = rank(0.50, n_gaps), rank(0.95, n_gaps), rank(0.99, n_gaps)
            for b in range(first_bin, last_bin + 1):
                count = world.itl_window[t, b]
                if count == 0:
                    continue
                upto = below + count
                if below <= p50 < upto:
                    mine.itl_p50_s = _bin_middle_s(world.itl_edges_ps, b)
                if below <= p95 < upto:
                    mine.itl_p95_s = _bin_middle_s(world.itl_edges_ps, b)
                if below <= p99 < upto:
                    mine.itl_p99_s = _bin_middle_s(world.itl_edges_ps, b)
                below = upto

    state.running_sum_ps += state.n_running * (now_ps - state.running_since_ps)
    state.running_since_ps = now_ps
    if state.stepping != 0:
        state.busy_sum_ps += now_ps - state.busy_since_ps
        state.busy_since_ps = now_ps
    seen.time_s = now_ps / PS
    seen.num_requests_running = state.n_running
    seen.num_requests_waiting = state.n_waiting
    seen.kv_cache_usage = state.used_blocks / engine.num_gpu_blocks
    seen.preemptions = state.preemptions
    seen.prompt_tokens = state.prompt_tokens
    seen.generation_tokens = state.generation_tokens
    seen.mean_running = state.running_sum_ps / interval_ps
    seen.energy_j = (
        engine.idle_w * (interval_ps - state.busy_sum_ps) + engine.busy_w * state.busy_sum_ps
    ) / PS
    seen.window_completions = n_all
    if n_all > 0:
        everyone = scratch[:n_all]
        sort(everyone)
        seen.latency_p50_s = everyone[rank(0.50, n_all)] / PS
        seen.latency_p95_s = everyone[rank(0.95, n_all)] / PS
        seen.latency_p99_s = everyone[rank(0.99, n_all)] / PS


@nb.njit(nogil=True, cache=True, inline="always")
def _bin_middle_s(edges_ps: Any, b: int) -> float:
    return math.sqrt(float(edges_ps[b]) * float(edges_ps[b + 1])) / PS
