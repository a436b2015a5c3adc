"""A sending process: completions of one server, for a load that one core cannot carry.

    python -m vllm_tenant_tuning.backends.live.worker FD

It takes requests from the load process through the socket FD, reports tokens in batches, and ends
when the socket does. Gate, clock and records stay in the load process; `time.monotonic()` is the
same in all processes of a machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

from vllm_tenant_tuning.backends.live.client import Completion, CompletionClient
from vllm_tenant_tuning.backends.live.wire import (
    Batch,
    Cancel,
    Ended,
    Request,
    Server,
    read_message,
    write_message,
)

BATCH_S = 0.02


class Worker:
    """Sends what it is asked to and reports in batches.

    Args:
        client: of the server.
        writer: takes the batches.
    """

    def __init__(self, client: CompletionClient, writer: asyncio.StreamWriter) -> None:
        self._client = client
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unsent: dict[int, Completion] = {}
        self._chunks: list[tuple[int, float, int]] = []
        self._ended: list[Ended] = []

    def take(self, message: Request | Cancel) -> None:
        """Begin what is asked for."""
        match message:
            case Request():
                task = asyncio.get_running_loop().create_task(self._send(message))
                self._tasks[message.number] = task
                task.add_done_callback(lambda _: self._tasks.pop(message.number, None))
            case Cancel():
                if message.number in self._tasks:
                    self._tasks[message.number].cancel()

    async def report(self) -> None:
        """Send a batch every `BATCH_S`, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            until_s = loop.time() + BATCH_S
            await asyncio.sleep(BATCH_S)
            sent = [(n, c.sent_s) for n, c in self._unsent.items() if c.sent_s == c.sent_s]
            for number, _ in sent:
                del self._unsent[number]
            batch = Batch(sent, self._chunks, self._ended, loop.time() - until_s)
            self._chunks, self._ended = [], []
            write_message(self._writer, batch)

    async def stop(self) -> None:
        """Cancel everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, request: Request) -> None:
        completion = Completion()
        self._unsent[request.number] = completion

        def on_tokens(now_s: float, _before_s: float, tokens: int) -> None:
            self._chunks.append((request.number, now_s, tokens))

        try:
            await self._client.complete(request.body, completion, on_tokens)
        finally:
            self._ended.append(
                Ended(
                    number=request.number,
                    end=completion.end,
                    error=completion.error,
                    sent_s=completion.sent_s,
                    answered_s=completion.answered_s,
                    tokens=completion.tokens,
                    prompt_tokens=completion.prompt_tokens,
                )
            )
            self._unsent.pop(request.number, None)


async def serve(connection: socket.socket) -> None:
    """Take requests until the load process is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    server: Server = await read_message(reader)
    client = CompletionClient(
        server.url, server.api_key_env, server.connect_timeout_s, server.read_timeout_s
    )
    worker = Worker(client, writer)
    reporting = asyncio.create_task(worker.report())
    with contextlib.suppress(EOFError):
        while True:
            worker.take(await read_message(reader))
    reporting.cancel()
    await worker.stop()
    await client.close()
    writer.close()


def main() -> None:
    """Run the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
