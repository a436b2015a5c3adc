"""The load of one live episode: an open loop through the tenants' gates, and what it measures."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.live.client import Completion, OnTokens, completion_body
from vllm_tenant_tuning.backends.live.gate import Gate
from vllm_tenant_tuning.backends.live.records import RecordFile, request_record
from vllm_tenant_tuning.scenario import Scenario, Tenant
from vllm_tenant_tuning.telemetry import TENANT_DTYPE
from vllm_tenant_tuning.workload import RequestStream

FloatArray = npt.NDArray[np.float64]

QUANTILES = (0.50, 0.95, 0.99)
LAG_PERIOD_S = 0.02
LATENESS_LIMIT_S = 0.02
"""Above this 99th percentile of the sends' lateness a run is labelled invalid."""


class Sender(Protocol):
    """What sends a request and fills in its completion: a client, or a pool of them."""

    async def complete(
        self, body: bytes, completion: Completion, on_tokens: OnTokens | None = None
    ) -> None:
        """Send one completion (see `CompletionClient.complete`)."""

    def take_lags(self) -> list[float]:
        """How late the event loops of its own processes woke up, since the last call; seconds."""


class Prompts:
    """Random prompts, other ones in every episode, so that no prefix is met again.

    Args:
        salt: of the episode; the same salt gives the same prompts.
        low, high: token ids are drawn from `[low, high)`.
    """

    def __init__(self, salt: int, low: int, high: int) -> None:
        self._salt, self._low, self._high = salt, low, high

    def tokens(self, request: int, n_tokens: int) -> list[int]:
        """The token ids of a request's prompt."""
        rng = np.random.default_rng((self._salt, request))
        tokens: list[int] = rng.integers(self._low, self._high, n_tokens).tolist()
        return tokens


class TenantLoad:
    """One tenant's gate, counts and sliding windows.

    Args:
        tenant: the scenario's.
        gate: the tenant's.
    """

    def __init__(self, tenant: Tenant, gate: Gate) -> None:
        self.tenant = tenant
        self.gate = gate
        self.counts = dict.fromkeys(
            (
                "arrived",
                "admitted",
                "completed",
                "good",
                "dropped",
                "failed",
                "prompt_tokens",
                "output_tokens",
            ),
            0,
        )
        self.latencies: deque[tuple[float, float]] = deque()  # finished at, latency
        self.ttfts: deque[tuple[float, float]] = deque()  # first token at, TTFT
        self.itl_at, self.itl = array("d"), array("d")
        self._before = dict(self.counts)
        self._request_s = 0.0
        self._observed_s = 0.0
        self._row = np.zeros((), TENANT_DTYPE)
        for name in TENANT_DTYPE.names or ():
            if name.startswith(("latency_", "ttft_", "itl_")):
                self._row[name] = math.nan

    def begin(self, start_s: float) -> None:
        """Let the first interval begin at `start_s`."""
        self._observed_s = start_s

    def note_tokens(self, now_s: float, before_s: float, tokens: int, arrival_s: float) -> None:
        """Take a chunk of tokens of one request.

        The tokens of a chunk come together: its first has waited since the chunk before, the
        others have not.
        """
        zeros = tokens - 1
        if before_s != before_s:
            self.ttfts.append((now_s, now_s - arrival_s))
        else:
            self.itl_at.append(now_s)
            self.itl.append(now_s - before_s)
        if zeros:
            self.itl_at.extend([now_s] * zeros)
            self.itl.extend([0.0] * zeros)

    def observe(self, now_s: float, window_s: float) -> npt.NDArray[np.void]:
        """What the interval that ends at `now_s` showed: a record of `TENANT_DTYPE`."""
        row, gate = self._row, self.gate
        row["cap"], row["queued"] = gate.cap, gate.queued
        # not the gate's: that learns of an end one turn of the event loop later
        ended = self.counts["completed"] + self.counts["failed"]
        row["in_flight"] = self.counts["admitted"] - ended
        for name, count in self.counts.items():
            row[name] = count - self._before[name]
        for name in ("arrived", "completed", "dropped", "failed"):
            row[f"{name}_total"] = self.counts[name]
        self._before = dict(self.counts)
        request_s, elapsed_s = gate.in_flight_request_s, now_s - self._observed_s
        row["mean_in_flight"] = (
            (request_s - self._request_s) / elapsed_s if elapsed_s > 0 else gate.in_flight
        )
        self._request_s, self._observed_s = request_s, now_s

        since_s = now_s - window_s
        for window in (self.latencies, self.ttfts):
            while window and window[0][0] <= since_s:
                window.popleft()
        first = int(np.searchsorted(np.array(self.itl_at), since_s, side="right"))
        del self.itl_at[:first], self.itl[:first]
        row["window_completions"] = len(self.latencies)
        for name, values in (
            ("latency", np.array([latency for _, latency in self.latencies])),
            ("ttft", np.array([ttft for _, ttft in self.ttfts])),
            ("itl", np.array(self.itl)),
        ):
            write_percentiles(row, name, values)
        return row.copy()


class Load:
    """Plays a request stream against a server and measures it. Made and used in an event loop.

    Args:
        scenario: the task.
        stream: the episode's requests.
        caps: (n_tenants,) to start with.
        sender: sends the requests.
        model: the served model's name.
        prompts: gives the token ids.
        records: takes a record of every request as it ends.

    Attributes:
        last_token_s: when the last token of any request came; -inf before the first.
        heard_s: when the server last answered a request, be it with an error; likewise.
        quiet_since_s: when something was last heard of the requests in flight, or the first of
            them sent; inf while none is in flight.
        failures: requests refused or failed since the last token.
        failing_since_s: when the first of those failed; inf without one.
        last_error: of the last request that failed.
        generated_tokens: received since the start of the episode.
    """

    def __init__(
        self,
        scenario: Scenario,
        stream: RequestStream,
        caps: Iterable[int],
        sender: Sender,
        model: str,
        prompts: Prompts,
        records: RecordFile,
    ) -> None:
        self._scenario = scenario
        self._stream = stream
        self._sender = sender
        self._model = model
        self._prompts = prompts
        self._records = records
        self._start_s = math.inf
        self._loop = asyncio.get_running_loop()
        self._by_priority = getattr(scenario.engine, "scheduling_policy", "fcfs") == "priority"
        self._tenant_of = stream.tenant
        self._order = np.argsort(stream.arrival_s, kind="stable")
        self._due_s = np.sort(stream.arrival_s)

        n = len(stream)
        self._outcome = np.full(n, Outcome.PENDING, np.int8)
        self._output_tokens = stream.output_tokens.astype(np.int64)
        self._admitted_s = np.full(n, np.nan)
        self._first_token_s = np.full(n, np.nan)
        self._finished_s = np.full(n, np.nan)
        self._bodies: dict[int, bytes] = {}
        self._due_now: dict[int, float] = {}  # admitted, when it was due to be sent

        self.tenants = [
            TenantLoad(tenant, self._gate(tenant, int(cap), patience_s))
            for tenant, cap, patience_s in zip(
                scenario.tenants, caps, stream.patience_under(scenario), strict=True
            )
        ]
        self.last_token_s = self.heard_s = -math.inf
        self.quiet_since_s = math.inf
        self.failures = 0
        self.failing_since_s = math.inf
        self.last_error = ""
        self.generated_tokens = 0
        self.delivered = 0
        self._in_flight = 0
        self._lateness = array("d")
        self._lags = array("d")
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, start_s: float) -> None:
        """Let the episode begin at `start_s` of the loop's clock: requests arrive from then on."""
        self._start_s = start_s
        for load in self.tenants:
            load.begin(start_s)
        self._tasks = [
            self._loop.create_task(self._arrivals()),
            self._loop.create_task(self._measure_lag()),
        ]

    @property
    def in_flight(self) -> int:
        """Requests in flight, of all tenants."""
        return sum(load.gate.in_flight for load in self.tenants)

    def resize(self, caps: Iterable[int]) -> None:
        """Change the caps."""
        for load, cap in zip(self.tenants, caps, strict=True):
            load.gate.resize(int(cap))

    def observe(self, now_s: float) -> npt.NDArray[np.void]:
        """What the interval that ends now showed, (n_tenants,) of `TENANT_DTYPE`."""
        window_s = self._scenario.control.window_s
        return np.array([load.observe(now_s, window_s) for load in self.tenants], TENANT_DTYPE)

    def latencies(self) -> FloatArray:
        """Latencies of all tenants' completions in the window that was observed last."""
        return np.array([latency for load in self.tenants for _, latency in load.latencies])

    def report(self, now_s: float) -> dict[str, Any]:
        """How well the load itself was delivered, since the start of the episode.

        The lags, of the load process and of all sending processes, are those of the interval
        since the last report.
        """
        lateness = np.array(self._lateness)
        lags = np.array([*self._lags, *self._sender.take_lags()])
        del self._lags[:]
        scheduled = int(np.searchsorted(self._due_s, now_s - self._start_s, side="right"))
        p99_s = float(np.quantile(lateness, 0.99)) if lateness.size else 0.0
        problems = []
        if abs(scheduled - self.delivered) > max(1.0, 0.01 * scheduled):
            problems.append(
                f"{self.delivered} of {scheduled} scheduled requests reached the gate in time"
            )
        if p99_s > LATENESS_LIMIT_S:
            problems.append(f"sends were late by {1e3 * p99_s:.1f} ms at the 99th percentile")
        return {
            "scheduled": scheduled,
            "delivered": self.delivered,
            "send_lateness_p50_s": float(np.quantile(lateness, 0.5)) if lateness.size else 0.0,
            "send_lateness_p99_s": p99_s,
            "send_lateness_max_s": float(lateness.max()) if lateness.size else 0.0,
            "event_loop_lag_p99_s": float(np.quantile(lags, 0.99)) if lags.size else 0.0,
            "event_loop_lag_max_s": float(lags.max()) if lags.size else 0.0,
            "invalid": problems,
        }

    def outcomes(self) -> RequestOutcomes:
        """What has become of every request so far."""
        return RequestOutcomes(
            tenant=self._tenant_of,
            prompt_tokens=self._stream.prompt_tokens.astype(np.int64),
            output_tokens=self._output_tokens.copy(),
            outcome=self._outcome.copy(),
            arrival_s=self._stream.arrival_s.copy(),
            admitted_s=self._admitted_s.copy(),
            scheduled_s=np.full(len(self._stream), np.nan),
            first_token_s=self._first_token_s.copy(),
            finished_s=self._finished_s.copy(),
            preemptions=np.zeros(len(self._stream), np.int64),
        )

    async def stop(self) -> None:
        """End the episode: nothing more arrives, what is in flight is cancelled and recorded."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for load in self.tenants:
            for request in load.gate.withdraw():
                self._record(request, "waiting", math.nan, None)
        await asyncio.sleep(0)  # a task that never started could not record its request
        for load in self.tenants:
            await load.gate.cancel()

    def _gate(self, tenant: Tenant, cap: int, patience_s: float | None) -> Gate:
        return Gate(
            cap,
            self._send,
            self._drop,
            patience_s=patience_s,
            queue_limit=tenant.queue_limit,
        )

    async def _arrivals(self) -> None:
        stream = self._stream
        for request in self._order.tolist():
            tenant = self._scenario.tenants[self._tenant_of[request]]
            # built ahead of its time: a long prompt takes a millisecond
            self._bodies[request] = completion_body(
                self._model,
                self._prompts.tokens(request, int(stream.prompt_tokens[request])),
                int(stream.output_tokens[request]),
                tenant.priority if self._by_priority else None,
            )
            due_s = self._start_s + float(stream.arrival_s[request])
            # a wait even where it is late: the tasks of a burst must be able to start
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            load = self.tenants[self._tenant_of[request]]
            self.delivered += 1
            load.counts["arrived"] += 1
            self._outcome[request] = Outcome.QUEUED
            self._due_now[request] = due_s
            load.gate.arrive(request, due_s)
            self._due_now.pop(request, None)

    def _send(self, request: int) -> Any:
        now = self._loop.time()
        load = self.tenants[self._tenant_of[request]]
        self._outcome[request] = Outcome.IN_FLIGHT
        self._admitted_s[request] = now - self._start_s
        load.counts["admitted"] += 1
        load.counts["prompt_tokens"] += int(self._stream.prompt_tokens[request])
        if self._in_flight == 0:
            self.quiet_since_s = now
        self._in_flight += 1
        # one that need not wait is due at its arrival, the others when the gate lets them go
        return self._serve(request, load, self._due_now.get(request, now))

    async def _serve(self, request: int, load: TenantLoad, due_s: float) -> None:
        completion = Completion()
        arrival_s = self._start_s + float(self._stream.arrival_s[request])

        def on_tokens(now_s: float, before_s: float, tokens: int) -> None:
            self.last_token_s = self.heard_s = self.quiet_since_s = now_s
            self.failures, self.failing_since_s = 0, math.inf
            self.generated_tokens += tokens
            load.note_tokens(now_s, before_s, tokens, arrival_s)

        try:
            await self._sender.complete(self._bodies.pop(request), completion, on_tokens)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self.quiet_since_s = math.inf
            self._ended(request, load, completion)
            if completion.sent_s == completion.sent_s:
                self._lateness.append(completion.sent_s - due_s)

    def _ended(self, request: int, load: TenantLoad, completion: Completion) -> None:
        now = self._loop.time()
        if completion.answered_s > self.heard_s:
            self.heard_s = completion.answered_s
        end_s = completion.last_token_s if completion.end == "completed" else now
        self._first_token_s[request] = completion.first_token_s - self._start_s
        if completion.end == "completed":
            self._finished_s[request] = end_s - self._start_s
            self._outcome[request] = Outcome.COMPLETED
            self._output_tokens[request] = completion.tokens
            load.counts["completed"] += 1
            load.counts["output_tokens"] += completion.tokens
            load.counts["good"] += self._is_good(request, load.tenant)
            latency_s = float(self._finished_s[request] - self._stream.arrival_s[request])
            load.latencies.append((now, latency_s))
        elif completion.end != "cut_off":
            self._finished_s[request] = end_s - self._start_s
            self._outcome[request] = Outcome.FAILED
            load.counts["failed"] += 1
            self.failures += 1
            self.failing_since_s = min(self.failing_since_s, now)
            self.last_error = completion.error
        self._record(request, completion.end, end_s, completion)

    def _is_good(self, request: int, tenant: Tenant) -> bool:
        """Whether a completed request meets its tenant's SLOs."""
        arrival_s = self._stream.arrival_s[request]
        finished_s, first_s = self._finished_s[request], self._first_token_s[request]
        limits = [
            (finished_s - arrival_s, tenant.slo_latency_p99_s),
            (first_s - arrival_s, tenant.slo_ttft_p99_s),
        ]
        if self._output_tokens[request] > 1:
            itl_s = (finished_s - first_s) / (self._output_tokens[request] - 1)
            limits.append((itl_s, tenant.slo_itl_p99_s))
        return all(limit is None or value <= limit for value, limit in limits)

    def _drop(self, request: int, queue_full: bool) -> None:
        now = self._loop.time()
        self._outcome[request] = Outcome.DROPPED
        self._finished_s[request] = now - self._start_s
        self.tenants[self._tenant_of[request]].counts["dropped"] += 1
        del self._bodies[request]
        self._record(request, "queue_full" if queue_full else "patience", now, None)

    def _record(
        self, request: int, end: str, finished_s: float, completion: Completion | None
    ) -> None:
        stream = self._stream
        self._records.append(
            request_record(
                request=request,
                tenant=self._scenario.tenants[self._tenant_of[request]].name,
                prompt_tokens=int(stream.prompt_tokens[request]),
                output_tokens=int(stream.output_tokens[request]),
                end=end,
                start_s=self._start_s,
                arrival_s=float(stream.arrival_s[request]),
                admitted_s=float(self._admitted_s[request]),
                finished_s=finished_s - self._start_s,
                completion=completion,
            )
        )

    async def _measure_lag(self) -> None:
        """How late the event loop wakes up: what every time measured here may be off by."""
        while True:
            until_s = self._loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lags.append(self._loop.time() - until_s)


def write_percentiles(row: Any, name: str, values: FloatArray) -> None:
    """Write the p50, p95 and p99 of a window into a record; without values the last ones stay.

    Args:
        row: a record with the fields `NAME_p50_s`, `NAME_p95_s` and `NAME_p99_s`.
        name: of the fields.
        values: (n,) seconds; the percentile q is `sorted[min(int(q * n), n - 1)]`.
    """
    n = values.size
    if n == 0:
        return
    ranks = [min(int(q * n), n - 1) for q in QUANTILES]
    ordered = np.partition(values, ranks)
    for q, rank in zip(QUANTILES, ranks, strict=True):
        row[f"{name}_p{round(100 * q)}_s"] = ordered[rank]
