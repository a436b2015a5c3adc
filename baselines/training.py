"""Training a policy: one run, one folder, which can be interrupted and resumed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_tenant_tuning
from vllm_tenant_tuning.agents.rl import (
    ALGORITHMS,
    MODEL_FILE,
    RUN_CONFIG_FILE,
    algorithm_class,
)
from vllm_tenant_tuning.baselines.command_line import RAY_HELP, parse_seeds
from vllm_tenant_tuning.baselines.training_config import (
    RunConfig,
    TrainingConfig,
    changed_training_config,
    load_run_config,
    load_training_config,
    tuned_config_file,
    write_yaml,
)
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

if TYPE_CHECKING:
    from vllm_tenant_tuning.baselines.training_session import OnCheckpoint

SCENARIO_FILE = "scenario.yaml"
CHECKPOINT_FOLDER = "checkpoints"
CURVE_FILE = "curve.jsonl"

FIRST_TRAINING_SEED = 10_000
"""Evaluation seeds are 0 to 999."""

SEED_STRIDE = 10**12
"""Between the first training seeds of two runs; no run has more timesteps than this."""

MAX_SEED = 2**32 - 1
"""The largest seed of a run."""


@dataclass(frozen=True)
class TrainingRun:
    """A training run as it lies in its folder.

    Attributes:
        run_dir: the folder.
        config: algorithm, seed and hyperparameters.
        scenario: the task.
        timesteps: trained in all.
        curve: one point a rollout: `timesteps`, `wall_s`, `reward_mean` (per control interval),
            `episodes` (that ended in it) and over those `return_mean` with its 95 % interval
            `return_low` to `return_high`, `drops_mean` and `throughput_rps_mean` (None without
            any).
        interrupted: whether it was stopped before its end.
    """

    run_dir: Path
    config: RunConfig
    scenario: Scenario
    timesteps: int
    curve: tuple[dict[str, Any], ...]
    interrupted: bool

    @property
    def model_path(self) -> Path:
        """The trained model."""
        return self.run_dir / MODEL_FILE


def train(
    scenario: str | Path | Scenario,
    algorithm: str = "ppo",
    *,
    seed: int = 0,
    training: TrainingConfig | None = None,
    trace_dir: str | Path | None = None,
    run_dir: str | Path | None = None,
    progress: bool = False,
    on_checkpoint: OnCheckpoint | None = None,
) -> TrainingRun:
    """Train a policy.

    The folder gets `config.yaml` and `scenario.yaml`, `curve.jsonl` and TensorBoard's `tb/` as
    they come, `checkpoints/`, and `model.zip` with `vecnormalize.pkl` of the newest checkpoint.
    The first Ctrl-C ends the training after the step at hand and keeps everything.

    Args:
        scenario: a packaged scenario's name, a path, or a `Scenario`.
        algorithm: "ppo", "maskable-ppo" or "recurrent-ppo".
        seed: of weights, sampled actions and training episodes; the same seed gives the same
            weights on the same machine.
        training: hyperparameters; None for the packaged ones.
        trace_dir: the folder of the trace files.
        run_dir: a folder that is new or empty; None for one in `runs/` named after the time.
        progress: whether to show a progress bar.
        on_checkpoint: called after each checkpoint with the model and its normalisation; False
            ends the training there.

    Raises:
        ValueError: arguments that are refused, before anything is written.
        ImportError: the extra `train` is not installed.
    """
    task = load_scenario(scenario)
    config = run_config(task, algorithm, seed, training, trace_dir)
    folder = _new_run_dir(config) if run_dir is None else Path(run_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"run folder: '{folder}' is not empty; accepted is a new one, or --resume")
    env = _vector_env(config, task)
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / RUN_CONFIG_FILE, config)
    write_yaml(folder / SCENARIO_FILE, task)
    return _session(folder, config, env, None, progress, on_checkpoint)


def resume(
    run_dir: str | Path,
    *,
    total_timesteps: int | None = None,
    trace_dir: str | Path | None = None,
    progress: bool = False,
) -> TrainingRun:
    """Go on with a run from its newest checkpoint, or from the start where it has none.

    Weights, optimizer, normalisation, timesteps and learning curve continue; the episodes begin
    anew, with seeds that the run has not used.

    Args:
        run_dir: its folder.
        total_timesteps: train until so many in all; None for what the run set out to do.
        trace_dir: the folder of the trace files, if it has moved.
        progress: whether to show a progress bar.

    Raises:
        ValueError: not the folder of a run, or values that are refused.
        ImportError: the extra `train` is not installed.
    """
    folder = Path(run_dir)
    config = load_run_config(folder / RUN_CONFIG_FILE)
    task = load_scenario(folder / SCENARIO_FILE)
    if total_timesteps is not None:
        training = changed_training_config(config.training, total_timesteps=total_timesteps)
        config = config.model_copy(update={"training": training})
    if trace_dir is not None:
        config = config.model_copy(update={"trace_dir": str(trace_dir)})
    env = _vector_env(config, task)
    write_yaml(folder / RUN_CONFIG_FILE, config)
    return _session(folder, config, env, _newest_checkpoint(folder), progress)


def load_run(run_dir: str | Path) -> TrainingRun:
    """A training run as its newest checkpoint left it.

    Raises:
        ValueError: not the folder of a run.
    """
    folder = Path(run_dir)
    config = load_run_config(folder / RUN_CONFIG_FILE)
    checkpoint = _newest_checkpoint(folder)
    timesteps = 0 if checkpoint is None else int(checkpoint.name)
    return TrainingRun(
        folder,
        config,
        load_scenario(folder / SCENARIO_FILE),
        timesteps,
        tuple(_read_curve(folder / CURVE_FILE, timesteps)),
        interrupted=timesteps < config.training.total_timesteps,
    )


def run_config(
    scenario: Scenario,
    algorithm: str,
    seed: int,
    training: TrainingConfig | None,
    trace_dir: str | Path | None,
) -> RunConfig:
    """The configuration of a new run, of arguments as `train` takes them.

    Raises:
        ValueError: arguments that are refused.
    """
    first_training_seed(seed, 0)
    return RunConfig(
        algorithm=algorithm,
        scenario=scenario.name,
        seed=seed,
        trace_dir=None if trace_dir is None else str(trace_dir),
        version=vllm_tenant_tuning.__version__,
        training=training or load_training_config(algorithm, scenario.name),
    )


def evaluate_and_report(run: TrainingRun, seeds: range) -> None:
    """Play the trained policy beside the rules on evaluation seeds, print and report.

    Args:
        run: as `train` or `resume` gave it.
        seeds: evaluation seeds.
    """
    from vllm_tenant_tuning.baselines.comparison import compare
    from vllm_tenant_tuning.baselines.evaluate import RULE_POLICIES

    compare(
        [f"model:{run.run_dir}", *RULE_POLICIES],
        run.scenario,
        seeds,
        run.run_dir,
        trace_dir=run.config.trace_dir,
        learning_curve=[
            (point["timesteps"], point["return_mean"], point["return_low"], point["return_high"])
            for point in run.curve
            if point["episodes"]
        ],
    )


def first_training_seed(seed: int, timesteps: int) -> int:
    """Seed of the first environment; the others count on from it.

    Runs of different seeds, and the sessions of one that was resumed, never share an episode.

    Args:
        seed: the run's.
        timesteps: trained before this session.

    Raises:
        ValueError: a seed whose episodes would meet the evaluation's.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(
            f"seed: got {seed}; accepted are whole numbers from 0 to {MAX_SEED} (training "
            f"episodes then have seeds from {FIRST_TRAINING_SEED} on, away from the evaluation's)"
        )
    return FIRST_TRAINING_SEED + seed * SEED_STRIDE + timesteps


def _session(
    folder: Path,
    config: RunConfig,
    env: VLLMTenantTuningVectorEnv,
    checkpoint: Path | None,
    progress: bool,
    on_checkpoint: OnCheckpoint | None = None,
) -> TrainingRun:
    from vllm_tenant_tuning.baselines.training_session import learn

    done = 0 if checkpoint is None else int(checkpoint.name)
    curve = _read_curve(folder / CURVE_FILE, done)
    learn(
        folder,
        config,
        env,
        checkpoint,
        first_training_seed(config.seed, done),
        curve_file=folder / CURVE_FILE,
        checkpoint_dir=folder / CHECKPOINT_FOLDER,
        wall_s=curve[-1]["wall_s"] if curve else 0.0,
        progress=progress,
        on_checkpoint=on_checkpoint,
    )
    return load_run(folder)


def _vector_env(config: RunConfig, scenario: Scenario) -> VLLMTenantTuningVectorEnv:
    algorithm_class(config.algorithm)  # before anything is written: is the extra there?
    return VLLMTenantTuningVectorEnv(
        config.training.n_envs,
        scenario,
        trace_dir=config.trace_dir,
        autoreset_mode="SAME_STEP",
        n_threads=1,  # a step is so short that waking a second one takes longer
    )


def _new_run_dir(config: RunConfig) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{stamp}-{config.scenario}-{config.algorithm}-seed{config.seed}"


def _newest_checkpoint(folder: Path) -> Path | None:
    names = [path.name for path in (folder / CHECKPOINT_FOLDER).glob("*") if path.name.isdecimal()]
    return folder / CHECKPOINT_FOLDER / max(names) if names else None


def _read_curve(file: Path, timesteps: int) -> list[dict[str, Any]]:
    """The learning curve up to `timesteps`; what lies beyond, or was cut off, is removed."""
    if not file.exists():
        return []
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            point = json.loads(line)
        except json.JSONDecodeError:
            break  # the process was killed while it wrote
        if point["timesteps"] > timesteps:
            break
        kept.append(point)
    file.write_text("".join(json.dumps(point) + "\n" for point in kept), encoding="utf-8")
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Train a policy, or go on with a run, and compare it with the rules.

    Returns:
        0, or 2 with one line on standard error when the input is refused, or 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return _run(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was trained and measured is kept", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    seeds = parse_seeds(options.eval_seeds)
    if options.resume is not None:
        kept = ("scenario", "algorithm", "seed", "seeds", "n_envs", "config", "tuned", "out", "ray")
        for name in kept:
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: a resumed run keeps its own; accepted beside "
                    "--resume are --timesteps, --trace-dir, --eval-seeds"
                )
        run = resume(
            options.resume,
            total_timesteps=options.timesteps,
            trace_dir=options.trace_dir,
            progress=True,
        )
    else:
        if options.seeds is None and options.ray is not None:
            raise ValueError("--ray: accepted for a sweep, beside --seeds")
        scenario = load_scenario(options.scenario or _default_scenario(options.trace_dir))
        algorithm = options.algorithm or "ppo"
        training = load_training_config(
            algorithm,
            scenario.name,
            _hyperparameters(options, algorithm, scenario),
            total_timesteps=options.timesteps,
            n_envs=options.n_envs,
        )
        if options.seeds is not None:
            return _sweep(options, scenario, algorithm, training, seeds)
        run = train(
            scenario,
            algorithm,
            seed=options.seed or 0,
            training=training,
            trace_dir=options.trace_dir,
            run_dir=options.out,
            progress=True,
        )
    if run.interrupted:
        print(
            f"interrupted after {run.timesteps} timesteps, all kept; go on with --resume "
            f"{run.run_dir}",
            file=sys.stderr,
        )
        return 130
    print(f"trained {run.config.algorithm} on {run.scenario.name}: {run.model_path}")
    evaluate_and_report(run, seeds)
    return 0


def _sweep(
    options: argparse.Namespace,
    scenario: Scenario,
    algorithm: str,
    training: TrainingConfig,
    eval_seeds: range,
) -> int:
    from vllm_tenant_tuning.baselines.comparison import compare, progress_bar
    from vllm_tenant_tuning.baselines.distributed import RayCluster
    from vllm_tenant_tuning.baselines.evaluate import RULE_POLICIES, Contender
    from vllm_tenant_tuning.baselines.training_sweep import sweep

    if options.seed is not None:
        raise ValueError("--seed: a sweep has its seeds from --seeds")
    seeds = parse_seeds(options.seeds)
    folder = Path(options.out or f"runs/sweep-{scenario.name}-{algorithm}")
    cluster = None if options.ray is None else RayCluster(options.ray)
    with progress_bar("training") as on_progress:
        runs = sweep(
            scenario,
            algorithm,
            seeds,
            folder,
            training=training,
            trace_dir=options.trace_dir,
            cluster=cluster,
            on_progress=on_progress,
        )
    if any(run.interrupted for run in runs):
        raise KeyboardInterrupt
    print(f"trained {algorithm} on {scenario.name}, {len(runs)} seeds: {folder}")
    trained = [Contender(f"{algorithm}:seed{r.config.seed}", f"model:{r.run_dir}") for r in runs]
    compare(
        [*trained, *RULE_POLICIES],
        scenario,
        eval_seeds,
        folder,
        trace_dir=options.trace_dir,
        cluster=cluster,
    )
    return 0


def _hyperparameters(
    options: argparse.Namespace, algorithm: str, scenario: Scenario
) -> Path | Traversable | None:
    if not options.tuned:
        config: Path | None = options.config
        return config
    if options.config is not None:
        raise ValueError("--tuned: accepted without --config, whose hyperparameters it replaces")
    return tuned_config_file(algorithm, scenario.name)


def _default_scenario(trace_dir: str | None) -> str:
    return "azure" if trace_dir or os.environ.get("VLLM_TENANT_TRACE_DIR") else "azure_like"


def _parser() -> argparse.ArgumentParser:

    parser = argparse.ArgumentParser(
        prog="train",
        description="Train a policy and evaluate it beside the rules.",
    )
    parser.add_argument(
        "--scenario",
        metavar="NAME|FILE",
        help="(default: azure where the traces are given, else azure_like)",
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="(default: ppo)")
    parser.add_argument(
        "--timesteps",
        type=int,
        metavar="N",
        help="environment steps in all (default: the hyperparameters' total_timesteps)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the run (default: 0)")
    parser.add_argument(
        "--seeds",
        metavar="A:B",
        help="a sweep: a run for each seed, A to B - 1, side by side; the same command again goes "
        "on with one that was interrupted (default folder: runs/sweep-SCENARIO-ALGORITHM)",
    )
    parser.add_argument("--ray", metavar="ADDRESS", help=f"with --seeds: {RAY_HELP}")
    parser.add_argument(
        "--n-envs",
        type=int,
        metavar="N",
        help="environments side by side (default: the hyperparameters' n_envs)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="hyperparameters in place of the packaged ones"
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        default=None,
        help="the hyperparameters that `vllm-tenant-tuning tune` found for algorithm and scenario, "
        "where they are packaged",
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    parser.add_argument("--trace-dir", metavar="DIR", help="folder of the trace files")
    parser.add_argument("--out", metavar="DIR", help="the run's folder (default: in runs/)")
    parser.add_argument(
        "--eval-seeds",
        default="100:200",
        metavar="A:B",
        help="evaluated: A to B - 1 (default: %(default)s)",
    )
    return parser
