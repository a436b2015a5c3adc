"""The search for hyperparameters: what it proposes, judges by, keeps and writes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")
pytest.importorskip("optuna")

import optuna
import yaml
from missing_extra import run_without
from optuna.trial import TrialState
from test_env import short
from test_training import same_weights, weights

from vllm_tenant_tuning import scenario_names
from vllm_tenant_tuning.agents.rl import ALGORITHMS, ModelPolicy
from vllm_tenant_tuning.baselines import training, tuning
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.baselines.evaluate import EVALUATION_SEEDS
from vllm_tenant_tuning.baselines.model_returns import ModelReturns, load_model
from vllm_tenant_tuning.baselines.training import train
from vllm_tenant_tuning.baselines.training_config import (
    TrainingConfig,
    TrainingConfigError,
    load_config,
    load_training_config,
    tuned_config_file,
)
from vllm_tenant_tuning.baselines.tuning import Tuning, confirmation_seeds, trial_seeds, tune
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

ROOT = Path(__file__).parents[2]
TUNED = ROOT / "configs" / "training" / "tuned"
SCENARIO = short("reserved", 60.0)
ROLLOUT = 4 * 32
SIZES: dict[str, Any] = {"n_envs": 4, "n_steps": 32, "batch_size": 32, "n_epochs": 3}


def small(algorithm: str = "ppo", **changes: Any) -> TrainingConfig:
    values = SIZES | {"net_arch": [64], "total_timesteps": 6 * ROLLOUT} | changes
    return load_training_config(algorithm, "reserved", **values)


def search(folder: Path, trials: int = 2, **changes: Any) -> Tuning:
    settings: dict[str, Any] = {
        "training": small(),
        "episodes": 3,
        "confirm": 1,
        "training_seeds": 1,
        "workers": 1,
    }
    return tune(SCENARIO, "ppo", folder, trials=trials, **settings | changes)


def study_of(folder: Path) -> Any:
    storage = optuna.storages
    journal = storage.journal.JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name="tuning", storage=storage.JournalStorage(journal))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    folder = tmp_path_factory.mktemp("searched") / "search"
    return folder, search(folder)


# --- what is proposed ---------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_proposals_are_hyperparameters_that_are_accepted(algorithm: str) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    searched = {
        "n_steps",
        "batch_size",
        "n_epochs",
        "learning_rate",
        "gamma",
        "gae_lambda",
        "clip_range",
        "ent_coef",
        "hold_bias",
        "net_arch",
        "lstm_hidden_size" if algorithm == "recurrent-ppo" else "n_stack",
    }
    seen: dict[str, set[Any]] = {name: set() for name in searched}
    for n_envs in (2, 5, 64):
        begun_with = load_training_config(algorithm, "reserved", n_envs=n_envs, batch_size=2)
        for _ in range(60):
            proposed = tuning.suggest(study.ask(), begun_with)
            assert type(proposed) is type(begun_with)
            changed = proposed.model_dump()
            for name, value in begun_with.model_dump().items():
                if name in searched:
                    seen[name].add(changed[name])
                else:
                    assert changed[name] == value
            assert n_envs * proposed.n_steps % proposed.batch_size == 0
            assert 0.8 <= proposed.gamma < 1
    assert all(len(values) >= 3 for values in seen.values())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_packaged_hyperparameters_are_among_the_proposals(algorithm: str) -> None:
    for name in scenario_names():
        packaged = load_training_config(algorithm, name)
        parameters = tuning._parameters(packaged)
        assert parameters is not None
        assert tuning.suggest(optuna.trial.FixedTrial(parameters), packaged) == packaged
    odd = load_training_config(algorithm, "reserved", clip_range=0.9)
    assert tuning._parameters(odd) is None


# --- what a trial is judged by ------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("ppo", {}),
        ("ppo", {"n_stack": 3}),
        ("maskable-ppo", {"n_stack": 2}),
        ("recurrent-ppo", {"lstm_hidden_size": 4}),
    ],
)
def test_the_mean_return_is_that_of_the_policy_episode_by_episode(
    algorithm: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    made = train(
        SCENARIO, algorithm, training=small(algorithm, **changes), run_dir=tmp_path / "run"
    )
    seeds = trial_seeds(4)
    model, normalization = load_model(made.run_dir, algorithm)
    before = normalization.obs_rms.count
    judge = ModelReturns(SCENARIO, seeds)
    n_stack = made.config.training.n_stack
    found = [judge.mean(model, normalization, n_stack) for _ in range(2)]
    policy = ModelPolicy(made.run_dir)
    env = make_env(SCENARIO)
    expected = np.mean([play(env, policy, seed)[0].return_ for seed in seeds])
    assert found == [pytest.approx(expected)] * 2
    assert normalization.obs_rms.count == before


def test_looking_at_a_run_does_not_change_it(tmp_path: Path) -> None:
    changes = {"checkpoint_timesteps": ROLLOUT}
    train(SCENARIO, training=small(**changes), run_dir=tmp_path / "alone")
    judge = ModelReturns(SCENARIO, trial_seeds(3))
    looked: list[int] = []

    def look(model: Any, normalization: Any) -> bool:
        judge.mean(model, normalization, 1)
        looked.append(model.num_timesteps)
        return True

    watched = train(
        SCENARIO, training=small(**changes), run_dir=tmp_path / "watched", on_checkpoint=look
    )
    assert looked == [ROLLOUT * i for i in range(1, 7)]
    assert not watched.interrupted
    assert same_weights(weights(tmp_path / "alone"), weights(tmp_path / "watched"))


def test_a_run_ends_where_it_is_given_up(tmp_path: Path) -> None:
    looked: list[int] = []

    def give_up(model: Any, normalization: Any) -> bool:
        looked.append(model.num_timesteps)
        return len(looked) < 2

    made = train(
        SCENARIO,
        training=small(checkpoint_timesteps=ROLLOUT),
        run_dir=tmp_path / "run",
        on_checkpoint=give_up,
    )
    assert looked == [ROLLOUT, 2 * ROLLOUT]
    assert made.interrupted
    assert 2 * ROLLOUT <= made.timesteps < 3 * ROLLOUT


def test_no_episode_of_a_search_is_of_the_evaluation_or_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []
    original = VLLMTenantTuningVectorEnv.reset

    def recording(self: Any, **arguments: Any) -> Any:
        asked.append(list(arguments["seed"]))
        return original(self, **arguments)

    monkeypatch.setattr(VLLMTenantTuningVectorEnv, "reset", recording)
    search(tmp_path / "search", trials=2)
    of_trials, last = list(trial_seeds(3)), list(confirmation_seeds(3))
    assert {tuple(seeds) for seeds in asked} >= {tuple(of_trials), tuple(last)}
    for seeds in asked:
        if seeds not in (of_trials, last):  # training, of the trials and of the confirmation
            assert seeds[0] in (10_000, 10_000 + training.SEED_STRIDE)
        assert min(seeds) >= 10_000
        assert not set(seeds) & set(EVALUATION_SEEDS)
    assert not set(of_trials) & set(last)
    # beyond the episodes of every run
    assert of_trials[0] > training.first_training_seed(training.MAX_SEED, 10**12 - 1)
    assert trial_seeds(tuning.MAX_EPISODES)[-1] < confirmation_seeds(1)[0]


# --- the search ---------------------------------------------------------------------------


def test_a_search_leaves_what_it_promises(searched: tuple[Path, Tuning]) -> None:
    folder, found = searched
    study = study_of(folder)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    begun_with, proposed = (
        tuning.suggest(optuna.trial.FixedTrial(trial.params), small()) for trial in study.trials
    )
    assert begun_with == small()  # the first trial is what it began with
    assert proposed != small()
    assert sorted(path.name for path in (folder / "trials").iterdir()) == ["00000", "00001"]
    for trial in study.trials:
        run = training.load_run(folder / "trials" / f"{trial.number:05d}")
        assert not run.interrupted
        policy, env = ModelPolicy(run.run_dir), make_env(SCENARIO)
        returns = [play(env, policy, seed)[0].return_ for seed in trial_seeds(3)]
        assert trial.value == pytest.approx(np.mean(returns))
        assert trial.intermediate_values[trial.last_step] == trial.value

    assert (found.trials, found.pruned) == (2, 0)
    assert [candidate.label for candidate in found.candidates] == ["begun with", "trial 1"]
    assert [candidate.training for candidate in found.candidates] == [begun_with, proposed]
    for candidate, name in zip(found.candidates, ("begun-with", "trial-1"), strict=True):
        run_dir = folder / "confirmation" / name / "seed-1"
        policy, env = ModelPolicy(run_dir), make_env(SCENARIO)
        returns = [play(env, policy, seed)[0].return_ for seed in confirmation_seeds(3)]
        assert candidate.returns == (pytest.approx(np.mean(returns)),)
    assert found.best.mean == max(candidate.mean for candidate in found.candidates)


def test_the_same_search_again_trains_nothing_and_a_longer_one_goes_on(
    searched: tuple[Path, Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = searched[1]
    folder = tmp_path / "search"
    shutil.copytree(searched[0], folder)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "train", None)
        assert search(folder) == found
    trained: list[Path] = []
    original = tuning.train

    def recording(*args: Any, **options: Any) -> Any:
        trained.append(options["run_dir"])
        return original(*args, **options)

    monkeypatch.setattr(tuning, "train", recording)
    progress: list[tuple[int, int]] = []
    longer = search(folder, trials=3, on_progress=lambda *given: progress.append(given))
    assert trained == [folder / "trials" / "00002"]
    assert progress == [(2, 3), (3, 3)]
    assert longer.trials == 3


def test_the_same_arguments_propose_the_same_trials(
    searched: tuple[Path, Tuning], tmp_path: Path
) -> None:
    folder, _ = searched
    search(tmp_path / "again")
    first, second = study_of(folder).trials[:2], study_of(tmp_path / "again").trials
    assert [(t.params, t.value) for t in first] == [(t.params, t.value) for t in second]
    search(tmp_path / "other", seed=1)
    assert study_of(tmp_path / "other").trials[1].params != first[1].params


def test_what_was_interrupted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tuning.train

    def interrupted(*args: Any, **options: Any) -> Any:
        stop = {"on_checkpoint": lambda model, normalization: False}
        return original(*args, **options | stop)

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "train", interrupted)  # as Ctrl-C leaves a run
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "search", trials=1)
    (trial,) = study_of(tmp_path / "search").trials
    assert trial.state == TrialState.RUNNING
    found = search(tmp_path / "search", trials=1)
    assert found.trials == 1
    left, again = study_of(tmp_path / "search").trials
    assert (left.state, again.state) == (TrialState.FAIL, TrialState.COMPLETE)
    assert left.params == again.params


def test_a_trial_below_the_median_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_tenant_tuning.baselines import model_returns

    monkeypatch.setattr(tuning, "STARTUP_TRIALS", 2)
    values = iter([10.0] * 6 + [20.0] * 6 + [5.0] * 6 + [30.0] * 6 + [0.0] * 12)
    monkeypatch.setattr(model_returns.ModelReturns, "mean", lambda *args: next(values))
    # all rollouts alike, so that every trial is looked at six times
    monkeypatch.setattr(tuning, "N_STEPS", (32,))
    found = search(tmp_path / "search", trials=3)
    states = [trial.state for trial in study_of(tmp_path / "search").trials]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]
    assert (found.trials, found.pruned) == (3, 1)
    given_up = training.load_run(tmp_path / "search" / "trials" / "00002")
    assert given_up.timesteps < small().total_timesteps
    assert all(candidate.label != "trial 2" for candidate in found.candidates)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "trials: got 0; accepted are whole numbers from 1"),
        ({"confirm": 0}, "confirm: got 0"),
        ({"training_seeds": -1}, "training_seeds: got -1"),
        ({"episodes": 1}, "episodes: got 1; accepted are 2 to 10000"),
        ({"seed": -1}, "seed: got -1; accepted are whole numbers"),
        ({"training": small(n_envs=1, batch_size=16)}, "n_envs: got 1; a search needs at least 2"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        search(tmp_path / "search", **changes)
    assert not (tmp_path / "search").exists()


def test_folders_of_something_else_are_refused(
    searched: tuple[Path, Tuning], tmp_path: Path
) -> None:
    folder, _ = searched
    for changes in ({"episodes": 4}, {"seed": 1}, {"training": small(vf_coef=0.25)}):
        with pytest.raises(ValueError, match="holds a search with other settings"):
            search(folder, **changes)
    (tmp_path / "note.txt").write_text("kept")
    with pytest.raises(ValueError, match="is not empty; accepted is a new one, or a search's"):
        search(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


# --- the command --------------------------------------------------------------------------


def test_the_command_writes_hyperparameters_that_training_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.yaml").write_text(yaml.safe_dump(SCENARIO.model_dump(mode="json")))
    content = {"default": small().model_dump(mode="json")}
    Path("small.yaml").write_text(yaml.safe_dump(content))
    arguments = ["tune", "--scenario", "short.yaml", "--config", "small.yaml", "--trials", "2"]
    arguments += ["--episodes", "3", "--confirm", "1", "--training-seeds", "1", "--workers", "1"]
    assert main(arguments) == 0
    file = Path("runs/tune-reserved-ppo/ppo-reserved.yaml")
    text = file.read_text()
    assert "--trials 2" in text
    assert "2 trials, 0 of them given up early" in text
    assert ", chosen" in text
    assert str(file) in capsys.readouterr().out
    found = load_training_config("ppo", "reserved", file)
    tried = [
        tuning.suggest(optuna.trial.FixedTrial(trial.params), small())
        for trial in study_of(file.parent).trials
    ]
    assert found in [small(), *tried]

    assert main([*arguments, "--seed", "1"]) == 2
    assert "holds a search with other settings" in capsys.readouterr().err


def test_training_takes_tuned_hyperparameters_where_they_are_packaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingConfigError, match="no tuned hyperparameters of ppo for scenario"):
        tuned_config_file("ppo", "nowhere")
    monkeypatch.chdir(tmp_path)
    assert training.main(["--tuned", "--config", "x.yaml", "--scenario", "study"]) == 2
    assert "--tuned: accepted without --config" in capsys.readouterr().err

    file = tmp_path / "tuned.yaml"
    file.write_text(yaml.safe_dump({"default": small(gamma=0.5).model_dump(mode="json")}))
    monkeypatch.setattr(training, "tuned_config_file", lambda algorithm, scenario: file)
    monkeypatch.setattr(training, "evaluate_and_report", lambda *given: None)
    command = ["--tuned", "--scenario", "study", "--timesteps", "128", "--out", "run"]
    assert training.main(command) == 0
    assert training.load_run(Path("run")).config.training.gamma == 0.5


@pytest.mark.parametrize("name", ["ppo-reserved.yaml"])
def test_what_is_packaged_was_tried_and_chosen_as_its_head_says(name: str, tmp_path: Path) -> None:
    algorithm, _, scenario = name.removesuffix(".yaml").rpartition("-")
    packaged = load_training_config(algorithm, scenario, tuned_config_file(algorithm, scenario))
    head = (TUNED / name).read_text(encoding="utf-8").partition("default:")[0]
    folder = tmp_path / "search"  # a journal is locked beside it
    shutil.copytree(ROOT / "baselines" / "results" / "tuning" / scenario, folder)
    begun_with = load_config(tuning.TuningConfig, folder / "tuning.yaml").training
    study = study_of(folder)
    ended = [trial for trial in study.trials if trial.state.is_finished()]
    assert f"# {len(ended)} trials, " in head
    returns = {
        label: [float(value) for value in values.split(", ")]
        for label, values in re.findall(r"#     ([a-z0-9 ]+): [\d.]+ \(([\d., ]+)\)", head)
    }
    best = max(returns, key=lambda label: np.mean(returns[label]))
    assert re.search(rf"#     {best}: .*, chosen$", head, re.MULTILINE)
    if best == "begun with":
        assert packaged == begun_with
    else:
        chosen = study.trials[int(best.removeprefix("trial "))]
        assert packaged == tuning.suggest(optuna.trial.FixedTrial(chosen.params), begun_with)


def test_without_the_extra_one_message_names_it(tmp_path: Path) -> None:
    process = run_without("optuna", ["tune", "--scenario", "study", "--out", str(tmp_path / "s")])
    assert process.returncode == 2
    assert "pip install 'vllm-tenant-tuning[tune]'" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "s").exists()
