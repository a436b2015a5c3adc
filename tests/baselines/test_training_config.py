"""Hyperparameter files: overrides, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_tenant_tuning import scenario_names
from vllm_tenant_tuning.agents.rl import ALGORITHMS
from vllm_tenant_tuning.baselines.training_config import (
    RunConfig,
    TrainingConfigError,
    load_run_config,
    load_training_config,
    write_yaml,
)


@pytest.fixture
def default() -> dict[str, Any]:
    return load_training_config("ppo", "none").model_dump(mode="json")


def written(folder: Path, content: Any) -> Path:
    file = folder / "training.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packaged_hyperparameters_fit_every_scenario(algorithm: str, tmp_path: Path) -> None:
    for name in scenario_names():
        training = load_training_config(algorithm, name)
        config = RunConfig(
            algorithm=algorithm,
            scenario=name,
            seed=0,
            trace_dir=None,
            version="0",
            training=training,
        )
        write_yaml(tmp_path / "config.yaml", config)
        assert load_run_config(tmp_path / "config.yaml") == config


def test_what_is_said_last_counts(default: dict[str, Any], tmp_path: Path) -> None:
    file = written(
        tmp_path, {"default": default | {"gamma": 0.5}, "scenarios": {"study": {"n_envs": 128}}}
    )
    assert load_training_config("ppo", "reserved", file).gamma == 0.5
    assert load_training_config("ppo", "reserved", file).n_envs == default["n_envs"]
    assert load_training_config("ppo", "study", file).n_envs == 128
    assert load_training_config("ppo", "study", file, n_envs=256).n_envs == 256
    assert load_training_config("ppo", "study", file, n_envs=None).n_envs == 128


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("default", {"gama": 0.9}, "default: gama: unknown key; accepted are total_timesteps, "),
        ("default", {"gamma": 1.5}, "default: gamma: got 1.5; Input should be less than or equal"),
        ("default", {"n_steps": None}, "default: n_steps: got None"),
        ("default", {"n_epochs": True}, "default: n_epochs: got true; accepted are numbers"),
        ("default", {"net_arch": []}, "default: net_arch"),
        ("default", {"batch_size": 1000}, r"batch_size \(1000\) must divide n_envs \* n_steps"),
        ("default", {"activation": "gelu"}, "activation: got 'gelu'; Input should be 'tanh' or"),
        ("default", {"lstm_hidden_size": 8}, "lstm_hidden_size: unknown key"),
        ("study", {"clip_range": "wide"}, "scenarios.study: clip_range: got 'wide'"),
        ("study", 3, "scenarios.study: got 3; a mapping"),
    ],
)
def test_wrong_values_are_refused_by_name(
    default: dict[str, Any], tmp_path: Path, section: str, changes: Any, message: str
) -> None:
    content: dict[str, Any] = {"default": default, "scenarios": {"study": {}}}
    if section == "default":
        content["default"] = default | changes
    else:
        content["scenarios"]["study"] = changes
    with pytest.raises(TrainingConfigError, match=message) as caught:
        load_training_config("ppo", "reserved", written(tmp_path, content))
    assert "training.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_none_are_refused(default: dict[str, Any], tmp_path: Path) -> None:
    for content, message in (
        ("a: [", "cannot be read"),
        ("- 1", "a mapping is accepted"),
        ("default: 1", "default: got 1; a mapping is accepted"),
        ({"default": default, "extra": {}}, "extra: unknown key; accepted are default, scenarios"),
        ({"default": default, "scenarios": [1]}, "scenarios: got"),
        ({"default": {"gamma": 0.9}}, "n_envs: missing, a value is required"),
    ):
        with pytest.raises(TrainingConfigError, match=message):
            load_training_config("ppo", "study", written(tmp_path, content))
    with pytest.raises(TrainingConfigError, match=r"absent\.yaml: cannot be read"):
        load_training_config("ppo", "study", tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match="algorithm: got 'dqn'; accepted are ppo, maskable-ppo"):
        load_training_config("dqn", "study")


def test_hyperparameters_must_be_those_of_the_algorithm() -> None:
    with pytest.raises(ValueError, match="accepted for recurrent-ppo is RecurrentTrainingConfig"):
        RunConfig(
            algorithm="recurrent-ppo",
            scenario="study",
            seed=0,
            trace_dir=None,
            version="0",
            training=load_training_config("ppo", "study"),
        )
