"""Tasks side by side in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from joblib import Parallel, delayed

R = TypeVar("R")


def run_here(
    function: Callable[..., R], arguments: Sequence[Sequence[Any]], workers: int | None = None
) -> Generator[R, None, None]:
    """Call a function for each tuple of arguments, as `RayCluster.run` does on a cluster.

    Args:
        function: importable in another process.
        arguments: those of each call.
        workers: processes, at most one for each call; None for one for each core.

    Yields:
        Results as they come, in any order.
    """
    n_jobs = max(1, min(workers or os.cpu_count() or 1, len(arguments)))
    parallel = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    here = Path.cwd()
    yield from parallel(delayed(_run_in)(here, function, values) for values in arguments)


def _run_in(folder: Path, function: Callable[..., R], values: Sequence[Any]) -> R:
    # joblib keeps its processes for the next call, in the folder of the first one, while
    # relative paths in the arguments are meant from the caller's.
    os.chdir(folder)
    return function(*values)
