"""Episodes on a real vLLM server, with every fault that it can be made to show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Installation
from fake_server import alive

from vllm_tenant_tuning import Scenario, load_scenario
from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.backends import Outcome
from vllm_tenant_tuning.backends.live.backend import LiveError
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.backends.live.records import read_outcomes, read_requests
from vllm_tenant_tuning.backends.live.server import ServerError, VLLMServer
from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.baselines import calibration_trials
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.profile import load_profile
from vllm_tenant_tuning.telemetry import conservation_error

HOLD = np.array([2, 2])
RULES = ("static", "naive", "differentiated", "per_tenant_window_p99", "coupled_backlog")
MAX_PREFIX_HIT_RATE = 0.01


def task(episode_s: float) -> Scenario:
    packaged = load_scenario("cpu_chat_batch")
    control = packaged.control.model_copy(update={"episode_s": episode_s})
    return packaged.model_copy(update={"control": control})


@pytest.fixture(scope="module")
def server(vllm: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A server started from the scenario's engine section, as the backend does it."""
    options = LiveOptions.model_validate(vllm.options)
    running = VLLMServer(options, task(20).engine)
    running.start(tmp_path_factory.mktemp("server") / "server.log")
    yield running
    running.stop()


def make(server: VLLMServer, out_dir: Path, scenario: Scenario, **options: Any) -> gym.Env:
    return gym.make(
        "VLLMTenantTuning-v0",
        scenario=scenario,
        backend="live",
        url=server.url,
        out_dir=out_dir,
        **options,
    )


def pids(server_url: str) -> list[int]:
    """All processes of the server that listens there: its API server's session."""
    port = server_url.rsplit(":", 1)[1]
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in command and port.encode() in command and b"guard.py" not in command[1]:
            session = os.getsid(int(folder.name))
            found.append(session)
    sessions = set(found)
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and _session(int(folder.name)) in sessions
    ]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def signal_all(server_url: str, sign: signal.Signals) -> None:
    for pid in pids(server_url):
        os.kill(pid, sign)


def play(env: gym.Env, policy_text: str, seed: int) -> dict[str, Any]:
    """One episode; every observation is checked."""
    policy = make_policy(policy_text)
    scenario = env.unwrapped.scenario
    policy.reset(scenario, seed)
    observation, info = env.reset(seed=seed, options={"caps": policy.initial_caps(scenario)})
    truncated = False
    while not truncated:
        observation, reward, _, truncated, info = env.step(policy.act(observation, info))
        assert env.observation_space.contains(observation)
        assert np.isfinite(reward)
        assert not conservation_error(info["telemetry"].tenants).any()
    return info


def test_an_episode_under_static_caps(server: VLLMServer, tmp_path: Path) -> None:
    env = make(server, tmp_path, task(24.0))
    info = play(env, "static", seed=0)
    outcomes = env.unwrapped.outcomes()
    env.close()
    live, cluster = info["live"], info["telemetry"].cluster
    assert info["truncation_reason"] == "time_limit"
    assert live["delivered"] == (outcomes.outcome != Outcome.PENDING).sum() > 20
    # what the server counts: its KV cache, its tokens, and no prefix met again
    assert live["server"]["num_gpu_blocks"] == 1024
    assert live["server"]["block_size"] == 128
    assert live["prefix_hit_rate"] < MAX_PREFIX_HIT_RATE
    assert 0 <= cluster["kv_cache_usage"] <= 1
    steps = [
        json.loads(line) for line in (Path(live["folder"]) / "steps.jsonl").read_text().splitlines()
    ]
    generated = sum(step["cluster"]["generation_tokens"] or 0 for step in steps)
    records = read_requests(live["folder"])
    received = sum(record.get("usage_output_tokens", 0) for record in records)
    assert generated == pytest.approx(received, rel=0.1)
    # what the client measured
    done = outcomes.outcome == Outcome.COMPLETED
    assert done.sum() >= 3
    assert (outcomes.latency_s[done] >= outcomes.ttft_s[done]).all()
    # one token has no pace, and a server that lags sends several at once
    long = done & (outcomes.output_tokens >= 16)
    assert long.any()
    assert (outcomes.tpot_s[long] > 0.001).all()
    ended = [record for record in records if record["end"] == "completed"]
    assert len(ended) == done.sum()
    for record in ended:
        assert record["usage_output_tokens"] == record["output_tokens"]
        assert record["usage_prompt_tokens"] == record["prompt_tokens"]
    assert len(records) == live["delivered"]
    read = read_outcomes(live["folder"])
    assert (read.outcome == outcomes.outcome[outcomes.outcome != Outcome.PENDING]).all()


def test_repeated_episodes_meet_no_prefix_and_an_idle_server(
    server: VLLMServer, tmp_path: Path
) -> None:
    env = make(server, tmp_path, task(8.0))
    for _ in range(3):
        observation, info = env.reset(seed=5)  # the same requests, cut off in flight each time
        assert not observation[[0, 1, 15, 16]].any()  # nothing queued or in flight
        assert info["telemetry"].cluster["num_requests_running"] == 0
        assert info["telemetry"].cluster["kv_cache_usage"] == 0
        truncated = False
        while not truncated:
            *_, truncated, info = env.step(HOLD)
        assert info["live"]["prefix_hit_rate"] < MAX_PREFIX_HIT_RATE
    env.close()


@pytest.mark.parametrize("policy", RULES[1:])
def test_rules_act_live(policy: str, server: VLLMServer, tmp_path: Path) -> None:
    env = make(server, tmp_path, task(10.0))
    assert play(env, policy, seed=1)["truncation_reason"] == "time_limit"
    env.close()


def test_ppo_trained_in_simulation_acts_live(server: VLLMServer, tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    simulated = gym.make("VLLMTenantTuning-v0", scenario=task(10.0))
    model = sb3.PPO("MlpPolicy", simulated, n_steps=64, batch_size=64, device="cpu", seed=0)
    model.learn(64)
    env = make(server, tmp_path, task(10.0))
    observation, _ = env.reset(seed=2)
    truncated = False
    while not truncated:
        action, _ = model.predict(observation, deterministic=True)
        observation, _, _, truncated, info = env.step(action)
        assert not conservation_error(info["telemetry"].tenants).any()
    assert info["truncation_reason"] == "time_limit"
    env.close()


def test_a_prompt_that_is_too_long_is_refused_beforehand(
    server: VLLMServer, tmp_path: Path
) -> None:
    packaged = task(8.0)
    long = packaged.tenants[1].prompt_tokens.model_copy(update={"tokens": 2040})
    tenants = (packaged.tenants[0], packaged.tenants[1].model_copy(update={"prompt_tokens": long}))
    env = make(server, tmp_path, packaged.model_copy(update={"tenants": tenants}))
    with pytest.raises(LiveError, match="max_model_len is 2048"):
        env.reset(seed=0)
    env.close()


def test_calibrated_and_validated(
    server: VLLMServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, with fewer and smaller trials than the command's own."""
    monkeypatch.setattr(calibration_trials, "DECODE_STEPS", 20)
    monkeypatch.setattr(calibration_trials, "PROMPT_SHARES", (1 / 128, 1 / 32, 1 / 16, 1 / 8))
    monkeypatch.setattr(calibration_trials, "BURST", 16)
    profile = tmp_path / "mine.yaml"
    options = ["--template", "cpu-90m", "--name", "mine", "--rounds", "1"]
    assert main(["calibrate", "--url", server.url, "--out", str(profile), *options]) == 0
    found = load_profile(profile)
    assert (found.kv_cache.num_gpu_blocks, found.kv_cache.block_size) == (1024, 128)
    assert found.fit is not None
    # what a step of this model takes on any machine that runs these tests, in milliseconds
    alone_ms = float(step_time_ms(found.step_time, 0, 1, 64, 0))
    assert 2 < alone_ms < 200
    assert 0 < found.frontend.request_s + found.frontend.delay_s < 0.1
    out = tmp_path / "validation"
    options = ["--scenario", "cpu_chat_batch", "--profile", str(profile), "--out", str(out)]
    load = ["--loads", "0.4", "--episode-s", "16"]
    assert main(["validate", "--url", server.url, *options, *load]) == 0
    row = json.loads((out / "summary.json").read_text())["cells"][0]["tenants"]["all"]
    assert row["completed"]["live"] >= 3
    assert row["failed"] == {"sim": 0, "live": 0}
    assert row["correlation"]["pairs"] >= 3
    assert main(["validate", *options, *load]) == 0  # again, from the records


def test_its_port_is_taken(server: VLLMServer, vllm: Installation) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ServerError, match=f"port: {port}"):
        VLLMServer(LiveOptions.model_validate(vllm.options | {"port": port}), task(8.0).engine)


def test_hung_killed_and_back(server: VLLMServer, tmp_path: Path) -> None:
    options = {"failure_timeout_s": 3.0, "reset_timeout_s": 20.0}
    stated_s = 3.0 + 2.0 + 5.0  # the answer of /metrics is waited for 2 s; the rest is the machine
    env = make(server, tmp_path, task(120.0), **options)

    def until_truncated(sign: signal.Signals) -> dict[str, Any]:
        env.reset(seed=0)
        for _ in range(2):
            assert not env.step(HOLD)[3]
        signal_all(server.url, sign)
        began_s = time.monotonic()
        truncated = False
        while not truncated:
            *_, truncated, info = env.step(HOLD)
        assert time.monotonic() - began_s < stated_s
        assert read_requests(info["live"]["folder"])
        return info

    assert until_truncated(signal.SIGSTOP)["truncation_reason"] == "server_hung"
    signal_all(server.url, signal.SIGCONT)
    info = until_truncated(signal.SIGKILL)  # whose reset has found the server well again
    assert info["truncation_reason"] == "server_unreachable"
    with pytest.raises(LiveError, match="is not ready"):
        env.reset(seed=1)
    server.start(tmp_path / "again.log")
    env.reset(seed=1)
    assert not env.step(HOLD)[3]
    env.close()


def test_a_server_that_dies_while_starting(
    server: VLLMServer, vllm: Installation, tmp_path: Path
) -> None:
    server.stop()  # one vLLM at a time; the tests after this one start their own
    options = LiveOptions.model_validate(
        vllm.options | {"serve": ("--no-such-argument",), "api_key_env": "VLLM_API_KEY"}
    )
    broken = VLLMServer(options, task(8.0).engine)
    with pytest.raises(ServerError, match=r"ended with status \d+ .*(?s:.*)no-such-argument"):
        broken.start(tmp_path / "server.log")
    assert pids(broken.url) == []


def test_a_server_of_its_own_dies_restarts_and_leaves_no_orphan(
    vllm: Installation, tmp_path: Path
) -> None:
    """A program that kills its server, goes on with a new one, and then breaks."""
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import gymnasium as gym, numpy as np, vllm_tenant_tuning
        from test_vllm import HOLD, pids, signal_all, task
        env = gym.make("VLLMTenantTuning-v0", scenario=task(120.0), backend="live",
                       out_dir={str(tmp_path)!r}, **{vllm.options!r})
        env.reset(seed=0)
        url = env.unwrapped._loop.backend._server.url
        env.step(HOLD)
        signal_all(url, signal.SIGKILL)
        truncated = False
        while not truncated:
            *_, truncated, info = env.step(HOLD)
        print(info["truncation_reason"], flush=True)
        env.reset(seed=1)
        print(*pids(url), flush=True)
        assert not env.step(HOLD)[3]
        raise SystemError("the agent breaks")
    """
    key = "sk-known-to-nobody"
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"VLLM_API_KEY": key},
    )
    assert "the agent breaks" in result.stderr
    reason, numbers = result.stdout.strip().splitlines()
    assert reason == "server_exited"
    started = [int(number) for number in numbers.split()]
    assert started
    for _ in range(100):
        if not any(alive(pid) for pid in started):
            break
        time.sleep(0.1)
    assert [pid for pid in started if alive(pid)] == []
    # the key was needed, and is nowhere
    assert key not in result.stdout + result.stderr
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or key not in file.read_text(errors="replace"), file
