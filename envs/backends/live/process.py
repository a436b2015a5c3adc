"""The load process: gate, load and telemetry run here, beside the agent and its lock.

    python -m vllm_tenant_tuning.backends.live.process FD

It takes commands from the backend through the socket FD, one after the other, and ends when the
socket does: when the agent's process is gone, so is the load.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import sys
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from vllm_tenant_tuning.backends.live.client import Completion, CompletionClient, completion_body
from vllm_tenant_tuning.backends.live.episode import Episode
from vllm_tenant_tuning.backends.live.gpu import GPUMonitor
from vllm_tenant_tuning.backends.live.load import Prompts
from vllm_tenant_tuning.backends.live.messages import (
    Advance,
    Fault,
    Observed,
    Outcomes,
    Refused,
    Start,
)
from vllm_tenant_tuning.backends.live.metrics import ServerMetrics
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.backends.live.pages import (
    PROBE_PERIOD_S,
    NotReadyError,
    find_model,
    scrape,
    version,
)
from vllm_tenant_tuning.backends.live.pool import WorkerPool
from vllm_tenant_tuning.backends.live.records import EPISODE_FILE
from vllm_tenant_tuning.backends.live.wire import Server
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import RequestStream

logger = logging.getLogger(__name__)


class LoadProcess:
    """Carries out the backend's commands.

    Args:
        scenario: the task.
        options: the backend's.
    """

    def __init__(self, scenario: Scenario, options: LiveOptions) -> None:
        self._scenario = scenario
        self._options = options
        self._loop = asyncio.get_running_loop()
        gpu_index = options.gpu_index
        if gpu_index is None and options.is_local:
            gpu_index = 0
        self._gpu = GPUMonitor(gpu_index)
        self._url = ""
        self._client: CompletionClient | None = None
        self._pool: WorkerPool | None = None
        self._episode: Episode | None = None

    async def run(self, command: Any) -> Any:
        """Carry out one command and give its answer."""
        match command:
            case Start():
                try:
                    return await self._start(command)
                except NotReadyError as error:
                    return Refused(str(error))
            case Advance():
                if self._episode is None:
                    return Refused("no episode is running")
                return await self._episode.advance(command.caps)
            case Outcomes():
                return self._episode.load.outcomes() if self._episode else None
        raise TypeError(f"no such command: {command!r}")

    def give_up(self, fault: Fault) -> None:
        """End the episode, if one is running."""
        if self._episode is not None:
            self._episode.give_up(fault.reason, fault.detail)

    async def close(self) -> None:
        """End the episode and close all connections."""
        await self._stop()
        await self._disconnect()
        self._gpu.close()

    async def _stop(self) -> None:
        if self._episode is not None:
            await self._episode.stop()

    async def _start(self, command: Start) -> Observed:
        await self._stop()
        self._episode = None
        options, scenario = self._options, self._scenario
        if command.url != self._url:
            await self._connect(command.url)
        assert self._client is not None
        client = self._client
        until_s = self._loop.time() + options.reset_timeout_s
        wanted = None if options.serve is not None else options.model
        model, max_model_len = await find_model(client, self._url, options, wanted, until_s)
        self._check_lengths(command.stream, max_model_len)
        prompts = Prompts(command.salt, *options.prompt_token_ids)
        if command.warm_up:
            await self._warm_up(client, model, command.stream, prompts, until_s)
        # An engine that steps shows gauges that are true, and that it is alive.
        await self._probe(client, model, prompts, until_s)
        metrics = ServerMetrics(scenario.control.control_interval_s)
        await self._wait_idle(client, metrics, until_s)

        command.folder.mkdir(parents=True)
        server: dict[str, Any] = {
            "url": command.url,
            "model": model,
            "version": await version(client),
        }
        if metrics.latest is not None:
            server["num_gpu_blocks"] = metrics.latest.num_gpu_blocks
            server["block_size"] = metrics.latest.block_size
        (command.folder / EPISODE_FILE).write_text(
            json.dumps(
                {
                    "scenario": scenario.model_dump(mode="json"),
                    "tenants": list(scenario.tenant_names),
                    "requests": len(command.stream),
                    "salt": command.salt,
                    "options": options.model_dump(mode="json"),
                    "server": server,
                    "gpu_unavailable": self._gpu.unavailable,
                    **command.note,
                },
                indent=1,
            )
            + "\n"
        )
        gc.collect()
        gc.freeze()  # what is here stays: no long collection during the episode
        self._episode = Episode(
            scenario,
            options,
            command,
            client,
            self._pool or client,
            model,
            prompts,
            metrics,
            self._gpu,
            server,
        )
        return self._episode.first()

    async def _connect(self, url: str) -> None:
        await self._disconnect()
        options = self._options
        server = Server(url, options.api_key_env, options.connect_timeout_s, options.read_timeout_s)
        self._client = CompletionClient(**asdict(server))
        if options.workers > 1:
            self._pool = await WorkerPool.start(server, options.workers)
        self._url = url

    async def _disconnect(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        if self._client is not None:
            await self._client.close()
        self._pool = self._client = None
        self._url = ""

    def _check_lengths(self, stream: RequestStream, max_model_len: int | None) -> None:
        if max_model_len is None or len(stream) == 0:
            return
        lengths = stream.prompt_tokens + stream.output_tokens
        longest = int(np.argmax(lengths))
        if lengths[longest] > max_model_len:
            name = self._scenario.tenant_names[stream.tenant[longest]]
            raise NotReadyError(
                f"tenant '{name}' has a request of {stream.prompt_tokens[longest]} prompt and "
                f"{stream.output_tokens[longest]} output tokens; the server's max_model_len is "
                f"{max_model_len}"
            )

    async def _warm_up(
        self,
        client: CompletionClient,
        model: str,
        stream: RequestStream,
        prompts: Prompts,
        until_s: float,
    ) -> None:
        """Send requests like the episode's first ones, all at once, and forget them."""
        first = np.argsort(stream.arrival_s, kind="stable")[: self._options.warmup_requests]
        bodies = [
            completion_body(
                model,
                prompts.tokens(len(stream) + 1 + int(request), int(stream.prompt_tokens[request])),
                int(stream.output_tokens[request]),
            )
            for request in first
        ]
        sends = [client.complete(body, Completion()) for body in bodies]
        try:
            await asyncio.wait_for(asyncio.gather(*sends), until_s - self._loop.time())
        except TimeoutError as error:
            raise NotReadyError(
                f"{self._url}: {len(sends)} warm-up requests did not end within "
                f"{self._options.reset_timeout_s:g} s"
            ) from error

    async def _probe(
        self, client: CompletionClient, model: str, prompts: Prompts, until_s: float
    ) -> None:
        """Wait until a completion of one token comes back."""
        body = completion_body(model, prompts.tokens(2**62, 4), 1)
        problem = "no answer"
        while (left_s := until_s - self._loop.time()) > 0:
            completion = Completion()
            try:
                await asyncio.wait_for(client.complete(body, completion), left_s)
            except TimeoutError:
                problem = "no token came"
                break
            if completion.end == "completed":
                return
            problem = completion.error
            await asyncio.sleep(PROBE_PERIOD_S)
        raise NotReadyError(
            f"{self._url} completes nothing within {self._options.reset_timeout_s:g} s: {problem}"
        )

    async def _wait_idle(
        self, client: CompletionClient, metrics: ServerMetrics, until_s: float
    ) -> None:
        """Wait until nothing runs or waits; without readable metrics there is nothing to wait for.

        Gauges that stay up while no token moves are left over from an abort, and no work.
        """
        interval_s = self._scenario.control.control_interval_s
        began_s = self._loop.time()
        while True:
            await scrape(client, metrics)
            if metrics.latest is None:
                logger.warning("telemetry without /metrics: %s", metrics.problem)
                return
            values = metrics.latest.values
            busy = values["num_requests_running"] + values["num_requests_waiting"]
            now = self._loop.time()
            if busy == 0 or now - max(metrics.moved_s, began_s) > max(interval_s, 2.0):
                return
            if now > until_s:
                raise NotReadyError(
                    f"{self._url} is busy with {busy:g} requests that are not this episode's"
                )
            await asyncio.sleep(PROBE_PERIOD_S)


async def serve(connection: Connection) -> None:
    """Take commands until the other end is gone."""
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[Any] = asyncio.Queue()

    def receive() -> None:
        try:
            while connection.poll():
                command = connection.recv()
                if isinstance(command, Fault):
                    process.give_up(command)
                else:
                    commands.put_nowait(command)
        except (EOFError, OSError):
            loop.remove_reader(connection.fileno())
            answering.cancel()

    async def answer() -> None:
        while True:
            connection.send(await process.run(await commands.get()))

    scenario, options = connection.recv()
    process = LoadProcess(scenario, options)
    answering = loop.create_task(answer())
    connection.send(None)  # ready
    loop.add_reader(connection.fileno(), receive)
    try:
        await answering
    except (asyncio.CancelledError, BrokenPipeError):
        logger.info("the agent is gone")
    finally:
        await process.close()


def main() -> None:
    """Run the load process."""
    # Ctrl-C reaches the whole foreground group; the agent's process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    with Connection(int(sys.argv[1])) as connection:
        try:
            asyncio.run(serve(connection))
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
