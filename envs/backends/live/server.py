"""A vLLM server of our own: started from the scenario's engine section, ended with the backend."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from typing import Any

from vllm_tenant_tuning.backends.base import BackendError
from vllm_tenant_tuning.backends.live import guard
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.engine import ContinuousBatchingEngine, Engine

LOG_LINES = 15
END_TIMEOUT_S = guard.TERM_TIMEOUT_S + 10.0


class ServerError(BackendError):
    """A server that does not start, or not in time."""


def engine_arguments(engine: Engine) -> list[str]:
    """The arguments of `vllm serve` that the engine section of a scenario says."""
    if not isinstance(engine, ContinuousBatchingEngine):
        return ["--max-num-seqs", str(engine.max_num_seqs)]
    limits = engine.scheduler
    arguments = [
        "--max-num-seqs",
        str(limits.max_num_seqs),
        "--max-num-batched-tokens",
        str(limits.max_num_batched_tokens),
        "--max-model-len",
        str(limits.max_model_len),
        "--scheduling-policy",
        engine.scheduling_policy,
    ]
    if engine.num_gpu_blocks_override is not None:
        arguments += ["--num-gpu-blocks-override", str(engine.num_gpu_blocks_override)]
    if engine.long_prefill_token_threshold:
        arguments += ["--long-prefill-token-threshold", str(engine.long_prefill_token_threshold)]
    if engine.max_num_queued_reqs is not None:
        arguments += ["--max-num-queued-reqs", str(engine.max_num_queued_reqs)]
    if not engine.scheduler_reserve_full_isl:
        arguments += ["--no-scheduler-reserve-full-isl"]
    return arguments


class VLLMServer:
    """`vllm serve`, its log, and its end.

    Args:
        options: with `serve` and `model`.
        engine: the scenario's engine section.

    Raises:
        ServerError: no such command, or the port is taken.

    Attributes:
        url: where it listens.
        command: how it is started.
        starts: how often it was started.
    """

    def __init__(self, options: LiveOptions, engine: Engine) -> None:
        assert options.serve is not None
        assert options.model is not None
        binary = shutil.which(options.vllm)
        if binary is None:
            raise ServerError(f"vllm: got {options.vllm!r}; no such command was found")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._log: Path | None = None
        port = options.port or _free_port(options.host)
        _check_port(options.host, port)
        self._port = port
        host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.command = [
            binary,
            "serve",
            options.model,
            "--host",
            options.host,
            "--port",
            str(port),
            *engine_arguments(engine),
            "--disable-uvicorn-access-log",
            *options.serve,
        ]
        self.starts = 0

    @property
    def exit_status(self) -> int | None:
        """Of the server, where it has ended; else None."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, log: Path) -> None:
        """Start it, and return when it is ready.

        Args:
            log: the file that takes what it says; appended to.

        Raises:
            ServerError: it ended, or was not ready in time; with the last lines of its log.
        """
        self.stop()
        _check_port(self._options.host, self._port)
        environment = dict(os.environ)
        key = environment.get(self._options.api_key_env)
        if key:
            environment["VLLM_API_KEY"] = key  # the variable that vLLM itself reads
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, guard.__file__, *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end_process, self._process)
        self.starts += 1
        until_s = time.monotonic() + self._options.ready_timeout_s
        try:
            while not self._is_ready():
                status = self._process.poll()
                if status is not None:
                    raise ServerError(f"vllm serve ended with status {status} {self._last_lines()}")
                if time.monotonic() > until_s:
                    raise ServerError(
                        f"vllm serve was not ready within {self._options.ready_timeout_s:g} s "
                        f"{self._last_lines()}"
                    )
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it with all its children; returns when they are gone."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError, ssl.SSLError):
            return False

    def _last_lines(self) -> str:
        assert self._log is not None
        key = os.environ.get(self._options.api_key_env)
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        text = "\n".join(lines)
        if key:
            text = text.replace(key, "***")
        return f"(log: {self._log}):\n{text}"


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Let go of the guard's pipe, and wait until it has ended the server."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(END_TIMEOUT_S)


def _free_port(host: str) -> int:
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(f"port: {port} on {host} cannot be used: {error.strerror}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
