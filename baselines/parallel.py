"""Tasks side by side in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TypeVar

from joblib import Parallel, delayed

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_here(
    function: Callable[[Task], Result], tasks: Sequence[Task], workers: int | None = None
) -> Generator[Result, None, None]:
    """Give the tasks' results as they end, in any order.

    Args:
        function: importable in another process; called with one task.
        tasks: what it is called with.
        workers: processes, at most one for each task; None for one for each core.
    """
    n_jobs = max(1, min(workers or os.cpu_count() or 1, len(tasks)))
    parallel = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    here = Path.cwd()
    yield from parallel(delayed(_run_in)(here, function, task) for task in tasks)


def _run_in(folder: Path, function: Callable[[Task], Result], task: Task) -> Result:
    # joblib keeps its processes for the next call, in the folder of the first one, while
    # relative paths in a task are meant from the caller's.
    os.chdir(folder)
    return function(task)
