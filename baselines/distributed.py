"""Tasks on a Ray cluster: results as they come, and tasks played again where a node died."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import vllm_tenant_tuning
from vllm_tenant_tuning.scenario import Scenario, TraceArrivals
from vllm_tenant_tuning.workload.traces import find_trace

R = TypeVar("R")

CONNECT_TIMEOUT_S = 30.0
"""How long a cluster may take to answer; Ray itself would try for minutes."""

MAX_RETRIES = 10
"""How often a task is played again after its worker or node died."""

_ADDRESS = re.compile(r"auto|(ray://)?(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):\d{1,5}")

# In a process of its own: a connection that fails can hang in it, or bring it down.
_PROBE = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
ray.shutdown()
"""


@dataclass(frozen=True, eq=False)
class Files:
    """Files on their way to a worker or back from it.

    Attributes:
        content: by path, relative to the folder they were read from.
    """

    content: dict[str, bytes]

    @classmethod
    def read(cls, folder: Path) -> Files:
        """All files in a folder and below it; none where there is no folder."""
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return cls({path.relative_to(folder).as_posix(): path.read_bytes() for path in paths})

    def write(self, folder: Path) -> None:
        """Put the files into a folder, which is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.content.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def trace_files(scenario: Scenario, trace_dir: str | Path | None) -> Files:
    """The traces that a scenario replays, to be written into a worker's `trace_dir`.

    Raises:
        TraceError: a trace that is missing.
        ValueError: a trace that is not named by a path inside `trace_dir`.
    """
    content = {}
    for tenant in scenario.tenants:
        if isinstance(tenant.arrivals, TraceArrivals):
            name = Path(tenant.arrivals.file)
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(
                    f"trace '{name}': accepted on a Ray cluster is a path inside the folder of "
                    "--trace-dir, from which traces are sent to the workers"
                )
            content[name.as_posix()] = find_trace(name, trace_dir).read_bytes()
    return Files(content)


class RayCluster:
    """A running Ray cluster.

    Its workers need this package in the driver's version, with the extras that the tasks use.

    Args:
        address: `auto` (the cluster of this machine), `HOST:PORT` (the head's, from a machine of
            the cluster) or `ray://HOST:PORT` (Ray Client's, from anywhere).

    Raises:
        ValueError: not an address.
        ImportError: the extra `ray` is not installed.
        ConnectionError: no cluster answered within `CONNECT_TIMEOUT_S`, or it refused.
    """

    def __init__(self, address: str) -> None:
        if not _ADDRESS.fullmatch(address):
            raise ValueError(
                f"ray: got '{address}'; accepted are auto, HOST:PORT and ray://HOST:PORT"
            )
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"a Ray cluster needs the extra 'ray' ({error}): "
                "pip install 'vllm-tenant-tuning[ray]'"
            ) from error
        try:
            subprocess.run(
                [sys.executable, "-c", _PROBE, address],
                check=True,
                capture_output=True,
                text=True,
                timeout=CONNECT_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ConnectionError(
                f"ray: no cluster answered at '{address}' within {CONNECT_TIMEOUT_S:.0f} s"
            ) from None
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip() or f"exit status {error.returncode}").splitlines()[-1]
            raise ConnectionError(f"ray: no cluster reached at '{address}': {reason}") from None
        self._address = address

    def run(
        self, function: Callable[..., R], arguments: Iterable[Sequence[Any]]
    ) -> Generator[R, None, None]:
        """Call a function for each tuple of arguments, one core each, wherever there is room.

        A call whose worker or node dies, or whose result is lost with its node, is made again,
        up to `MAX_RETRIES` times; so it must be one that can be. `Files` that are the same object
        in several tuples are sent once. Where all workers have gone, this waits for new ones. The
        connection lasts until the iterator ends or is closed, which ends calls under way.

        Args:
            function: importable on the workers, as are its arguments and results.
            arguments: those of each call.

        Yields:
            Results as they come, in any order.

        Raises:
            Exception: what a call raised, as soon as it did.
            ConnectionError: a call that was lost too often.
        """
        import ray

        ray.init(self._address, logging_level=logging.ERROR, log_to_driver=False)
        try:
            sent: dict[Files, Any] = {}  # hashed by identity

            def argument(value: Any) -> Any:
                if not isinstance(value, Files):
                    return value
                if value not in sent:
                    sent[value] = ray.put(value)
                return sent[value]

            call = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_call)
            pending = [
                call.remote(vllm_tenant_tuning.__version__, function, *map(argument, values))
                for values in arguments
            ]
            while pending:
                (done,), pending = ray.wait(pending)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                except ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[0]
                    raise ConnectionError(
                        f"ray: a task was lost {MAX_RETRIES + 1} times: {reason}"
                    ) from error
                yield result
        finally:
            ray.shutdown()


def _call(version: str, function: Callable[..., R], *values: Any) -> R:
    """On the worker."""
    if version != vllm_tenant_tuning.__version__:
        raise ImportError(
            f"ray: a worker has vllm-tenant-tuning {vllm_tenant_tuning.__version__}, the driver "
            f"{version}; install the same version on both"
        )
    return function(*values)
