"""The gate under random arrivals, resizing, failures and cancellations, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tenant_tuning.backends.live.gate import Gate


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, "nothing left to wait for"
            self.now += timeout
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self.now


def play(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


class Server:
    """Ends requests when told to, and notes what it was sent and what was dropped."""

    def __init__(self, cap: int, **options: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda *_: None)
        self.sent: list[int] = []
        self.dropped: dict[int, tuple[float, bool]] = {}
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.gate = Gate(cap, self.send, self.drop, **options)

    def send(self, request: int) -> Coroutine[Any, Any, None]:
        self.sent.append(request)
        assert self.gate.in_flight <= self.gate.cap
        end = self.ends[request] = self.loop.create_future()

        async def wait() -> None:
            self.tasks[request] = asyncio.current_task()  # type: ignore[assignment]
            await end

        return wait()

    def drop(self, request: int, queue_full: bool) -> None:
        self.dropped[request] = (self.loop.time(), queue_full)

    def end(self, position: int, how: str) -> None:
        running = [r for r, end in self.ends.items() if not end.done()]
        if not running:
            return
        request = running[position % len(running)]
        end = self.ends[request]
        if how == "complete":
            end.set_result(None)
        elif how == "fail":
            end.set_exception(RuntimeError("broken"))
        elif request in self.tasks:
            self.tasks[request].cancel()
            end.cancel()
        else:
            end.cancel()


ACTION = st.one_of(
    st.tuples(st.just("arrive"), st.just(0)),
    st.tuples(st.just("resize"), st.integers(0, 6)),
    st.tuples(st.sampled_from(["complete", "fail", "cancel"]), st.integers(0, 9)),
    st.tuples(st.just("sleep"), st.sampled_from([0, 1, 2, 7])),
)


@settings(max_examples=300)
@given(st.lists(ACTION, max_size=80), st.integers(0, 4))
def test_random_resizing_failure_and_cancellation(actions: list[tuple[str, int]], cap: int) -> None:
    async def main() -> None:
        server = Server(cap)
        gate = server.gate
        arrived = 0
        for action, value in actions:
            if action == "arrive":
                gate.arrive(arrived, server.loop.time())
                arrived += 1
            elif action == "resize":
                gate.resize(value)
            elif action == "sleep":
                await asyncio.sleep(value)
                if value == 0:  # one turn of the loop: what has ended may not be known yet
                    continue
                running = sum(not end.done() for end in server.ends.values())
                assert gate.in_flight == running
                # whoever can be sent has been
                assert gate.queued == 0 or gate.in_flight >= gate.cap
            else:
                server.end(value, action)
            assert gate.queued + len(server.sent) == arrived
        assert server.sent == list(range(len(server.sent)))
        # with room again, everybody is sent in the end
        gate.resize(2)
        while gate.in_flight or gate.queued:
            server.end(0, "complete")
            await asyncio.sleep(1)
        assert server.sent == list(range(arrived))

    play(main)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=8),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 6),
)
def test_equals_a_queue_in_discrete_time(
    requests: list[tuple[int, int]],
    resizes: list[tuple[int, int]],
    cap: int,
    patience: int,
    limit: int,
) -> None:
    """Whole seconds against a queue written down step by step.

    Tenths keep the events of one second apart: ends, then resizes, arrivals, and last the end
    of patience.
    """
    arrivals: list[tuple[int, int]] = []  # second, service
    second = 0
    for gap, service in requests:
        second += gap
        arrivals.append((second, service))
    horizon = second + 20

    waiting: deque[tuple[int, int]] = deque()
    running: list[int] = []
    sent_at: dict[int, int] = {}
    dropped_at: dict[int, tuple[int, bool]] = {}
    at = cap

    def admit(t: int) -> None:
        while waiting and len(running) < at:
            request, _ = waiting.popleft()
            sent_at[request] = t
            running.append(t + arrivals[request][1])

    for t in range(horizon):
        running = [end for end in running if end != t]
        admit(t)
        for when, new in resizes:
            if when == t:
                at = new
                admit(t)
        for request, (when, _) in enumerate(arrivals):
            if when != t:
                continue
            waiting.append((request, t))
            admit(t)
            if len(waiting) > limit:
                waiting.pop()
                dropped_at[request] = (t, True)
        while waiting and waiting[0][1] + patience == t:
            dropped_at[waiting.popleft()[0]] = (t, False)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        sent: dict[int, int] = {}
        dropped: dict[int, tuple[int, bool]] = {}

        def send(request: int) -> Coroutine[Any, Any, None]:
            assert gate.in_flight <= gate.cap
            sent[request] = int(loop.time())
            end_s = int(loop.time()) + arrivals[request][1]

            async def serve() -> None:
                await asyncio.sleep(end_s + 0.1 - loop.time())

            return serve()

        def drop(request: int, queue_full: bool) -> None:
            dropped[request] = (int(loop.time()), queue_full)

        gate = Gate(cap, send, drop, patience_s=patience + 0.4, queue_limit=limit)
        for order, (when, new) in enumerate(resizes):
            loop.call_at(when + 0.3 + order * 1e-4, gate.resize, new)
        for request, (when, _) in enumerate(arrivals):
            arrival_s = when + 0.5 + request * 1e-4
            loop.call_at(arrival_s, gate.arrive, request, arrival_s)
        await asyncio.sleep(horizon)
        assert sent == {r: t for r, t in sent_at.items() if t < horizon}
        assert dropped == dropped_at
        assert gate.queued == len(waiting)
        gate.withdraw()
        await gate.cancel()
        assert gate.in_flight == 0

    play(main)


def test_time_integral_of_requests_in_flight() -> None:
    async def main() -> None:
        server = Server(2)
        for request in range(3):
            server.gate.arrive(request, 0.0)
        await asyncio.sleep(4)  # two in flight
        server.gate.resize(1)
        server.end(0, "complete")
        await asyncio.sleep(6)  # one
        assert server.gate.queued == 1
        assert server.gate.in_flight_request_s == pytest.approx(2 * 4 + 1 * 6)

    play(main)


def test_cancel_ends_everything_and_withdraw_empties_the_queue() -> None:
    async def main() -> None:
        server = Server(3)
        for request in range(5):
            server.gate.arrive(request, 0.0)
        await asyncio.sleep(1)
        assert server.gate.withdraw() == [3, 4]
        await server.gate.cancel()
        assert (server.gate.in_flight, server.gate.queued) == (0, 0)
        assert server.sent == [0, 1, 2]

    play(main)
