"""A small HTTP server on this machine that plays endpoints, good ones and hostile ones."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Exchange"], None]

OK = '{"t1": 1, "t2": -1}'


@dataclass
class Exchange:
    """One request, and the socket to answer it on."""

    number: int
    path: str
    headers: dict[str, str]
    text: str
    socket: socket.socket
    stop: threading.Event

    @property
    def body(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.text)
        return content

    def raw(self, data: bytes) -> None:
        self.socket.sendall(data)

    def respond(
        self,
        body: str | bytes,
        status: int = 200,
        content_type: str = "application/json",
        **more: str,
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {content_type}"]
        lines += [f"Content-Length: {len(data)}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
        self.raw("\r\n".join([*lines, "", ""]).encode() + data)


def completion(
    content: Any, finish_reason: str = "stop", usage: Any = (100, 10), **more: Any
) -> str:
    """The body of a chat completion."""
    message = {"role": "assistant", "content": content, **more}
    result: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }
    if isinstance(usage, tuple):
        usage = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": 0}
    if usage is not None:
        result["usage"] = usage
    return json.dumps(result)


def tool_call(arguments: str, name: str = "change_caps") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: Any, **more: Any) -> Behaviour:
    """An endpoint whose model gives this content."""
    return lambda exchange: exchange.respond(completion(content, **more))


@dataclass
class LLMServer:
    """What the server plays and what it was asked."""

    url: str = ""
    behaviour: Behaviour = field(default_factory=lambda: says(OK))
    exchanges: list[Exchange] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    in_flight: int = 0
    most_in_flight: int = 0


@contextmanager
def llm_server(behaviour: Behaviour | None = None) -> Iterator[LLMServer]:
    """Run a server until the block ends."""
    played = LLMServer()
    if behaviour is not None:
        played.behaviour = behaviour

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            headers = {name.lower(): value for name, value in self.headers.items()}
            with played.lock:
                number = len(played.exchanges)
                exchange = Exchange(number, self.path, headers, text, self.connection, played.stop)
                played.exchanges.append(exchange)
                played.in_flight += 1
                played.most_in_flight = max(played.most_in_flight, played.in_flight)
            try:
                with suppress(OSError):  # the client may be gone, as it should be
                    played.behaviour(exchange)
            finally:
                with played.lock:
                    played.in_flight -= 1
            self.close_connection = True

        do_GET = do_POST

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *arguments: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    played.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield played
    finally:
        played.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()
