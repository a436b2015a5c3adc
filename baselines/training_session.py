"""A session of training with Stable-Baselines3: learning, curve, checkpoints, a clean stop."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import LinearSchedule, set_random_seed
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecMonitor, VecNormalize

from vllm_tenant_tuning.agents.rl import MODEL_FILE, NORMALIZATION_FILE, algorithm_class
from vllm_tenant_tuning.baselines.sb3 import SB3VecEnv
from vllm_tenant_tuning.baselines.training_config import RecurrentTrainingConfig, RunConfig
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

TENSORBOARD_FOLDER = "tb"

OnCheckpoint = Callable[[OnPolicyAlgorithm, VecNormalize], bool]
"""Called with the model and the normalisation at a checkpoint; False ends the training there."""

TORCH_THREADS = 1
"""The networks are too small to share among threads."""


def learn(
    folder: Path,
    config: RunConfig,
    env: VLLMTenantTuningVectorEnv,
    checkpoint: Path | None,
    first_seed: int,
    *,
    curve_file: Path,
    checkpoint_dir: Path,
    wall_s: float,
    progress: bool,
    on_checkpoint: OnCheckpoint | None = None,
) -> None:
    """Train until the run's timesteps are reached, or until the first Ctrl-C.

    Args:
        folder: the run's.
        config: what to train.
        env: with autoreset mode SAME_STEP; closed in the end.
        checkpoint: go on from here; its name is its timesteps.
        first_seed: of the first environment; the others count on from it.
        curve_file: gets a line for each rollout.
        checkpoint_dir: gets the checkpoints.
        wall_s: training time before this session.
        progress: whether to show a progress bar.
        on_checkpoint: called after each checkpoint, the last one too.
    """
    training = config.training
    done = 0 if checkpoint is None else int(checkpoint.name)
    remaining = training.total_timesteps - done
    if remaining <= 0:
        env.close()
        return
    torch.set_num_threads(TORCH_THREADS)
    set_random_seed((config.seed + done) % 2**32)
    monitored = VecMonitor(SB3VecEnv(env), info_keywords=("drops", "throughput_rps"))
    if checkpoint is None:
        venv = VecNormalize(
            monitored,
            norm_obs=training.normalize_observations,
            norm_reward=training.normalize_rewards,
            gamma=training.gamma,
        )
        model = _new_model(config, stacked(venv, training.n_stack))
    else:
        venv = VecNormalize.load(str(checkpoint / NORMALIZATION_FILE), monitored)
        model = algorithm_class(config.algorithm).load(
            checkpoint / MODEL_FILE, env=stacked(venv, training.n_stack), device="cpu"
        )
    model.set_logger(configure(str(folder / TENSORBOARD_FOLDER), ["tensorboard"]))
    venv.seed(first_seed)
    with _stop_at_interrupt() as stop_asked:
        recorder = RunRecorder(
            folder,
            curve_file,
            checkpoint_dir,
            training.checkpoint_timesteps,
            wall_s,
            stop_asked,
            on_checkpoint,
        )
        model.learn(remaining, callback=recorder, reset_num_timesteps=False, progress_bar=progress)
        recorder.save_checkpoint()
    venv.close()


def stacked(venv: VecEnv, n_stack: int) -> VecEnv:
    """The environments with the last `n_stack` observations as one, zeros before the first.

    Outside the normalisation, whose statistics are then those of one observation: a zero is an
    average reading.
    """
    return venv if n_stack == 1 else VecFrameStack(venv, n_stack)


def _new_model(config: RunConfig, venv: VecEnv) -> OnPolicyAlgorithm:
    training = config.training
    activations = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}
    network: dict[str, Any] = {
        "net_arch": list(training.net_arch),
        "activation_fn": activations[training.activation],
    }
    policy = "MlpPolicy"
    if isinstance(training, RecurrentTrainingConfig):
        policy = "MlpLstmPolicy"
        network["lstm_hidden_size"] = training.lstm_hidden_size
    rate: Any = training.learning_rate
    if training.learning_rate_schedule == "linear":
        rate = LinearSchedule(training.learning_rate, 0.0, 1.0)
    model_class: Any = algorithm_class(config.algorithm)
    model: OnPolicyAlgorithm = model_class(
        policy,
        venv,
        learning_rate=rate,
        n_steps=training.n_steps,
        batch_size=training.batch_size,
        n_epochs=training.n_epochs,
        gamma=training.gamma,
        gae_lambda=training.gae_lambda,
        clip_range=training.clip_range,
        ent_coef=training.ent_coef,
        vf_coef=training.vf_coef,
        max_grad_norm=training.max_grad_norm,
        policy_kwargs=network,
        device="cpu",
    )
    if training.hold_bias:
        _begin_by_holding(model, training.hold_bias)
    return model


def _begin_by_holding(model: OnPolicyAlgorithm, hold_bias: float) -> None:
    """Set the bias of the action's logits; the weights' start (a gain of 0.01) leaves it alone."""
    action_net = model.policy.action_net
    assert isinstance(model.action_space, MultiDiscrete)
    assert isinstance(action_net, torch.nn.Linear)
    logits = [-hold_bias * np.abs(np.arange(n) - n // 2) for n in model.action_space.nvec]
    with torch.no_grad():
        action_net.bias.copy_(torch.as_tensor(np.concatenate(logits)))


class RunRecorder(BaseCallback):
    """Writes the learning curve as it comes and checkpoints, and stops when asked.

    Args:
        run_dir: where model and normalisation of the newest checkpoint are kept.
        curve_file: one line is appended for each rollout.
        checkpoint_dir: one folder in it for each checkpoint, named after its timesteps.
        checkpoint_timesteps: a checkpoint is due when so many have passed since the last.
        wall_s: training time before this session.
        stop_asked: asked after every step whether to end the training there.
        on_checkpoint: called after each checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        curve_file: Path,
        checkpoint_dir: Path,
        checkpoint_timesteps: int,
        wall_s: float,
        stop_asked: Callable[[], bool],
        on_checkpoint: OnCheckpoint | None = None,
    ) -> None:
        super().__init__()
        self._run_dir = run_dir
        self._curve_file = curve_file
        self._checkpoint_dir = checkpoint_dir
        self._checkpoint_timesteps = checkpoint_timesteps
        self._stop_asked = stop_asked
        self._on_checkpoint = on_checkpoint
        self._goes_on = True
        self._began = time.perf_counter() - wall_s
        self._episodes: list[dict[str, Any]] = []
        self._rewards: list[float] = []

    def _on_training_start(self) -> None:
        self._last_checkpoint = self.num_timesteps

    def _on_rollout_start(self) -> None:
        # Between learning and collecting, so that a checkpoint holds whole updates.
        if self.num_timesteps - self._last_checkpoint >= self._checkpoint_timesteps:
            self.save_checkpoint()
        self._episodes.clear()
        self._rewards.clear()

    def _on_step(self) -> bool:
        self._rewards.append(float(self._normalization.get_original_reward().mean()))
        for i in np.flatnonzero(self.locals["dones"]):
            self._episodes.append(self.locals["infos"][i]["episode"])
        return self._goes_on and not self._stop_asked()

    def _on_rollout_end(self) -> None:
        point: dict[str, Any] = {
            "timesteps": self.num_timesteps,
            "wall_s": round(time.perf_counter() - self._began, 3),
            "reward_mean": float(np.mean(self._rewards)),
            "episodes": len(self._episodes),
        }
        for name, key in (("return", "r"), ("drops", "drops"), ("throughput_rps",) * 2):
            values = [float(episode[key]) for episode in self._episodes]
            mean = float(np.mean(values)) if values else None
            point[f"{name}_mean"] = mean
            if name == "return":
                half = 1.96 * float(np.std(values)) / len(values) ** 0.5 if values else None
                point["return_low"] = None if mean is None or half is None else mean - half
                point["return_high"] = None if mean is None or half is None else mean + half
            if mean is not None:
                self.logger.record(f"rollout/{name}_mean", mean)
        self.logger.record("rollout/reward_mean", point["reward_mean"])
        with self._curve_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")

    def save_checkpoint(self) -> None:
        """Write the model and the normalisation, all or nothing, and bring the run's up to date."""
        folder = self._checkpoint_dir / f"{self.num_timesteps:012d}"
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self.model.save(unfinished / MODEL_FILE)
        self._normalization.save(str(unfinished / NORMALIZATION_FILE))
        if not folder.exists():
            unfinished.rename(folder)
        for name in (MODEL_FILE, NORMALIZATION_FILE):
            partial = self._run_dir / f"{name}.part"
            shutil.copyfile(folder / name, partial)
            partial.replace(self._run_dir / name)
        self._last_checkpoint = self.num_timesteps
        if self._on_checkpoint is not None and self._goes_on:
            assert isinstance(self.model, OnPolicyAlgorithm)
            self._goes_on = self._on_checkpoint(self.model, self._normalization)

    @property
    def _normalization(self) -> VecNormalize:
        env = self.model.get_vec_normalize_env()
        assert env is not None
        return env


@contextmanager
def _stop_at_interrupt() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C is remembered, a second one interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def remember(signum: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
