"""The command `tune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vllm_tenant_tuning.agents.rl import ALGORITHMS
from vllm_tenant_tuning.baselines.command_line import command_line
from vllm_tenant_tuning.baselines.training_config import load_training_config
from vllm_tenant_tuning.scenario import load_scenario

if TYPE_CHECKING:
    from vllm_tenant_tuning.baselines.tuning import Tuning


def add_tune(commands: Any) -> None:
    """Add the command to the parser of commands."""
    tune = commands.add_parser(
        "tune", help="search hyperparameters of training, on training seeds alone"
    )
    tune.add_argument("--scenario", required=True, metavar="NAME|FILE", help="a family too")
    tune.add_argument("--algorithm", choices=ALGORITHMS, default="ppo", help="default: %(default)s")
    tune.add_argument(
        "--trials",
        type=int,
        default=40,
        metavar="N",
        help="in all; the same command with more goes on (default: %(default)s)",
    )
    tune.add_argument("--timesteps", type=int, metavar="N", help="environment steps of a trial")
    tune.add_argument("--n-envs", type=int, metavar="N", help="environments side by side")
    tune.add_argument(
        "--config", type=Path, metavar="FILE", help="begin with these, not the packaged ones"
    )
    tune.add_argument(
        "--episodes",
        type=int,
        default=32,
        metavar="N",
        help="that a policy is judged by (default: %(default)s)",
    )
    tune.add_argument(
        "--confirm",
        type=int,
        default=3,
        metavar="N",
        help="best trials that are trained again (default: %(default)s)",
    )
    tune.add_argument(
        "--training-seeds",
        type=int,
        default=3,
        metavar="N",
        help="that these are trained with, 1 to N (default: %(default)s)",
    )
    tune.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the proposals (default: %(default)s)"
    )
    tune.add_argument("--workers", type=int, metavar="N", help="trials at once (default: cores)")
    tune.add_argument("--trace-dir", metavar="DIR", help="folder of the trace files")
    tune.add_argument(
        "--out", metavar="DIR", help="the search (default: runs/tune-SCENARIO-ALGORITHM)"
    )
    tune.add_argument(
        "--result",
        metavar="FILE",
        help="the hyperparameters found, for train's --config (default: ALGORITHM-SCENARIO.yaml in "
        "the search's folder)",
    )
    tune.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.comparison import progress_bar
    from vllm_tenant_tuning.baselines.tuning import tune

    scenario = load_scenario(options.scenario)
    algorithm = options.algorithm
    training = load_training_config(
        algorithm,
        scenario.name,
        options.config,
        total_timesteps=options.timesteps,
        n_envs=options.n_envs,
    )
    folder = Path(options.out or f"runs/tune-{scenario.name}-{algorithm}")
    file = Path(options.result or folder / f"{algorithm}-{scenario.name}.yaml")
    with progress_bar("trials") as on_progress:
        found = tune(
            scenario,
            algorithm,
            folder,
            trials=options.trials,
            training=training,
            episodes=options.episodes,
            seed=options.seed,
            confirm=options.confirm,
            training_seeds=options.training_seeds,
            trace_dir=options.trace_dir,
            workers=options.workers,
            on_progress=on_progress,
        )
    head = tuned_head(found, algorithm, scenario.name, command_line(options))
    write_tuned(file, found, head)
    print(head, end="")
    print(f"hyperparameters: {file}")
    return 0


def tuned_head(found: Tuning, algorithm: str, scenario: str, command: str) -> str:
    """Where tuned hyperparameters come from, as comments of a YAML file.

    Args:
        found: what the search found.
        algorithm: one of `agents.rl.ALGORITHMS`.
        scenario: its name.
        command: that made them.
    """
    n_seeds = len(found.best.returns)
    lines = [
        f"Hyperparameters of `{algorithm}` for `{scenario}`, found by",
        "",
        f"    {command}",
        "",
        f"{found.trials} trials, {found.pruned} of them given up early. Mean return over the "
        "confirmation's episodes",
        f"(training seeds of the environment, not those of the trials), {n_seeds} "
        f"training seed{'s' if n_seeds > 1 else ''} each:",
        "",
    ]
    for candidate in found.candidates:
        chosen = ", chosen" if candidate is found.best else ""
        each = ", ".join(f"{value:.4g}" for value in candidate.returns)
        lines.append(f"    {candidate.label}: {candidate.mean:.4g} ({each}){chosen}")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def write_tuned(file: Path, found: Tuning, head: str) -> None:
    """Write the best hyperparameters in the form that `load_training_config` reads.

    Args:
        file: to write; its folder is made where it is missing.
        found: what the search found.
        head: comments that go before them.
    """
    content = {"default": found.best.training.model_dump(mode="json")}
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
    file.write_text(f"{head}{text}", encoding="utf-8")
