"""Training runs: what they leave, that they repeat, resume, stop cleanly and can be played."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")

import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from test_env import short

from vllm_tenant_tuning import ScenarioFamily, load_scenario
from vllm_tenant_tuning.agents.rl import ALGORITHMS, ModelPolicy, algorithm_class
from vllm_tenant_tuning.baselines import training
from vllm_tenant_tuning.baselines.cli import main as cli_main
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.baselines.evaluate import EPISODES_FILE, EVALUATION_SEEDS, digest
from vllm_tenant_tuning.baselines.training import (
    TrainingRun,
    first_training_seed,
    main,
    resume,
    train,
)
from vllm_tenant_tuning.baselines.training_config import (
    TrainingConfig,
    load_run_config,
    load_training_config,
)
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

SCENARIO = short("reserved", 60.0)
ROLLOUT = 4 * 20


def small(algorithm: str = "ppo", **changes: Any) -> TrainingConfig:
    sizes = {"n_envs": 4, "n_steps": 20, "batch_size": 40, "n_epochs": 2, "net_arch": [8]}
    if algorithm == "recurrent-ppo":
        sizes["lstm_hidden_size"] = 4
    values = {"total_timesteps": 3 * ROLLOUT, "checkpoint_timesteps": ROLLOUT} | sizes | changes
    return load_training_config(algorithm, "reserved", **values)


def run(folder: Path, algorithm: str = "ppo", seed: int = 0, **changes: Any) -> TrainingRun:
    return train(
        SCENARIO, algorithm, seed=seed, training=small(algorithm, **changes), run_dir=folder
    )


def weights(folder: Path, algorithm: str = "ppo") -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = (
        algorithm_class(algorithm).load(folder / "model.zip", device="cpu").policy.state_dict()
    )
    return state


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingRun]:
    folder = tmp_path_factory.mktemp("runs")
    return {algorithm: run(folder / algorithm, algorithm) for algorithm in ALGORITHMS}


def test_a_run_leaves_all_that_it_promises(runs: dict[str, TrainingRun]) -> None:
    for algorithm, made in runs.items():
        folder = made.run_dir
        assert load_scenario(folder / "scenario.yaml") == SCENARIO
        config = load_run_config(folder / "config.yaml")
        assert config == made.config
        assert (config.algorithm, config.seed) == (algorithm, 0)
        assert config.training == small(algorithm)
        assert made.timesteps == 3 * ROLLOUT
        assert not made.interrupted
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            f"{timesteps:012d}" for timesteps in (ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT)
        ]
        assert list((folder / "tb").glob("events.out.tfevents.*"))
        lines = (folder / "curve.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == list(made.curve)
        assert [point["timesteps"] for point in made.curve] == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
        assert [point["episodes"] for point in made.curve] == [4, 4, 4]
        for point in made.curve:  # rollout and episode are the same 20 steps here
            assert point["return_mean"] == pytest.approx(20 * point["reward_mean"], rel=1e-5)
            assert point["return_low"] < point["return_mean"] < point["return_high"]
        assert same_weights(
            weights(folder, algorithm), weights(folder / "checkpoints" / "000000000240", algorithm)
        )


def test_the_first_point_of_the_curve_is_what_the_environments_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Any] = []
    original = VLLMTenantTuningVectorEnv.step

    def recording(self: Any, actions: Any) -> Any:
        result = original(self, actions)
        played.append((np.array(actions), result[1].copy(), self.outcomes))
        return result

    monkeypatch.setattr(VLLMTenantTuningVectorEnv, "step", recording)
    point = run(tmp_path / "run", total_timesteps=ROLLOUT).curve[0]
    assert point["return_mean"] == pytest.approx(sum(rewards for _, rewards, _ in played).mean())
    drops, completed = 0.0, 0.0
    for i in range(4):
        env = make_env(SCENARIO)
        env.reset(seed=10_000 + i)
        for actions, _, _ in played:
            info = env.step(actions[i])[4]
        drops += info["telemetry"].tenants["dropped_total"].sum() / 4
        completed += info["telemetry"].tenants["completed_total"].sum() / 4
    assert point["drops_mean"] == pytest.approx(drops)
    assert point["throughput_rps_mean"] == pytest.approx(completed / 60)


def test_the_same_seed_gives_the_same_weights(runs: dict[str, TrainingRun], tmp_path: Path) -> None:
    first = weights(runs["ppo"].run_dir)
    run(tmp_path / "same")
    assert same_weights(first, weights(tmp_path / "same"))
    run(tmp_path / "other", seed=1)
    assert not same_weights(first, weights(tmp_path / "other"))


def test_training_never_meets_the_evaluation_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    original = VLLMTenantTuningVectorEnv.reset

    def recording(self: Any, **arguments: Any) -> Any:
        seeds.extend(arguments["seed"])
        return original(self, **arguments)

    monkeypatch.setattr(VLLMTenantTuningVectorEnv, "reset", recording)
    run(tmp_path / "run")
    resume(tmp_path / "run", total_timesteps=5 * ROLLOUT)
    assert seeds == [*range(10_000, 10_004), *range(10_000 + 3 * ROLLOUT, 10_004 + 3 * ROLLOUT)]
    assert not set(seeds) & set(EVALUATION_SEEDS)

    blocks = sorted(first_training_seed(seed, done) for seed in (0, 1, 7) for done in (0, 10**11))
    assert blocks[0] == 10_000
    assert all(b - a >= 10**11 for a, b in itertools.pairwise(blocks))
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match=f"seed: got {wrong}; accepted are whole numbers"):
            run(tmp_path / "wrong", seed=wrong)
        assert not (tmp_path / "wrong").exists()


def test_resume_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made = run(tmp_path / "run", learning_rate_schedule="constant")
    before = read_normalization(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    further = resume(tmp_path / "run", total_timesteps=5 * ROLLOUT)
    assert further.timesteps == 5 * ROLLOUT
    assert further.curve[:3] == made.curve
    assert [point["timesteps"] for point in further.curve[3:]] == [4 * ROLLOUT, 5 * ROLLOUT]
    assert further.curve[3]["wall_s"] > made.curve[-1]["wall_s"]
    assert load_run_config(tmp_path / "run" / "config.yaml").training.total_timesteps == 400
    after = read_normalization(tmp_path / "run")
    # one observation for each step and environment, and one at each reset
    assert before.obs_rms.count == pytest.approx(3 * ROLLOUT + 4, abs=1e-3)
    assert after.obs_rms.count == pytest.approx(before.obs_rms.count + 2 * ROLLOUT + 4, abs=1e-3)
    optimizer = algorithm_class("ppo").load(tmp_path / "run" / "model.zip").policy.optimizer
    steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert steps == {5 * 2 * 2}  # rollouts, epochs, minibatches

    resume(tmp_path / "again", total_timesteps=5 * ROLLOUT)
    assert same_weights(weights(tmp_path / "run"), weights(tmp_path / "again"))

    finished = resume(tmp_path / "run")
    assert finished.timesteps == 5 * ROLLOUT
    assert finished.curve == further.curve


def read_normalization(folder: Path) -> Any:
    venv = DummyVecEnv([lambda: make_env(SCENARIO)])
    return VecNormalize.load(str(folder / "vecnormalize.pkl"), venv)


def test_after_a_kill_it_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    """Killed while the third checkpoint was written and a line of the curve was half out."""
    made = run(tmp_path / "killed")
    folder = tmp_path / "killed"
    newest = folder / "checkpoints" / f"{3 * ROLLOUT:012d}"
    newest.rename(newest.with_suffix(".part"))
    (newest.with_suffix(".part") / "vecnormalize.pkl").unlink()
    with (folder / "curve.jsonl").open("a") as file:
        file.write('{"timesteps": 320, "wal')
    again = resume(folder)
    assert again.timesteps == 3 * ROLLOUT
    assert again.curve[:2] == made.curve[:2]
    assert [point["timesteps"] for point in again.curve] == [ROLLOUT, 2 * ROLLOUT, 3 * ROLLOUT]
    assert (newest / "vecnormalize.pkl").is_file()

    shutil.rmtree(folder / "checkpoints")
    from_the_start = resume(folder)
    assert [p["return_mean"] for p in from_the_start.curve] == [
        p["return_mean"] for p in made.curve
    ]


def test_a_run_does_not_touch_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("kept")
    with pytest.raises(ValueError, match="is not empty; accepted is a new one, or --resume"):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_ctrl_c_keeps_everything_and_leaves_with_130(tmp_path: Path) -> None:
    config = {"default": small(total_timesteps=10**9, checkpoint_timesteps=10**9).model_dump()}
    config["default"]["net_arch"] = [8]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    scenario = yaml.safe_dump(SCENARIO.model_dump(mode="json"))
    (tmp_path / "scenario.yaml").write_text(scenario)
    folder = tmp_path / "run"
    arguments = ["--scenario", "scenario.yaml", "--config", "small.yaml", "--out", "run"]
    command = "from vllm_tenant_tuning.baselines.training import main; raise SystemExit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    curve = folder / "curve.jsonl"
    while not curve.exists() or len(curve.read_text().splitlines()) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "go on with --resume run" in errors
    (checkpoint,) = (folder / "checkpoints").iterdir()
    timesteps = int(checkpoint.name)
    assert timesteps >= 2 * ROLLOUT
    target = timesteps + ROLLOUT
    further = resume(folder, total_timesteps=target)
    assert target <= further.timesteps < target + ROLLOUT
    assert not further.interrupted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trained_model_plays_as_the_library_would(
    algorithm: str, runs: dict[str, TrainingRun]
) -> None:
    made = runs[algorithm]
    policy = ModelPolicy(made.run_dir)
    assert policy.name == algorithm
    assert policy.initial_caps(SCENARIO) is None
    env = make_env(SCENARIO)
    inner: Any = env.unwrapped
    model = algorithm_class(algorithm).load(made.model_path, device="cpu")
    normalization = read_normalization(made.run_dir)
    for seed in (3, 4):  # a second episode: nothing is left of the first
        policy.reset(SCENARIO, seed)
        observation, info = env.reset(seed=seed)
        state, first, truncated = None, np.ones(1, np.bool_), False
        while not truncated:
            masks = {"action_masks": inner.action_masks()} if algorithm == "maskable-ppo" else {}
            expected, state = model.predict(
                normalization.normalize_obs(observation),
                state=state,
                episode_start=first,
                deterministic=True,
                **masks,
            )
            first = np.zeros(1, np.bool_)
            action = policy.act(observation, info)
            np.testing.assert_array_equal(action, expected)
            if masks:
                assert masks["action_masks"].reshape(2, 3)[[0, 1], action].all()
            observation, _, _, truncated, info = env.step(action)
    assert play(env, policy, 3)[0].return_ == play(env, ModelPolicy(made.model_path), 3)[0].return_
    checkpoint = made.run_dir / "checkpoints" / "000000000240"
    assert play(env, ModelPolicy(checkpoint), 3)[0].return_ == play(env, policy, 3)[0].return_


@pytest.mark.parametrize("algorithm", ["ppo", "maskable-ppo"])
def test_a_model_of_stacked_observations_sees_what_vec_frame_stack_gives(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step over two episodes, against SB3's wrappers around scalar environments."""
    made = run(tmp_path / "run", algorithm, n_stack=3)
    assert load_run_config(made.run_dir / "config.yaml").training.n_stack == 3
    further = resume(made.run_dir, total_timesteps=4 * ROLLOUT)
    assert further.timesteps == 4 * ROLLOUT
    policy = ModelPolicy(made.run_dir)
    assert policy.n_stack == 3
    model = algorithm_class(algorithm).load(made.model_path, device="cpu")
    assert model.observation_space.shape == (3 * 29,)
    normalized = VecNormalize.load(
        str(made.run_dir / "vecnormalize.pkl"), DummyVecEnv([lambda: make_env(SCENARIO)])
    )
    assert normalized.obs_rms.mean.shape == (29,)
    normalized.training = False
    theirs = VecFrameStack(normalized, 3)
    env = make_env(SCENARIO)

    seen: list[Any] = []
    original = policy._model.predict

    def recording(observation: Any, *args: Any, **options: Any) -> Any:
        seen.append(observation.copy())
        return original(observation, *args, **options)

    monkeypatch.setattr(policy._model, "predict", recording)
    theirs.seed(3)
    stack = theirs.reset()
    assert not stack[0, : 2 * 29].any()
    for episode in range(2):  # the vector environment starts the second one by itself
        policy.reset(SCENARIO, episode)
        observation, info = env.reset(seed=3 if episode == 0 else None)
        truncated = False
        while not truncated:
            action = policy.act(observation, info)
            np.testing.assert_array_equal(seen[-1], stack[0])
            masks = {}
            if algorithm == "maskable-ppo":
                masks = {"action_masks": theirs.env_method("action_masks")[0]}
            expected, _ = model.predict(stack[0], deterministic=True, **masks)
            np.testing.assert_array_equal(action, expected)
            observation, _, _, truncated, info = env.step(action)
            stack, _, dones, _ = theirs.step(action[None])
            assert dones[0] == truncated
    assert len(seen) == 40
    assert seen[20][-29:].any()
    assert not seen[20][: 2 * 29].any()  # nothing is left of the first episode
    assert play(env, policy, 3)[0].return_ == play(env, ModelPolicy(made.model_path), 3)[0].return_


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policy_may_begin_by_holding(algorithm: str, tmp_path: Path) -> None:
    """The probabilities after next to no learning, against the softmax written out."""
    scenario = short("cpu_chat_batch", 40.0)  # two tenants, steps of up to 2
    beginning = small(algorithm, hold_bias=0.7, learning_rate=1e-9, total_timesteps=ROLLOUT)
    made = train(scenario, algorithm, training=beginning, run_dir=tmp_path / "run")
    model = algorithm_class(algorithm).load(made.model_path, device="cpu")
    hidden = torch.randn(1, model.policy.mlp_extractor.latent_dim_pi)
    logits = model.policy.action_net(torch.tanh(hidden)).detach().numpy().reshape(2, 5)
    expected = np.exp([-1.4, -0.7, 0.0, -0.7, -1.4])
    found = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, [expected / expected.sum()] * 2, rtol=0.15)
    with pytest.raises(ValueError, match="hold_bias: got -1"):
        small(hold_bias=-1)


def test_a_family_is_trained_on_and_its_model_plays_each_member(tmp_path: Path) -> None:
    family = short("reserved_loads", 60.0)
    assert isinstance(family, ScenarioFamily)
    made = train(family, training=small(), run_dir=tmp_path / "run")
    assert made.scenario == family  # as the folder has it
    env = VLLMTenantTuningVectorEnv(4, family, autoreset_mode="SAME_STEP")
    env.reset(seed=10_000)
    assert len({str(drawn) for drawn in env.drawn}) == 4
    policy = ModelPolicy(made.run_dir)
    arrived = []
    for member in ("light", "heavy"):
        record, _ = play(make_env(family.member(member)), policy, 3)
        assert record.scenario == f"reserved_loads-{member}"
        arrived.append(sum(tenant.arrived for tenant in record.tenants.values()))
    assert arrived[1] > 2 * arrived[0]


def test_stacks_are_refused_where_they_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_stack: got 2; accepted for recurrent-ppo is 1"):
        small("recurrent-ppo", n_stack=2)
    with pytest.raises(ValueError, match="n_stack: got 0"):
        small(n_stack=0)
    made = run(tmp_path / "run", n_stack=2, total_timesteps=ROLLOUT)
    config = made.run_dir / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("n_stack: 2", "n_stack: 4"))
    with pytest.raises(ValueError, match=r"shape \(58,\).*has \(116,\) \(with n_stack 4\)"):
        ModelPolicy(made.run_dir).reset(SCENARIO, 0)
    config.write_text(text.replace("n_stack: 2", "n_stack: many"))
    with pytest.raises(ValueError, match=r"config\.yaml: names no algorithm and n_stack"):
        ModelPolicy(made.run_dir)


def test_a_model_without_normalisation_gets_observations_as_they_are(tmp_path: Path) -> None:
    made = run(tmp_path / "run", normalize_observations=False, normalize_rewards=False)
    policy = ModelPolicy(made.run_dir)
    policy.reset(SCENARIO, 0)
    model = algorithm_class("ppo").load(made.model_path)
    observation = np.full(29, 5.0, np.float32)
    expected = model.predict(observation, deterministic=True)[0]
    np.testing.assert_array_equal(policy.act(observation, {}), expected)


def test_a_model_that_does_not_fit_is_refused_before_anything_is_played(
    runs: dict[str, TrainingRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--scenario", "h200_long_context", "--seeds", "0:2", "--workers", "1"]
    policies = f"static,model:{runs['ppo'].run_dir}"
    out = tmp_path / "out"
    assert cli_main(["evaluate", *arguments, "--policies", policies, "--out", str(out)]) == 2
    assert "trained on observations of shape" in capsys.readouterr().err
    assert not (out / EPISODES_FILE).exists()


def test_models_that_do_not_fit_or_cannot_be_read_are_refused(
    runs: dict[str, TrainingRun], tmp_path: Path
) -> None:
    policy = ModelPolicy(runs["ppo"].run_dir)
    three = SCENARIO.model_copy(
        update={
            "tenants": (*SCENARIO.tenants, SCENARIO.tenants[0].model_copy(update={"name": "c"}))
        }
    )
    with pytest.raises(ValueError, match=r"shape \(29,\) and actions .*'reserved' has \(41,\)"):
        policy.reset(three, 0)
    with pytest.raises(ValueError, match=r"MultiDiscrete\(\[3 3\]\).*MultiDiscrete\(\[5 5\]\)"):
        policy.reset(short("reserved", 60.0, max_delta=2), 0)

    with pytest.raises(ValueError, match=r"no file .*model\.zip; accepted is the folder"):
        ModelPolicy(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(runs["ppo"].run_dir, copy)
    (copy / "model.zip").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        ModelPolicy(copy)
    (copy / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"no config\.yaml beside it"):
        ModelPolicy(copy)


@pytest.mark.parametrize("name", ["model.zip", "vecnormalize.pkl", "config.yaml"])
def test_records_of_a_model_are_told_apart_by_each_of_its_files(
    runs: dict[str, TrainingRun], tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs["ppo"].run_dir, copy)
    before = digest(SCENARIO, f"model:{copy}", None)
    assert digest(SCENARIO, f"model:{copy}", None) == before
    with (copy / name).open("ab") as file:
        file.write(b"\n")
    assert digest(SCENARIO, f"model:{copy}", None) != before


def test_the_command_trains_and_hands_over_to_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated: list[Any] = []
    monkeypatch.setattr(training, "evaluate_and_report", lambda *given: evaluated.append(given))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_TENANT_TRACE_DIR", raising=False)
    content = {"default": small().model_dump() | {"net_arch": [8]}}
    Path("small.yaml").write_text(yaml.safe_dump(content))
    assert main(["--config", "small.yaml", "--timesteps", "80", "--n-envs", "2"]) == 0
    made, seeds = evaluated.pop()
    assert made.scenario == load_scenario("azure_like")
    assert (made.config.algorithm, made.config.seed, made.timesteps) == ("ppo", 0, 80)
    assert made.config.training.n_envs == 2
    assert seeds == range(100, 200)
    assert made.run_dir.parent == Path("runs")
    assert str(made.model_path) in capsys.readouterr().out

    folder = str(made.run_dir)
    assert main(["--resume", folder, "--timesteps", "120", "--eval-seeds", "5:7"]) == 0
    made, seeds = evaluated.pop()
    assert (made.timesteps, seeds) == (120, range(5, 7))

    for arguments, message in (
        (["--resume", folder, "--seed", "1"], "--seed: a resumed run keeps its own"),
        (["--resume", "nowhere"], "nowhere"),
        (["--seed", "-1"], "seed: got -1"),
        (["--eval-seeds", "0:2000"], "seeds: got '0:2000'"),
        (["--scenario", "nowhere"], "neither a packaged scenario"),
        (["--trace-dir", "nowhere"], "AzureLLMInference"),  # with a folder the default is azure
        (["--n-envs", "0"], "n_envs: got 0"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert not evaluated
    assert len(list(Path("runs").iterdir())) == 1


def test_without_the_extra_one_message_names_it() -> None:
    hidden = "stable_baselines3", "sb3_contrib", "torch", "tensorboard", "tqdm"
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "import vllm_tenant_tuning.baselines.training as training\n"
        "raise SystemExit(training.main(['--scenario', 'study']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert process.returncode == 2
    assert "pip install 'vllm-tenant-tuning[train]'" in process.stderr
    assert len(process.stderr.splitlines()) == 1
