"""One live episode: the load, the watch over the server, and an observation each interval."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.live.client import CompletionClient
from vllm_tenant_tuning.backends.live.gpu import GPUMonitor, GPUReading
from vllm_tenant_tuning.backends.live.load import Load, Prompts, Sender, write_percentiles
from vllm_tenant_tuning.backends.live.messages import Observed, Start
from vllm_tenant_tuning.backends.live.metrics import ServerMetrics
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.backends.live.pages import scrape
from vllm_tenant_tuning.backends.live.records import REQUESTS_FILE, STEPS_FILE, RecordFile
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, Telemetry

logger = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.1
MIN_FAILURES = 3
"""Fewer failed requests than this do not end an episode."""


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
