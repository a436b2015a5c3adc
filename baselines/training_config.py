"""Hyperparameters and the description of a training run, as files that are checked."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from vllm_tenant_tuning.agents.rl import ALGORITHMS
from vllm_tenant_tuning.schema import Model, YAMLError, explain_errors, parse_yaml

_M = TypeVar("_M", bound=BaseModel)

Share = Annotated[float, Field(gt=0, le=1)]
Coefficient = Annotated[float, Field(ge=0, le=1e3, allow_inf_nan=False)]


class TrainingConfigError(ValueError):
    """Hyperparameters, or a run's configuration, that cannot be used."""


class TrainingConfig(Model):
    """Hyperparameters of PPO (Schulman et al. 2017) and of its kin.

    `total_timesteps`: environment steps over all environments; training ends with the first
    rollout that reaches them.
    `n_envs`, `n_steps`: a rollout is `n_steps` steps in each of `n_envs` environments.
    `batch_size`, `n_epochs`: a rollout is learned `n_epochs` times in minibatches.
    `learning_rate`, `learning_rate_schedule`: Adam's, constant or falling linearly to 0.
    `gamma`, `gae_lambda`: discount, and bias against variance of the advantage.
    `clip_range`: how far the new policy's probability ratio may move.
    `ent_coef`, `vf_coef`, `max_grad_norm`: weights of entropy and value loss, gradient clipping.
    `net_arch`, `activation`: hidden layers of policy and value network each.
    `normalize_observations`, `normalize_rewards`: by running mean and variance.
    `n_stack`: observations of so many control intervals, oldest first, are what the policy sees;
    before the first of an episode they are zeros (after normalisation). Not for RecurrentPPO.
    `hold_bias`: what the policy begins with: the log-probability of a change falls by so much for
    each request of it. 0 begins with all changes alike, a random walk of the caps: with steps of 8
    and caps up to 256 it spends the training where caps bind nothing.
    `checkpoint_timesteps`: a checkpoint is written when so many have passed.
    """

    total_timesteps: Annotated[int, Field(ge=1, le=10**12)]
    n_envs: Annotated[int, Field(ge=1, le=65_536)]
    n_steps: Annotated[int, Field(ge=2, le=1_000_000)]
    batch_size: Annotated[int, Field(ge=2, le=10**9)]
    n_epochs: Annotated[int, Field(ge=1, le=1000)]
    learning_rate: Annotated[float, Field(gt=0, le=1)]
    learning_rate_schedule: Literal["constant", "linear"]
    gamma: Share
    gae_lambda: Share
    clip_range: Share
    ent_coef: Coefficient
    vf_coef: Coefficient
    max_grad_norm: Annotated[float, Field(gt=0, le=1e6)]
    net_arch: Annotated[
        tuple[Annotated[int, Field(ge=1, le=8192)], ...], Field(min_length=1, max_length=16)
    ]
    activation: Literal["tanh", "relu"]
    normalize_observations: bool
    normalize_rewards: bool
    n_stack: Annotated[int, Field(ge=1, le=64)] = 1
    hold_bias: Annotated[float, Field(ge=0, le=100)] = 0.0
    checkpoint_timesteps: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _minibatches_fill_the_rollout(self) -> TrainingConfig:
        if self.n_envs * self.n_steps % self.batch_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) must divide n_envs * n_steps "
                f"({self.n_envs} * {self.n_steps})"
            )
        return self


class RecurrentTrainingConfig(TrainingConfig):
    """Hyperparameters of RecurrentPPO: those of PPO and the LSTM's.

    `lstm_hidden_size`: units of the one LSTM layer that policy and value network have each.
    """

    lstm_hidden_size: Annotated[int, Field(ge=1, le=8192)]

    @model_validator(mode="after")
    def _remembers_by_itself(self) -> RecurrentTrainingConfig:
        if self.n_stack != 1:
            raise ValueError(
                f"n_stack: got {self.n_stack}; accepted for recurrent-ppo is 1, its LSTM remembers"
            )
        return self


class RunConfig(Model):
    """What a training run is, `config.yaml` in its folder; the scenario lies beside it.

    `seed` fixes the weights' start, the sampled actions and the training episodes.
    """

    algorithm: str
    scenario: str
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    trace_dir: str | None
    version: str
    training: RecurrentTrainingConfig | TrainingConfig

    @model_validator(mode="after")
    def _hyperparameters_are_the_algorithms(self) -> RunConfig:
        if type(self.training) is not _config_class(self.algorithm):
            raise ValueError(
                f"training: got {type(self.training).__name__}; accepted for {self.algorithm} is "
                f"{_config_class(self.algorithm).__name__}"
            )
        return self


def write_yaml(file: Path, content: BaseModel) -> None:
    """Write a model as YAML."""
    plain = content.model_dump(mode="json")
    file.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")


def load_run_config(file: Path) -> RunConfig:
    """Read a run's `config.yaml`.

    Raises:
        TrainingConfigError: a file that is missing, or not accepted.
    """
    return load_config(RunConfig, file)


def load_config(model: type[_M], file: Path) -> _M:
    """Read a model as `write_yaml` wrote it.

    Raises:
        TrainingConfigError: a file that is missing, or not accepted.
    """
    return _validated(model, _read(file.read_text, str(file)), str(file))


def load_training_config(
    algorithm: str, scenario: str, file: Path | Traversable | None = None, **changes: Any
) -> TrainingConfig:
    """The hyperparameters for a scenario.

    Args:
        algorithm: one of `agents.rl.ALGORITHMS`.
        scenario: its name; the file's `scenarios` may change the defaults for it.
        file: a YAML file of `default`, all hyperparameters, and `scenarios`, by name what
            differs; None for the packaged one.
        changes: hyperparameters that override the file's; None leaves one as it is.

    Raises:
        TrainingConfigError: a file that cannot be read or values that are not accepted, each
            named with its path, the value and what is accepted.
        ValueError: an unknown algorithm.
    """
    model = _config_class(algorithm)
    if file is None:
        packaged = resources.files("vllm_tenant_tuning.configs") / "training" / f"{algorithm}.yaml"
        label, content = algorithm, _read(packaged.read_text, algorithm)
    else:
        label, content = str(file), _read(file.read_text, str(file))
    for key in content:
        if key not in ("default", "scenarios"):
            raise TrainingConfigError(
                f"training {label}: {key}: unknown key; accepted are default, scenarios"
            )
    default = _mapping(content.get("default"), f"{label}: default")
    by_scenario = _mapping(content.get("scenarios", {}), f"{label}: scenarios")
    _validated(model, default, f"{label}: default")
    for name, differing in by_scenario.items():
        where = f"{label}: scenarios.{name}"
        _validated(model, default | _mapping(differing, where), where)
    given = {name: value for name, value in changes.items() if value is not None}
    return _validated(model, default | by_scenario.get(scenario, {}) | given, label)


def tuned_config_file(algorithm: str, scenario: str) -> Traversable:
    """The packaged hyperparameters that `tune` found for the scenario.

    Args:
        algorithm: one of `agents.rl.ALGORITHMS`.
        scenario: its name.

    Raises:
        TrainingConfigError: none are packaged.
    """
    folder = resources.files("vllm_tenant_tuning.configs") / "training" / "tuned"
    files = {entry.name: entry for entry in folder.iterdir()} if folder.is_dir() else {}
    name = f"{algorithm}-{scenario}.yaml"
    if name not in files:
        known = sorted(each.removesuffix(".yaml") for each in files if each.endswith(".yaml"))
        raise TrainingConfigError(
            f"training: no tuned hyperparameters of {algorithm} for scenario '{scenario}'; "
            f"packaged are {', '.join(known) or 'none'}"
        )
    return files[name]


def _config_class(algorithm: str) -> type[TrainingConfig]:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: got '{algorithm}'; accepted are {', '.join(ALGORITHMS)}")
    return RecurrentTrainingConfig if algorithm == "recurrent-ppo" else TrainingConfig


def changed_training_config(training: TrainingConfig, **changes: Any) -> TrainingConfig:
    """The hyperparameters with some of them changed.

    Raises:
        TrainingConfigError: values that are not accepted.
    """
    return _validated(type(training), training.model_dump() | changes, "hyperparameters")


def _mapping(content: Any, label: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TrainingConfigError(f"training {label}: got {content!r}; a mapping is accepted")
    return content


def _read(read_text: Any, label: str) -> dict[str, Any]:
    try:
        content = parse_yaml(read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise TrainingConfigError(
            f"training {label}: cannot be read: {' '.join(str(error).split())}"
        ) from error
    return _mapping(content, label)


def _validated(model: type[_M], content: dict[str, Any], label: str) -> _M:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise TrainingConfigError(f"training {label}: {explain_errors(error, model)}") from error
