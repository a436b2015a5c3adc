"""`backend="live"`: a real vLLM server behind the Backend protocol."""

from __future__ import annotations

import copy
import secrets
import subprocess
import sys
import time
import weakref
from datetime import UTC, datetime
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.base import BackendError, RequestOutcomes
from vllm_tenant_tuning.backends.live.messages import (
    Advance,
    Fault,
    Observed,
    Outcomes,
    Refused,
    Start,
)
from vllm_tenant_tuning.backends.live.options import live_options
from vllm_tenant_tuning.backends.live.records import read_outcomes
from vllm_tenant_tuning.backends.live.server import VLLMServer
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE
from vllm_tenant_tuning.workload import RequestStream

ANSWER_MARGIN_S = 10.0
"""How much longer than it should take the load process is waited for."""

LAUNCH_TIMEOUT_S = 60.0
"""How long the load's own processes may take to start; seconds, on a machine that is not busy."""

POLL_S = 0.1
LOG_FILE = "server.log"
LOAD_LOG_FILE = "load.log"


class LiveError(BackendError):
    """An episode that cannot begin on this server."""


class LiveBackend:
    """One live server (a `Backend`).

    The load runs in a process of its own, which ends with this one. A step returns by the wall
    clock: interval k ends `k * control_interval_s` after the first step was asked for, which is
    when the episode's clock begins.

    Args:
        scenario: the task.
        n_clusters: 1.
        options: see `LiveOptions`.

    Raises:
        ValueError: options that are refused, or more than one cluster.
        ServerError: a server to be started whose command or port is not there.

    Attributes:
        out_dir: the folder of the records.
    """

    def __init__(self, scenario: Scenario, n_clusters: int = 1, **options: Any) -> None:
        if n_clusters != 1:
            raise ValueError(f"live backend: got {n_clusters} clusters; a server is one")
        self.n_clusters = 1
        self.telemetry_tenants = np.zeros((1, scenario.n_tenants), TENANT_DTYPE)
        self.telemetry_cluster = np.zeros(1, CLUSTER_DTYPE)
        self._scenario = scenario
        self._options = live_options(options)
        self._server = (
            VLLMServer(self._options, scenario.engine) if self._options.serve is not None else None
        )
        self.out_dir = Path(
            self._options.out_dir or f"runs/live-{datetime.now(UTC):%Y%m%dT%H%M%S}"
        ).absolute()
        self._salt = self._options.salt
        if self._salt is None:
            self._salt = secrets.randbits(62)
        self._episodes = 0
        self._warm_starts = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._fault = self._detail = ""
        self._folder: Path | None = None
        self._report: dict[str, Any] = {}
        self._closed = False

    def __getstate__(self) -> Any:
        raise TypeError(
            "live backend: one server has one load; make another environment instead of a copy"
        )

    def reset(self, cluster: int, stream: RequestStream, caps: npt.NDArray[np.int64]) -> None:
        """Start an episode on the server, once it is healthy and idle, and observe it at time 0.

        Raises:
            LiveError: no episode can begin on the server; it may be tried again.
            ServerError: the server could not be started.
        """
        assert not self._closed
        options = self._options
        self.out_dir.mkdir(parents=True, exist_ok=True)
        if self._server is not None and not self._server.is_running:
            self._server.start(self.out_dir / LOG_FILE)
        if self._process is None or self._process.poll() is not None:
            self._launch()
        while (folder := self.out_dir / f"episode-{self._episodes:04d}").exists():
            self._episodes += 1
        starts = self._server.starts if self._server is not None else 0
        url = self._server.url if self._server is not None else options.url
        assert url is not None
        assert self._salt is not None
        note: dict[str, Any] = {"began": datetime.now(UTC).isoformat(timespec="seconds")}
        if self._server is not None:
            note["command"] = self._server.command
        self._folder = folder
        start = Start(
            url=url,
            stream=stream,
            caps=np.array(caps, np.int64),
            salt=self._salt + self._episodes,
            warm_up=starts != self._warm_starts,
            folder=folder,
            note=note,
        )
        answer = self._ask(start, options.reset_timeout_s + LAUNCH_TIMEOUT_S)
        if not isinstance(answer, Observed):
            raise LiveError(answer.message if isinstance(answer, Refused) else self._detail)
        self._warm_starts = starts
        self._episodes += 1
        self._fault = ""
        self._take(answer)

    def advance(self, caps: npt.NDArray[np.int64], active: npt.NDArray[np.bool_]) -> None:
        """Run one control interval by the wall clock (see `Backend.advance`)."""
        if not active[0] or self._process is None:  # the load is gone: the fault stays
            return
        timeout_s = self._scenario.control.control_interval_s + ANSWER_MARGIN_S
        answer = self._ask(Advance(np.array(caps[0], np.int64)), timeout_s)
        if isinstance(answer, Observed):
            self._take(answer)
        elif isinstance(answer, Refused):
            raise LiveError(answer.message)
        else:
            self._report = self._report | {"fault": self._detail}

    def faults(self) -> dict[int, str]:
        """Why the episode cannot go on: a name, whose sentence is in `extra_info`."""
        return {0: self._fault} if self._fault else {}

    def outcomes(self, cluster: int) -> RequestOutcomes:
        """What has become of every request of the episode so far.

        Where the load process has died, of those that the records know of.
        """
        answer = None
        if self._process is not None and self._process.poll() is None:
            answer = self._ask(Outcomes(), ANSWER_MARGIN_S)
        if isinstance(answer, RequestOutcomes):
            return answer
        assert self._folder is not None
        return read_outcomes(self._folder)

    def extra_info(self, cluster: int) -> dict[str, Any]:
        """What only a live server can tell, as `live`."""
        return {"live": copy.deepcopy(self._report)}

    def close(self) -> None:
        """End the load, then the server if it is our own."""
        self._closed = True
        self._end_load()
        if self._server is not None:
            self._server.stop()

    def _take(self, observed: Observed) -> None:
        self.telemetry_tenants[0] = observed.tenants
        self.telemetry_cluster[0] = observed.cluster
        self._report = observed.report
        self._fault = observed.fault

    def _launch(self) -> None:
        """Start the load process.

        Not with multiprocessing: that would import or copy the agent's main module.

        Raises:
            LiveError: it does not start.
        """
        self._end_load()
        ours, theirs = Pipe()
        with (self.out_dir / LOAD_LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm_tenant_tuning.backends.live.process",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self._connection = ours
        self._end = weakref.finalize(self, _end_process, self._process, ours)
        try:
            ours.send((self._scenario, self._options))
            started = ours.poll(LAUNCH_TIMEOUT_S)
            if started:
                ours.recv()
        except (EOFError, OSError):
            started = False
        if not started:
            self._end_load()
            raise LiveError(
                f"the load process did not start; its log: {self.out_dir / LOAD_LOG_FILE}"
            )

    def _end_load(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._connection = self._end = None

    def _ask(self, command: Any, timeout_s: float) -> Any:
        """Send a command and wait for the answer; None, and a fault, where none comes."""
        assert self._connection is not None
        assert self._process is not None
        until_s = time.monotonic() + timeout_s
        told = False
        try:
            self._connection.send(command)
            while not self._connection.poll(POLL_S):
                server = self._server
                if server is not None and server.exit_status is not None and not told:
                    self._connection.send(
                        Fault("server_exited", f"vllm serve ended with {server.exit_status}")
                    )
                    told = True
                if time.monotonic() > until_s:
                    self._give_up("load_hung", f"the load process is silent for {timeout_s:g} s")
                    return None
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._give_up("load_died", f"the load process is gone ({error!r})")
            return None
        except BaseException:
            # Ctrl-C, say: stop sending; the next reset starts afresh
            self._give_up("interrupted", "the agent was interrupted while it waited")
            raise

    def _give_up(self, reason: str, detail: str) -> None:
        log = self.out_dir / LOAD_LOG_FILE
        self._fault, self._detail = reason, f"{detail}; its log: {log}"
        self._end_load()


def _end_process(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    """Close the socket: the load process ends its episode, writes its records and goes."""
    connection.close()
    try:
        process.wait(ANSWER_MARGIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
