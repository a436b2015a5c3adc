"""Search for hyperparameters with Optuna, on training seeds alone.

A trial is a training run with hyperparameters that Optuna proposes (TPE; Bergstra et al. 2011). At
regular timesteps the policy plays episodes that no training sees, and a trial whose mean return
then lies below the median of the others is given up (`MedianPruner`). A single run is one draw
from a wide distribution, so the best trials and the hyperparameters that the search began with
are trained again with several seeds, and the highest mean over them on further episodes wins.

All episodes have seeds beyond every training run's, far from the evaluation's 0 to 999. What has
been tried is kept in an Optuna journal, so that an interrupted search goes on where it stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import vllm_tenant_tuning
from vllm_tenant_tuning.agents.rl import algorithm_class
from vllm_tenant_tuning.baselines.parallel import run_here
from vllm_tenant_tuning.baselines.training import (
    MAX_SEED,
    SCENARIO_FILE,
    SEED_STRIDE,
    TrainingRun,
    first_training_seed,
    train,
)
from vllm_tenant_tuning.baselines.training_config import (
    RecurrentTrainingConfig,
    RunConfig,
    TrainingConfig,
    changed_training_config,
    load_config,
    load_training_config,
    write_yaml,
)
from vllm_tenant_tuning.baselines.training_sweep import sweep
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.workload import Workload

if TYPE_CHECKING:
    import optuna

TUNING_FILE = "tuning.yaml"
JOURNAL_FILE = "journal.log"
TRIALS_FOLDER = "trials"
CONFIRMATION_FOLDER = "confirmation"

REPORTS = 6
"""How often a trial is looked at, the end included."""

STARTUP_TRIALS = 8
"""So many trials are proposed at random, and none is given up before so many have ended."""

_FIRST_SEED = first_training_seed(MAX_SEED, 0) + SEED_STRIDE
MAX_EPISODES = 10_000
TRIAL_SEED = 0
"""Seed of every trial's training: trials differ in their hyperparameters alone."""

N_STEPS = (32, 64, 128, 256)
N_MINIBATCHES = (4, 8, 16, 32)
NET_ARCHS = {"64": (64,), "32-32": (32, 32), "64-64": (64, 64), "128-128": (128, 128)}
HOLD_BIASES = (0.0, 0.3, 1.0, 3.0)
N_STACKS = (1, 2, 4, 8)
LSTM_SIZES = (32, 64, 128)


def trial_seeds(episodes: int) -> range:
    """Seeds of the episodes that trials are judged by."""
    return range(_FIRST_SEED, _FIRST_SEED + episodes)


def confirmation_seeds(episodes: int) -> range:
    """Seeds of the episodes that the last choice is made by."""
    return range(_FIRST_SEED + MAX_EPISODES, _FIRST_SEED + MAX_EPISODES + episodes)


class TuningConfig(RunConfig):
    """What a search is, `tuning.yaml` in its folder; the scenario lies beside it.

    As of a run, but that `seed` is of the proposals and `training` is where the search begins, and
    gives what it leaves as it is. `episodes`: how many a policy is judged by.
    """

    episodes: int


@dataclass(frozen=True)
class Candidate:
    """Hyperparameters that were trained again with several seeds.

    Attributes:
        label: "trial N", or "begun with".
        training: the hyperparameters.
        returns: mean return over the confirmation's episodes, one for each training seed.
    """

    label: str
    training: TrainingConfig
    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the training seeds."""
        return float(np.mean(self.returns))


@dataclass(frozen=True)
class Tuning:
    """What a search found.

    Attributes:
        best: the candidate of the highest mean.
        candidates: all that were trained again, those that the search began with first.
        trials: that ended.
        pruned: of these, that were given up early.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    trials: int
    pruned: int


def tune(
    scenario: str | Path | Scenario,
    algorithm: str,
    out_dir: str | Path,
    *,
    trials: int,
    training: TrainingConfig | None = None,
    episodes: int = 32,
    seed: int = 0,
    confirm: int = 3,
    training_seeds: int = 3,
    trace_dir: str | Path | None = None,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tuning:
    """Search hyperparameters, or go on with a search in the same folder.

    One search uses a folder at a time: trials that are found unfinished count as interrupted, and
    are made again. With one worker the same arguments propose the same trials.

    Args:
        scenario: a packaged scenario's name, a path, or a `Scenario`; a family too.
        algorithm: one of `agents.rl.ALGORITHMS`.
        out_dir: the search's folder.
        trials: in all, those that the folder has included.
        training: where the search begins; None for the packaged hyperparameters. The timesteps
            of a trial, `n_envs`, the learning rate's schedule, the activation, `vf_coef`,
            `max_grad_norm` and the normalisation stay as they are.
        episodes: that a policy is judged by.
        seed: of the proposals.
        confirm: how many of the best trials are trained again.
        training_seeds: with how many seeds; 1, 2, ... (trials have the seed 0).
        trace_dir: the folder of the trace files.
        workers: trials side by side; None for one on each core.
        on_progress: called with (trials ended, trials in all).

    Raises:
        ValueError: arguments that are refused, or a folder of another search, before anything is
            trained.
        ImportError: the extra `tune` is not installed.
        KeyboardInterrupt: it was interrupted; what has ended is kept.
    """
    for name, value in (
        ("trials", trials),
        ("confirm", confirm),
        ("training_seeds", training_seeds),
    ):
        if value < 1:
            raise ValueError(f"{name}: got {value}; accepted are whole numbers from 1")
    if not 2 <= episodes <= MAX_EPISODES:
        raise ValueError(f"episodes: got {episodes}; accepted are 2 to {MAX_EPISODES}")
    first_training_seed(seed, 0)
    task = load_scenario(scenario)
    Workload(task, trace_dir)
    begun_with = training or load_training_config(algorithm, task.name)
    if begun_with.n_envs < 2:
        raise ValueError(f"n_envs: got {begun_with.n_envs}; a search needs at least 2")
    _require_extra(algorithm)
    config = TuningConfig(
        algorithm=algorithm,
        scenario=task.name,
        seed=seed,
        trace_dir=None if trace_dir is None else str(trace_dir),
        version=vllm_tenant_tuning.__version__,
        training=begun_with,
        episodes=episodes,
    )
    folder = Path(out_dir)
    _claim(folder, config, task)
    study = _study(folder, config, 0)
    _repeat_unfinished(study)
    if not study.get_trials(deepcopy=False) and (known := _parameters(begun_with)) is not None:
        study.enqueue_trial(known)
    done = len(_ended(study))
    if on_progress is not None:
        on_progress(done, trials)
    tasks = [(folder, config, task, number) for number in range(done, trials)]
    with closing(run_here(_run_trial, tasks, workers)) as ended:
        for whole in ended:
            if not whole:
                raise KeyboardInterrupt
            done += 1
            if on_progress is not None:
                on_progress(done, trials)
    return _confirmed(folder, config, task, study, confirm, training_seeds)


def suggest(trial: Any, begun_with: TrainingConfig) -> TrainingConfig:
    """Hyperparameters for a trial.

    Args:
        trial: Optuna's, that is asked for values.
        begun_with: gives what is not searched.
    """
    n_steps = trial.suggest_categorical("n_steps", N_STEPS)
    n_minibatches = trial.suggest_categorical("n_minibatches", N_MINIBATCHES)
    changes: dict[str, Any] = {
        "n_steps": n_steps,
        "batch_size": begun_with.n_envs * n_steps // n_minibatches,
        "n_epochs": trial.suggest_int("n_epochs", 3, 20, log=True),
        "learning_rate": _digits(trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True)),
        # a discount is chosen by its horizon
        "gamma": round(1 - _digits(trial.suggest_float("one_minus_gamma", 2e-3, 0.2, log=True)), 6),
        "gae_lambda": _digits(trial.suggest_float("gae_lambda", 0.8, 1.0)),
        "clip_range": _digits(trial.suggest_float("clip_range", 0.1, 0.4)),
        "ent_coef": _digits(trial.suggest_float("ent_coef", 1e-4, 0.05, log=True)),
        "hold_bias": trial.suggest_categorical("hold_bias", HOLD_BIASES),
        "net_arch": NET_ARCHS[trial.suggest_categorical("net_arch", tuple(NET_ARCHS))],
    }
    if isinstance(begun_with, RecurrentTrainingConfig):
        changes["lstm_hidden_size"] = trial.suggest_categorical("lstm_hidden_size", LSTM_SIZES)
    else:
        changes["n_stack"] = trial.suggest_categorical("n_stack", N_STACKS)
    return changed_training_config(begun_with, **changes)


def _parameters(training: TrainingConfig) -> dict[str, Any] | None:
    """What a trial has to be told to propose these hyperparameters; None where it cannot be."""
    from optuna.trial import FixedTrial

    names = {sizes: name for name, sizes in NET_ARCHS.items()}
    values = training.model_dump()
    asked = (
        "n_steps",
        "n_epochs",
        "learning_rate",
        "gae_lambda",
        "clip_range",
        "ent_coef",
        "hold_bias",
    )
    parameters = {name: values[name] for name in asked}
    parameters["n_minibatches"] = training.n_envs * training.n_steps // training.batch_size
    parameters["one_minus_gamma"] = _digits(1 - training.gamma)
    parameters["net_arch"] = names.get(training.net_arch, "")
    size = "lstm_hidden_size" if isinstance(training, RecurrentTrainingConfig) else "n_stack"
    parameters[size] = values[size]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a value out of its range
            proposed = suggest(FixedTrial(parameters), training)
    except (ValueError, UserWarning):
        return None
    return parameters if proposed == training else None


def _digits(value: float) -> float:
    """Three significant digits: more would say what no search can know."""
    return float(f"{value:.3g}")


def _require_extra(algorithm: str) -> None:
    try:
        import optuna  # noqa: F401

        algorithm_class(algorithm)
    except ImportError as error:
        raise ImportError(
            f"a search needs the extra 'tune' ({error}): pip install 'vllm-tenant-tuning[tune]'"
        ) from error


def _claim(folder: Path, config: TuningConfig, scenario: Scenario) -> None:
    """Make the folder of a new search, or check that it is this one's."""
    file = folder / TUNING_FILE
    if file.is_file() and (folder / SCENARIO_FILE).is_file():
        found = load_config(TuningConfig, file).model_copy(update={"version": config.version})
        if (found, load_scenario(folder / SCENARIO_FILE)) == (config, scenario):
            return
        raise ValueError(
            f"folder: '{folder}' holds a search with other settings; accepted is the search with "
            "the settings it began with, or another folder"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: '{folder}' is not empty; accepted is a new one, or a search's")
    folder.mkdir(parents=True, exist_ok=True)
    write_yaml(folder / SCENARIO_FILE, scenario)
    write_yaml(file, config)


def _study(folder: Path, config: TuningConfig, number: int) -> optuna.Study:
    """The search's study; the same for every process and every time it is opened.

    Args:
        folder: the search's.
        config: the search.
        number: of the trial to propose, which the random part of a proposal depends on.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler_seed = np.random.SeedSequence((config.seed, number)).generate_state(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=STARTUP_TRIALS,
            constant_liar=True,  # trials that run are not proposed again
            seed=int(sampler_seed),
        )
    return optuna.create_study(
        study_name="tuning",
        storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE))),
        sampler=sampler,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=2),
        direction="maximize",
        load_if_exists=True,
    )


def _ended(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _repeat_unfinished(study: optuna.Study) -> None:
    """Propose again what an interrupted search left running."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)


def _run_trial(folder: Path, config: TuningConfig, scenario: Scenario, number: int) -> bool:
    """Ask for a trial, train it, and tell how it ended; False where it was interrupted."""
    from optuna.trial import TrialState

    from vllm_tenant_tuning.baselines.model_returns import ModelReturns

    study = _study(folder, config, number)
    trial = study.ask()
    begun_with = config.training
    interval = max(1, begun_with.total_timesteps // REPORTS)
    training = changed_training_config(suggest(trial, begun_with), checkpoint_timesteps=interval)
    judge = ModelReturns(scenario, trial_seeds(config.episodes), config.trace_dir)
    seen: dict[int, float] = {}
    pruned = False

    def goes_on(model: Any, normalization: Any) -> bool:
        nonlocal pruned
        # by timesteps, since rollouts, after which checkpoints come, are not of one length
        step = model.num_timesteps // interval
        if step not in seen:
            seen[step] = judge.mean(model, normalization, training.n_stack)
            trial.report(seen[step], step)
        pruned = model.num_timesteps < training.total_timesteps and trial.should_prune()
        return not pruned

    with closing(judge):
        run = train(
            scenario,
            config.algorithm,
            seed=TRIAL_SEED,
            training=training,
            trace_dir=config.trace_dir,
            run_dir=folder / TRIALS_FOLDER / f"{trial.number:05d}",
            on_checkpoint=goes_on,
        )
    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
    elif not run.interrupted:
        study.tell(trial, seen[max(seen)])
    return pruned or not run.interrupted


def _confirmed(
    folder: Path,
    config: TuningConfig,
    scenario: Scenario,
    study: optuna.Study,
    confirm: int,
    training_seeds: int,
) -> Tuning:
    """Train the best trials again, and what the search began with, and choose among them."""
    from optuna.trial import FixedTrial, TrialState

    ended = _ended(study)
    complete = [trial for trial in ended if trial.state == TrialState.COMPLETE]
    tried = {"begun with": config.training}
    for trial in sorted(complete, key=lambda trial: (-(trial.value or 0.0), trial.number)):
        proposed = suggest(FixedTrial(trial.params), config.training)
        if len(tried) <= confirm and proposed not in tried.values():
            tried[f"trial {trial.number}"] = proposed
    seeds = confirmation_seeds(config.episodes)
    candidates = []
    for label, training in tried.items():
        runs = sweep(
            scenario,
            config.algorithm,
            range(1, training_seeds + 1),
            folder / CONFIRMATION_FOLDER / label.replace(" ", "-"),
            training=training,
            trace_dir=config.trace_dir,
        )
        if any(run.interrupted for run in runs):
            raise KeyboardInterrupt
        returns = tuple(_mean_return(run, scenario, seeds) for run in runs)
        candidates.append(Candidate(label, training, returns))
    best = max(candidates, key=lambda candidate: candidate.mean)
    return Tuning(best, tuple(candidates), len(ended), len(ended) - len(complete))


def _mean_return(run: TrainingRun, scenario: Scenario, seeds: Sequence[int]) -> float:
    from vllm_tenant_tuning.baselines.model_returns import ModelReturns, load_model

    model, normalization = load_model(run.run_dir, run.config.algorithm)
    with closing(ModelReturns(scenario, seeds, run.config.trace_dir)) as judge:
        return judge.mean(model, normalization, run.config.training.n_stack)
