"""Training runs that differ in their seed: side by side on this machine, or on a Ray cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

from vllm_tenant_tuning.agents.rl import RUN_CONFIG_FILE
from vllm_tenant_tuning.baselines.distributed import Files, RayCluster, trace_files
from vllm_tenant_tuning.baselines.parallel import run_here
from vllm_tenant_tuning.baselines.training import (
    SCENARIO_FILE,
    TrainingRun,
    load_run,
    resume,
    run_config,
    train,
)
from vllm_tenant_tuning.baselines.training_config import RunConfig, TrainingConfig, write_yaml
from vllm_tenant_tuning.scenario import Scenario, load_scenario


def sweep(
    scenario: str | Path | Scenario,
    algorithm: str,
    seeds: Sequence[int],
    out_dir: str | Path,
    *,
    training: TrainingConfig | None = None,
    trace_dir: str | Path | None = None,
    cluster: RayCluster | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[TrainingRun]:
    """Train one run for each seed, in `out_dir/seed-N` what `train` leaves in its folder.

    Runs that have ended are not trained again; those that were interrupted go on from their
    newest checkpoint in `out_dir`. On a cluster a run lies on its worker until it ends, and is
    copied to `out_dir` then: one whose node dies is started again.

    Args:
        scenario: a packaged scenario's name, a path, or a `Scenario`.
        algorithm: one of `agents.rl.ALGORITHMS`.
        seeds: one for each run.
        out_dir: the sweep's folder.
        training: hyperparameters; None for the packaged ones.
        trace_dir: the folder of the trace files.
        cluster: trains in place of processes of this machine; traces are sent to it.
        on_progress: called with (runs ended, runs in all).

    Returns:
        The runs, in the order of `seeds`.

    Raises:
        ValueError: arguments that are refused, or a run's folder that holds something else,
            before anything is trained.
        ImportError: the extra `train` is not installed.
    """
    task = load_scenario(scenario)
    configs = {
        Path(out_dir) / f"seed-{seed}": run_config(task, algorithm, seed, training, trace_dir)
        for seed in seeds
    }
    waiting = {
        folder: config for folder, config in configs.items() if not _ended(folder, config, task)
    }
    if cluster is None:
        ended = run_here(_train, [(folder, config, task) for folder, config in waiting.items()])
    else:
        ended = _train_on(cluster, waiting, task, trace_files(task, trace_dir))
    done = len(configs) - len(waiting)
    with closing(ended):
        for _ in ended:
            done += 1
            if on_progress is not None:
                on_progress(done, len(configs))
    return [load_run(folder) for folder in configs]


def _ended(folder: Path, config: RunConfig, scenario: Scenario) -> bool:
    """Whether the folder holds that run, whole; not if it is new, empty, or has a part of it.

    Raises:
        ValueError: it holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if (folder / SCENARIO_FILE).is_file():
        run = load_run(folder)
        found = run.config.model_copy(update={"version": config.version})
        if (found, run.scenario) == (config, scenario):
            return not run.interrupted
    raise ValueError(
        f"run folder: '{folder}' holds something else than this sweep's run; accepted is the "
        "sweep with the settings it began with, or another folder"
    )


def _train(folder: Path, config: RunConfig, scenario: Scenario) -> None:
    if (folder / SCENARIO_FILE).is_file():
        resume(folder, trace_dir=config.trace_dir)
    else:
        train(
            scenario,
            config.algorithm,
            seed=config.seed,
            training=config.training,
            trace_dir=config.trace_dir,
            run_dir=folder,
        )


def _train_on(
    cluster: RayCluster, waiting: dict[Path, RunConfig], scenario: Scenario, traces: Files
) -> Generator[None, None, None]:
    tasks = [
        (str(folder), config, scenario, traces, Files.read(folder))
        for folder, config in waiting.items()
    ]
    with closing(cluster.run(_train_sent, tasks)) as results:
        for name, files in results:
            folder = Path(name)
            partial = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(partial, ignore_errors=True)
            files.write(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            yield


def _train_sent(
    name: str, config: RunConfig, scenario: Scenario, traces: Files, begun: Files
) -> tuple[str, Files]:
    """On the worker: train in a folder that begins with the files `begun`, and give it back."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, trace_dir = Path(temporary) / "run", Path(temporary) / "traces"
        traces.write(trace_dir)
        begun.write(folder)
        _train(folder, config.model_copy(update={"trace_dir": str(trace_dir)}), scenario)
        write_yaml(folder / RUN_CONFIG_FILE, config)
        return name, Files.read(folder)
