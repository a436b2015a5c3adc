"""Sending processes behind one gate, for a load that one core cannot carry."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys

from vllm_tenant_tuning.backends.live.client import Completion, OnTokens
from vllm_tenant_tuning.backends.live.wire import (
    Batch,
    Cancel,
    Ended,
    Request,
    Server,
    read_message,
    write_message,
)

END_TIMEOUT_S = 5.0


class WorkerPool:
    """Sends completions through several processes (a `Sender`).

    Made with `WorkerPool.start`.
    """

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, server: Server, n_workers: int) -> WorkerPool:
        """Start the processes.

        Args:
            server: what they send to.
            n_workers: how many.
        """
        pool = cls()
        for _ in range(n_workers):
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "vllm_tenant_tuning.backends.live.worker",
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            reader, writer = await asyncio.open_connection(sock=ours)
            write_message(writer, server)
            pool._workers.append(_Worker(process, reader, writer))
        for worker in pool._workers:
            await worker.ready.wait()
        return pool

    async def complete(
        self, body: bytes, completion: Completion, on_tokens: OnTokens | None = None
    ) -> None:
        """Send one completion through the worker with the fewest of them."""
        alive = [worker for worker in self._workers if not worker.is_gone]
        if not alive:
            completion.end, completion.error = "failed", "no sending process is left"
            return
        await min(alive, key=lambda worker: len(worker.pending)).complete(
            next(self._numbers), body, completion, on_tokens
        )

    def take_lags(self) -> list[float]:
        """How late the processes' event loops woke up, since the last call; seconds."""
        lags = []
        for worker in self._workers:
            lags += worker.lags
            worker.lags = []
        return lags

    async def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            await asyncio.get_running_loop().run_in_executor(None, worker.wait)


class _Pending:
    """A completion that a worker has been asked for."""

    def __init__(self, completion: Completion, on_tokens: OnTokens | None) -> None:
        self.completion = completion
        self.on_tokens = on_tokens
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Worker:
    """One process, and what it has been asked for."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pending: dict[int, _Pending] = {}
        self.lags: list[float] = []
        self.is_gone = False
        self.ready = asyncio.Event()
        self._process = process
        self._reader = reader
        self._writer = writer
        self._receiving = asyncio.get_running_loop().create_task(self._receive())

    async def complete(
        self, number: int, body: bytes, completion: Completion, on_tokens: OnTokens | None
    ) -> None:
        pending = self.pending[number] = _Pending(completion, on_tokens)
        write_message(self._writer, Request(number, body))
        try:
            await pending.ended
        except asyncio.CancelledError:
            if not self.is_gone:
                write_message(self._writer, Cancel(number))
            raise
        finally:
            self.pending.pop(number, None)

    def close(self) -> None:
        self._writer.close()

    def wait(self) -> None:
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _receive(self) -> None:
        try:
            while True:
                self._take(await read_message(self._reader))
                self.ready.set()
        except EOFError:
            pass
        finally:
            self.is_gone = True
            self.ready.set()
            for pending in self.pending.values():
                if not pending.ended.done():
                    pending.completion.end = "failed"
                    pending.completion.error = "the sending process is gone"
                    pending.ended.set_result(None)

    def _take(self, batch: Batch) -> None:
        self.lags.append(batch.lag_s)
        for number, sent_s in batch.sent:
            if number in self.pending:
                self.pending[number].completion.sent_s = sent_s
        for number, now_s, tokens in batch.chunks:
            pending = self.pending.get(number)
            if pending is not None:
                pending.completion.add_chunk(now_s, tokens, pending.on_tokens)
        for ended in batch.ended:
            pending = self.pending.get(ended.number)
            if pending is not None and not pending.ended.done():
                _finish(pending.completion, ended)
                pending.ended.set_result(None)


def _finish(completion: Completion, ended: Ended) -> None:
    completion.end = ended.end
    completion.error = ended.error
    completion.sent_s = ended.sent_s
    completion.answered_s = ended.answered_s
    completion.tokens = ended.tokens
    completion.prompt_tokens = ended.prompt_tokens
