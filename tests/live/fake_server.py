"""A small server for what a real vLLM cannot be made to show: faults, and exact counts.

It speaks just enough of vLLM's API: streamed completions, models, health and metrics.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web


class FakeServer:
    """Streams tokens at a given pace, and misbehaves as it is told.

    Attributes:
        url: where it listens.
        first_token_s, token_s: pace of a stream.
        frames: gives the events of a stream from the number of tokens; each is sent after a
            pause of `token_s`.
        status: of completions; other than 200 they are refused.
        metrics: the text of `/metrics`; None for 404.
        frozen: completions are accepted and never answered.
        hook: called with each request's body as it arrives.
    """

    def __init__(self) -> None:
        self.url = ""
        self.first_token_s = 0.01
        self.token_s = 0.002
        self.frames: Callable[[int, int], list[bytes]] = usage_frames
        self.status = 200
        self.error_body = '{"error": {"message": "as told"}}'
        self.metrics: str | None = metrics_page()
        self.frozen = False
        self.max_model_len = 4096
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived_s: list[float] = []
        self.in_flight: list[int] = []
        self._now_in_flight = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.arrived_s.append(time.monotonic())
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            return web.Response(status=self.status, text=self.error_body)
        self._now_in_flight += 1
        self.in_flight.append(self._now_in_flight)
        counted = True
        try:
            if self.frozen:
                await asyncio.sleep(3600)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await asyncio.sleep(self.first_token_s)
            frames = self.frames(len(body["prompt"]), body["max_tokens"])
            for frame in frames[:-1]:
                await response.write(frame)
                await asyncio.sleep(self.token_s)
            # not in flight any more when the client can know that it has ended
            self._now_in_flight -= 1
            counted = False
            await response.write(frames[-1])
            return response
        finally:
            self._now_in_flight -= counted

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "fake", "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        return web.Response(text=self.metrics)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        return app


@contextmanager
def fake_server(port: int = 0) -> Iterator[FakeServer]:
    """A running fake server, in a thread of its own."""
    server = FakeServer()
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    runner: web.AppRunner

    async def start() -> None:
        nonlocal runner
        runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024, reuse_address=True)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str, usage: tuple[int, int] | None = None) -> bytes:
    content: dict[str, Any] = {
        "id": "cmpl-0",
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": None}],
    }
    if usage is not None:
        content["usage"] = _usage(*usage)
    return event(content)


def last(prompt_tokens: int, tokens: int) -> bytes:
    """The events that end a stream: usage without choices, and [DONE]."""
    return event({"choices": [], "usage": _usage(prompt_tokens, tokens)}) + b"data: [DONE]\n\n"


def usage_frames(prompt_tokens: int, tokens: int) -> list[bytes]:
    """As vLLM streams: a token in each event, with usage in every one."""
    frames = [chunk(" x", (prompt_tokens, n + 1)) for n in range(tokens)]
    return [*frames, last(prompt_tokens, tokens)]


def metrics_page(**values: float) -> str:
    """A page with the given values, by vLLM's names without `vllm:`."""
    known = {
        "num_requests_running": 0.0,
        "num_requests_waiting": 0.0,
        "kv_cache_usage_perc": 0.0,
        "num_preemptions_total": 0.0,
        "prompt_tokens_total": 0.0,
        "generation_tokens_total": 0.0,
        "prefix_cache_queries_total": 0.0,
        "prefix_cache_hits_total": 0.0,
    } | values
    return "".join(
        f'vllm:{name}{{engine="0",model_name="fake"}} {value}\n' for name, value in known.items()
    )


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def _usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + tokens,
        "completion_tokens": tokens,
    }
