"""The admission gate of one tenant: a FIFO queue, a cap that moves, patience, a bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any


class Gate:
    """Sends a tenant's requests in order of arrival, never more than its cap at once.

    A request is sent by a task of its own, and leaves the gate when that task is done, whether
    it returned, raised or was cancelled: no outcome can lose the wake-up of the next request.
    Requests that wait hold no task. All methods belong to the event loop's thread.

    Args:
        cap: requests that may be in flight, at least 0.
        send: sends one request and returns when it has ended; called in a task.
        drop: called with a request that will not be sent, and whether the queue was full (else
            its patience is over).
        patience_s: the longest a request waits, counted from its arrival; None for ever.
        queue_limit: a request that finds this many waiting is dropped; None for no limit.

    Attributes:
        cap: requests that may be in flight.
        in_flight: requests sent and not ended; above the cap only after the cap was lowered.
    """

    def __init__(
        self,
        cap: int,
        send: Callable[[int], Coroutine[Any, Any, None]],
        drop: Callable[[int, bool], None],
        *,
        patience_s: float | None = None,
        queue_limit: int | None = None,
    ) -> None:
        self.cap = cap
        self.in_flight = 0
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._drop = drop
        self._patience_s = float("inf") if patience_s is None else patience_s
        self._queue_limit = float("inf") if queue_limit is None else queue_limit
        self._waiting: deque[tuple[int, float]] = deque()  # request, when its patience is over
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._request_s = 0.0
        self._since_s = self._loop.time()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def in_flight_request_s(self) -> float:
        """Time integral of `in_flight` up to now, in request-seconds."""
        return self._request_s + self.in_flight * (self._loop.time() - self._since_s)

    def arrive(self, request: int, arrival_s: float) -> None:
        """Take a request that arrived at `arrival_s` of the loop's clock, in order of arrival.

        It is sent, queued, or dropped because the queue is full.
        """
        # Those who came before have gone as far as the cap allows: nobody is overtaken.
        if not self._waiting and self.in_flight < self.cap:
            self._start(request)
        elif len(self._waiting) >= self._queue_limit:
            self._drop(request, True)
        else:
            self._waiting.append((request, arrival_s + self._patience_s))
            self._set_timer()

    def resize(self, cap: int) -> None:
        """Change the cap. A lower one cancels nothing: the tenant drains down to it."""
        self.cap = cap
        self._admit()

    def withdraw(self) -> list[int]:
        """Empty the queue; returns the requests that waited, in order."""
        waiting = [request for request, _ in self._waiting]
        self._waiting.clear()
        self._set_timer()
        return waiting

    async def cancel(self) -> None:
        """Cancel everything in flight; returns when all tasks have ended.

        Requests that wait are admitted in their place unless `withdraw` came first.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _admit(self) -> None:
        now = self._loop.time()
        while self._waiting:
            request, until_s = self._waiting[0]
            if until_s < now:
                self._waiting.popleft()
                self._drop(request, False)
            elif self.in_flight < self.cap:
                self._waiting.popleft()
                self._start(request)
            else:
                break
        self._set_timer()

    def _start(self, request: int) -> None:
        self._count(1)
        task = self._loop.create_task(self._send(request))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._count(-1)
        self._admit()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler(
                {"message": "a request's task failed", "exception": error, "task": task}
            )

    def _count(self, change: int) -> None:
        now = self._loop.time()
        self._request_s += self.in_flight * (now - self._since_s)
        self._since_s = now
        self.in_flight += change

    def _set_timer(self) -> None:
        """Wake up when the patience of the first in the queue is over: it is the first to leave."""
        until_s = self._waiting[0][1] if self._waiting else float("inf")
        if self._timer is not None and (self._timer.cancelled() or self._timer.when() != until_s):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and until_s < float("inf"):
            self._timer = self._loop.call_at(until_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._waiting and self._waiting[0][1] <= now:
            request, _ = self._waiting.popleft()
            self._drop(request, False)
        # The loop may fire a timer early, by up to the resolution of its clock.
        self._set_timer()
