"""The load process: gate, load and telemetry run here, beside the agent and its lock.

    python -m vllm_tenant_tuning.backends.live.process FD

It takes commands from the backend through the socket FD, one after the other, and ends when the
socket does: when the agent's process is gone, so is the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import signal
import sys
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.live.client import (
    Completion,
    CompletionClient,
    completion_body,
)
from vllm_tenant_tuning.backends.live.gpu import GPUMonitor, GPUReading
from vllm_tenant_tuning.backends.live.load import Load, Prompts, Sender, write_percentiles
from vllm_tenant_tuning.backends.live.messages import (
    Advance,
    Fault,
    Observed,
    Outcomes,
    Refused,
    Start,
)
from vllm_tenant_tuning.backends.live.metrics import (
    MetricsError,
    ServerMetrics,
    parse_metrics,
)
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.backends.live.pool import WorkerPool
from vllm_tenant_tuning.backends.live.records import (
    EPISODE_FILE,
    REQUESTS_FILE,
    STEPS_FILE,
    RecordFile,
)
from vllm_tenant_tuning.backends.live.wire import Server
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, Telemetry
from vllm_tenant_tuning.workload import RequestStream

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.1
SCRAPE_TIMEOUT_S = 2.0
PROBE_PERIOD_S = 0.25
MIN_FAILURES = 3
"""Fewer failed requests than this do not end an episode."""


class NotReadyError(Exception):
    """A server on which no episode can begin."""


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
            "version": await _version(client),
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


class Episode:
    """One episode: the load, the watch over the server, and an observation each interval.

    Args:
        scenario, options, command: the task, the backend's options and the start.
        client: reads the server's pages.
        sender: sends the requests.
        model, prompts: see `Load`.
        metrics: has read the idle server's page.
        gpu: the server's GPU.
        server: what is known of it.
    """

    def __init__(
        self,
        scenario: Scenario,
        options: LiveOptions,
        command: Start,
        client: CompletionClient,
        sender: Sender,
        model: str,
        prompts: Prompts,
        metrics: ServerMetrics,
        gpu: GPUMonitor,
        server: dict[str, Any],
    ) -> None:
        self._scenario = scenario
        self._options = options
        self._client = client
        self._metrics = metrics
        self._gpu = gpu
        self._server = server
        self._folder = command.folder
        self._loop = asyncio.get_running_loop()
        self._records = RecordFile(command.folder / REQUESTS_FILE)
        self._steps = RecordFile(command.folder / STEPS_FILE)
        self._start_s = self._observed_s = self._asked_s = math.inf
        self._step = 0
        self._stopped = False
        self._final: Observed | None = None
        self._fault = ""
        self._detail = ""
        self._faulty = asyncio.Event()
        self._heard_s = math.inf  # when the server last answered anything
        self._gpu_reading = GPUReading()
        self._energy_j = math.nan
        self._cluster = np.zeros((), CLUSTER_DTYPE)
        for name in ("latency_p50_s", "latency_p95_s", "latency_p99_s"):
            self._cluster[name] = math.nan
        self.load = Load(
            scenario,
            command.stream,
            command.caps.tolist(),
            sender,
            model,
            prompts,
            self._records,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def first(self) -> Observed:
        """The observation at time 0. Nothing arrives before the first interval is asked for."""
        self._observed_s = now = self._loop.time()
        return self._observe(now)

    def give_up(self, reason: str, detail: str) -> None:
        """End the episode as soon as it is observed; the first reason counts."""
        if not self._fault:
            self._fault, self._detail = reason, detail
            logger.warning("the episode ends: %s: %s", reason, detail)
            self._faulty.set()

    async def advance(self, caps: npt.NDArray[np.int64]) -> Observed:
        """Put caps in force, wait for the end of the control interval, observe.

        The end is a deadline of the episode's clock, which begins with the first interval: a
        slow agent shortens its own interval.
        """
        if self._final is not None:
            return self._final
        control = self._scenario.control
        if self._step == 0:
            self._begin()
        self._step += 1
        deadline_s = self._start_s + self._step * control.control_interval_s
        began_s = self._loop.time()
        if not self._fault:
            self.load.resize(caps.tolist())
        left_s = deadline_s - began_s
        self._asked_s = math.inf
        if left_s > 0 and not self._fault:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._faulty.wait(), left_s)
        else:
            await asyncio.sleep(0)
        observed = self._observe(began_s)
        self._asked_s = self._loop.time()
        if self._fault or self._step >= control.n_steps:
            await self.stop()
        return observed

    def _begin(self) -> None:
        self._start_s = self._observed_s = self._heard_s = self._loop.time()
        self.load.begin(self._start_s)
        self._tasks = [
            self._loop.create_task(self._scrape_often()),
            self._loop.create_task(self._watch()),
        ]

    async def stop(self) -> None:
        """End the episode: cancel what is in flight and close the records."""
        if self._stopped:
            return
        self._stopped = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await self.load.stop()
        self._records.close()
        self._steps.close()

    def _observe(self, began_s: float) -> Observed:
        control = self._scenario.control
        now = self._loop.time()
        tenants = self.load.observe(now)
        readings = self._metrics.take(now)
        row = self._cluster
        row["time_s"] = self._step * control.control_interval_s
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage"):
            row[name] = readings.gauges[name]
        memory = self._gpu_reading.memory_utilization
        row["gpu_memory_utilization"] = (
            readings.gauges["kv_cache_usage"] if memory != memory else memory
        )
        for name in ("preemptions", "prompt_tokens", "generation_tokens"):
            row[name] = readings.growth[name] if self._step else 0.0
        # what the reward charges for must always be known: at worst, what the client has sent
        sent = float(tenants["mean_in_flight"].sum())
        known = readings.mean_running == readings.mean_running
        row["mean_running"] = (
            readings.mean_running if known else min(sent, float(self._scenario.max_num_seqs))
        )
        energy_j = self._gpu_reading.energy_j
        row["energy_j"] = energy_j - self._energy_j
        self._energy_j = energy_j
        latencies = self.load.latencies()
        row["window_completions"] = latencies.size
        write_percentiles(row, "latency", latencies)

        totals = self._metrics.totals
        queries = totals.get("prefix_queries", 0.0)
        report = {
            "interval_s": now - self._observed_s,
            "overrun_s": max(
                0.0,
                began_s - (self._start_s + self._step * control.control_interval_s),
            ),
            "agent_s": began_s - self._observed_s,
            **self.load.report(now),
            "metrics_age_s": readings.age_s,
            "metrics_stale": readings.stale,
            "metrics_problem": readings.problem,
            "server_restarts": self._metrics.restarts,
            "prefix_hit_rate": totals.get("prefix_hits", 0.0) / queries if queries else 0.0,
            "gpu_power_w": self._gpu_reading.power_w,
            "gpu_utilization": self._gpu_reading.utilization,
            "gpu_unavailable": dict(self._gpu.unavailable),
            "server": self._server,
            "folder": str(self._folder),
            "fault": self._detail,
        }
        self._observed_s = now
        observed = Observed(tenants, row.copy(), report, self._fault)
        if not self._stopped:
            self._steps.append(_step_record(observed))
        return observed

    async def _scrape_often(self) -> None:
        """Read the server's pages, the last of an interval just before its end."""
        interval_s = self._scenario.control.control_interval_s
        period_s = interval_s / math.ceil(interval_s / self._options.scrape_interval_s)
        due_s = self._start_s + 0.9 * period_s
        while True:
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            if await scrape(self._client, self._metrics):
                self._heard_s = self._loop.time()
            self._gpu_reading = await self._loop.run_in_executor(None, self._gpu.read)
            while due_s <= self._loop.time():
                due_s += period_s

    async def _watch(self) -> None:
        """Find out when the episode cannot go on."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            now = self._loop.time()
            found = self._find_fault(now)
            if found is not None:
                self.give_up(*found)
                return
            if now - self._asked_s > self._options.agent_timeout_s:
                self.give_up(
                    "agent_timeout",
                    f"no step was asked for within {self._options.agent_timeout_s:g} s",
                )
                # the load must not go on, so what it is now is what the next step will see
                self._step += 1
                self._final = self._observe(now)
                await self.stop()
                return

    def _find_fault(self, now: float) -> tuple[str, str] | None:
        options, load, metrics = self._options, self.load, self._metrics
        heard_s = max(self._heard_s, load.heard_s)
        if now - heard_s > options.failure_timeout_s:
            problem = metrics.problem or load.last_error
            hung = "no answer" in problem or not problem
            return (
                "server_hung" if hung else "server_unreachable",
                f"no answer for {now - heard_s:.1f} s: {problem}",
            )
        if load.failures >= MIN_FAILURES and (
            now - load.failing_since_s > options.failure_timeout_s
        ):
            return (
                "server_errors",
                f"{load.failures} requests failed in a row, the last one: {load.last_error}",
            )
        if now - load.quiet_since_s > options.stall_timeout_s:
            values = metrics.latest.values if metrics.latest else {}
            return (
                "engine_stalled",
                f"no token for {now - load.quiet_since_s:.1f} s with {load.in_flight} requests in "
                f"flight (engine: {values.get('num_requests_running', math.nan):g} running, "
                f"{values.get('num_requests_waiting', math.nan):g} waiting)",
            )
        return None


async def find_model(
    client: CompletionClient, url: str, options: LiveOptions, wanted: str | None, until_s: float
) -> tuple[str, int | None]:
    """The served model's name and its longest context, once the server answers.

    Args:
        client: reads the server's pages.
        url: of the server, for messages.
        options: with the name of the API key's variable.
        wanted: the model's name; None for the first that the server lists.
        until_s: when to give up, by the event loop's clock.

    Raises:
        NotReadyError: no answer, no such model, or an API key that is wanted.
    """
    loop = asyncio.get_running_loop()
    problem = ""
    while True:
        try:
            status, text = await client.get("/v1/models", SCRAPE_TIMEOUT_S)
            if status in (401, 403):
                raise NotReadyError(
                    f"{url} wants an API key (HTTP {status}); it is taken from the "
                    f"environment variable {options.api_key_env}"
                )
            if status == 200:
                break
            problem = f"/v1/models: HTTP {status}"
        except ConnectionError as error:
            problem = str(error)
        if loop.time() > until_s:
            raise NotReadyError(f"{url} is not ready: {problem}")
        await asyncio.sleep(PROBE_PERIOD_S)
    try:
        served = {card["id"]: card.get("max_model_len") for card in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise NotReadyError(f"{url}/v1/models: not a list of models") from error
    name = wanted or next(iter(served), "")
    if name not in served:
        raise NotReadyError(f"model: got {name!r}; {url} serves {', '.join(served) or 'none'}")
    return name, served[name]


async def scrape(client: CompletionClient, metrics: ServerMetrics) -> bool:
    """Read `/metrics` once; returns whether the server answered at all."""
    loop = asyncio.get_running_loop()
    try:
        status, page = await client.get("/metrics", SCRAPE_TIMEOUT_S)
        if status != 200:
            raise MetricsError(f"/metrics: HTTP {status}")
        metrics.add(parse_metrics(page), loop.time())
    except MetricsError as error:
        metrics.fail(str(error))
    except ConnectionError as error:
        metrics.fail(str(error))
        return False
    return True


async def _version(client: CompletionClient) -> str | None:
    """The server's version by its own account; None where it has none to tell."""
    with contextlib.suppress(ConnectionError, ValueError, KeyError, TypeError):
        status, text = await client.get("/version", SCRAPE_TIMEOUT_S)
        if status == 200:
            return str(json.loads(text)["version"])
    return None


def _step_record(observed: Observed) -> dict[str, Any]:
    telemetry = Telemetry(
        observed.tenants.view(np.float64).reshape(len(observed.tenants), -1),
        observed.cluster.reshape(1).view(np.float64),
    )
    report = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in observed.report.items()
        if name not in ("server", "folder", "gpu_unavailable")
    }
    return {**telemetry.to_dict(), "live": report, "truncation_reason": observed.fault or None}


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
