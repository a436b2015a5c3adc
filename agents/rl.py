"""A trained model as a policy, and where a training run keeps it."""

from __future__ import annotations

import pickle
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.spaces import CLUSTER_FEATURES, ActionDecoder, tenant_features

if TYPE_CHECKING:
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

RUN_CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.zip"
NORMALIZATION_FILE = "vecnormalize.pkl"

_CLASSES = {
    "ppo": ("stable_baselines3", "PPO"),
    "maskable-ppo": ("sb3_contrib", "MaskablePPO"),
    "recurrent-ppo": ("sb3_contrib", "RecurrentPPO"),
}

ALGORITHMS = tuple(_CLASSES)
"""What can be trained and loaded."""


def algorithm_class(algorithm: str) -> type[OnPolicyAlgorithm]:
    """The class that trains and loads an algorithm's models.

    Args:
        algorithm: one of `ALGORITHMS`.

    Raises:
        ValueError: an unknown algorithm.
        ImportError: the extra `train` is not installed.
    """
    if algorithm not in _CLASSES:
        raise ValueError(f"algorithm: got '{algorithm}'; accepted are {', '.join(ALGORITHMS)}")
    module, name = _CLASSES[algorithm]
    try:
        found: type[OnPolicyAlgorithm] = getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(
            f"{algorithm} needs the extra 'train' ({error}): "
            "pip install 'vllm-tenant-tuning[train]'"
        ) from error
    return found


class ModelPolicy:
    """The most probable action of a trained model.

    Observations are normalised with the statistics of the training; MaskablePPO gets the masks
    of the caps at hand; RecurrentPPO starts every episode with an empty state. A model that was
    trained on the observations of several control intervals (`n_stack` in the run's
    configuration) gets the last ones of the episode, oldest first, zeros before the first, as
    Stable-Baselines3's VecFrameStack gives them behind VecNormalize. Sets the process to one
    PyTorch thread: more are in each other's way for a single observation. Model files can run
    code when they are read, so load only those you trust.

    Args:
        path: the folder of a training run or of one of its checkpoints, or the `model.zip` in it.

    Attributes:
        name: the algorithm.
        n_stack: observations that the model sees at once.

    Raises:
        ValueError: files that are missing or cannot be read.
        ImportError: the extra `train` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        is_file = self._path.suffix == ".zip"
        folder = self._path.parent if is_file else self._path
        model_file = self._path if is_file else folder / MODEL_FILE
        normalization_file = folder / NORMALIZATION_FILE
        for file in (model_file, normalization_file):
            if not file.is_file():
                raise ValueError(
                    f"model '{path}': no file {file}; accepted is the folder of a training run, or "
                    f"its {MODEL_FILE} with {NORMALIZATION_FILE} beside it"
                )
        self.name, self.n_stack = self._trained(folder)
        model_class = algorithm_class(self.name)

        import torch

        torch.set_num_threads(1)
        try:
            self._model = model_class.load(model_file, device="cpu")
            normalization = pickle.loads(normalization_file.read_bytes())
        except Exception as error:  # whatever a broken archive or pickle raises
            raise ValueError(f"model '{path}': cannot be read: {error}") from error
        self._mean, self._scale = 0.0, 1.0
        self._clip = np.inf
        if normalization.norm_obs:
            self._mean = normalization.obs_rms.mean
            self._scale = np.sqrt(normalization.obs_rms.var + normalization.epsilon)
            self._clip = normalization.clip_obs
        self._state: Any = None

    def initial_caps(self, scenario: Scenario) -> None:
        """The scenario's.

        Raises:
            ValueError: as `reset`, so that a comparison is refused before anything is played.
        """
        self._check_fits(scenario, ActionDecoder(scenario))

    def reset(self, scenario: Scenario, seed: int) -> None:
        """Forget the last episode.

        Raises:
            ValueError: the model was trained on other observations or actions than the
                scenario's.
        """
        self._decoder = ActionDecoder(scenario)
        self._state = None
        n_observed = self._check_fits(scenario, self._decoder)
        self._stack = np.zeros((self.n_stack, n_observed), np.float32)

    def act(
        self, observation: npt.NDArray[np.float32], info: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        """The model's most probable action."""
        normalized = np.clip((observation - self._mean) / self._scale, -self._clip, self._clip)
        self._stack[:-1] = self._stack[1:]
        self._stack[-1] = normalized
        masks = {}
        if self.name == "maskable-ppo":
            masks = {"action_masks": self._decoder.mask(info["caps"][None])}
        action, self._state = self._model.predict(
            self._stack.ravel(), state=self._state, deterministic=True, **masks
        )
        return action

    def _check_fits(self, scenario: Scenario, decoder: ActionDecoder) -> int:
        """The length of the scenario's observation, if the model knows that and its actions."""
        n_observed = len(tenant_features(scenario)) * scenario.n_tenants + len(CLUSTER_FEATURES)
        seen, chosen = self._model.observation_space, self._model.action_space
        expected = (self.n_stack * n_observed,)
        if seen.shape != expected or chosen != decoder.space:
            stack = "" if self.n_stack == 1 else f" (with n_stack {self.n_stack})"
            raise ValueError(
                f"model '{self._path}': trained on observations of shape {seen.shape} and actions "
                f"{chosen}; scenario '{scenario.name}' has {expected}{stack} and {decoder.space}"
            )
        return n_observed

    def _trained(self, folder: Path) -> tuple[str, int]:
        """Algorithm and `n_stack` of the run's configuration, two folders above a checkpoint."""
        for parent in (folder, *folder.absolute().parents[:2]):
            file = parent / RUN_CONFIG_FILE
            if file.is_file():
                try:
                    run = yaml.safe_load(file.read_text(encoding="utf-8"))
                    # runs from before there were stacks have no n_stack
                    return str(run["algorithm"]), int(run.get("training", {}).get("n_stack", 1))
                except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as e:
                    raise ValueError(f"{file}: names no algorithm and n_stack: {e!r}") from e
        raise ValueError(
            f"model '{self._path}': no {RUN_CONFIG_FILE} beside it names its algorithm"
        )
