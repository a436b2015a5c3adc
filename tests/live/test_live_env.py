"""The environment on a live server that can be made to fail: `step` and `reset` always return."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from fake_server import FakeServer, alive, fake_server, metrics_page
from gymnasium.utils.env_checker import check_env

from vllm_tenant_tuning import Scenario, load_scenario
from vllm_tenant_tuning.backends import Outcome, make_backend
from vllm_tenant_tuning.backends.live.backend import LiveError
from vllm_tenant_tuning.backends.live.records import read_outcomes, read_requests
from vllm_tenant_tuning.backends.live.server import ServerError
from vllm_tenant_tuning.telemetry import conservation_error

HOLD = np.array([2, 2])
STATED_S = 4.0
"""Within this time after a fault an episode must be truncated: 1 s of `failure_timeout_s`, an
answer of `/metrics` that is waited for 2 s, and what the machine needs."""


def task(episode_s: float = 30.0, interval_s: float = 0.5) -> Scenario:
    packaged = load_scenario("cpu_chat_batch")
    control = packaged.control.model_copy(
        update={"episode_s": episode_s, "control_interval_s": interval_s, "window_s": 2.0}
    )
    faster = [
        tenant.model_copy(
            update={"arrivals": packaged.tenants[1].arrivals.model_copy(update={"rate_per_s": 8.0})}
        )
        for tenant in packaged.tenants
    ]
    return packaged.model_copy(update={"control": control, "tenants": tuple(faster)})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def make(url: str, out_dir: Path, scenario: Scenario | None = None, **options: Any) -> gym.Env:
    settings = {
        "failure_timeout_s": 1.0,
        "stall_timeout_s": 1.5,
        "scrape_interval_s": 0.2,
        "reset_timeout_s": 5.0,
        "warmup_requests": 1,
    }
    return gym.make(
        "VLLMTenantTuning-v0",
        scenario=scenario or task(),
        backend="live",
        url=url,
        out_dir=out_dir,
        **(settings | options),
    )


def run_until_truncated(env: gym.Env, max_steps: int = 200) -> tuple[dict[str, Any], int]:
    for steps in range(1, max_steps + 1):
        observation, _, terminated, truncated, info = env.step(HOLD)
        assert env.observation_space.contains(observation)
        assert not terminated
        assert not conservation_error(info["telemetry"].tenants).any()
        if truncated:
            return info, steps
    raise AssertionError("never truncated")


@pytest.mark.parametrize("workers", [1, 2])
def test_an_episode(workers: int, server: FakeServer, tmp_path: Path) -> None:
    env = make(server.url, tmp_path, task(episode_s=4.0), workers=workers)
    _, info = env.reset(seed=3)
    assert info["telemetry"].cluster["time_s"] == 0
    began_s = time.monotonic()
    info, steps = run_until_truncated(env)
    assert (info["truncation_reason"], steps) == ("time_limit", 8)
    assert time.monotonic() - began_s > 4.0  # paced by the wall clock
    live = info["live"]
    assert live["fault"] == ""
    outcomes = env.unwrapped.outcomes()
    env.close()

    # the same requests as in simulation
    simulated = gym.make("VLLMTenantTuning-v0", scenario=task(episode_s=4.0))
    simulated.reset(seed=3)
    expected = simulated.unwrapped.outcomes()
    assert (outcomes.arrival_s == pytest.approx(expected.arrival_s, abs=1e-9)) is True
    assert (outcomes.prompt_tokens == expected.prompt_tokens).all()

    folder = Path(live["folder"])
    arrived = outcomes.outcome != Outcome.PENDING
    assert (read_outcomes(folder).outcome == outcomes.outcome[arrived]).all()
    steps_file = (folder / "steps.jsonl").read_text().splitlines()
    assert len(steps_file) == 1 + 8
    assert json.loads(steps_file[-1])["cluster"]["time_s"] == 4.0
    assert json.loads((folder / "episode.json").read_text())["scenario"]["name"] == "cpu_chat_batch"


def test_a_slow_agent_shortens_its_own_interval(server: FakeServer, tmp_path: Path) -> None:
    env = make(server.url, tmp_path, task(episode_s=6.0, interval_s=1.5))
    env.reset(seed=0)
    env.step(HOLD)
    time.sleep(0.3)
    *_, info = env.step(HOLD)
    assert info["live"]["agent_s"] >= 0.3
    assert info["live"]["overrun_s"] == 0
    time.sleep(2.0)
    *_, info = env.step(HOLD)  # its deadline has passed: it returns at once
    assert info["live"]["overrun_s"] >= 0.5
    assert info["live"]["agent_s"] >= 2.0
    assert info["telemetry"].cluster["time_s"] == 4.5
    late_s = info["live"]["overrun_s"]
    *_, truncated, info = env.step(HOLD)  # the episode is not longer for it
    assert truncated
    assert info["live"]["interval_s"] <= 1.5 - late_s + 0.5
    env.close()


def test_caps_are_in_force_at_the_server(server: FakeServer, tmp_path: Path) -> None:
    server.first_token_s = 0.4
    env = make(server.url, tmp_path, task(episode_s=4.0))
    env.reset(seed=0, options={"caps": [3, 2]})
    del server.in_flight[:]
    run_until_truncated(env)
    env.close()
    assert max(server.in_flight) == 5


def test_the_environment_checker(server: FakeServer, tmp_path: Path) -> None:
    env = make(server.url, tmp_path, task(episode_s=1.0))
    env.unwrapped.spec.nondeterministic = True  # wall clock
    check_env(env.unwrapped, skip_render_check=True, skip_close_check=True)
    env.close()


def misbehave(server: FakeServer, how: str) -> None:
    if how == "500":
        server.status = 500
    elif how == "503":
        server.status = 503
    elif how == "garbage":
        server.frames = lambda prompt, tokens: [b"\x00\xff garbage\n\n"]
    elif how == "frozen":
        server.frozen = True
        server.metrics = metrics_page(num_requests_waiting=5, generation_tokens_total=9)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("500", "server_errors"),
        ("503", "server_errors"),
        ("garbage", "server_errors"),
        ("frozen", "engine_stalled"),
    ],
)
def test_faults_truncate_with_their_reason(
    how: str, reason: str, server: FakeServer, tmp_path: Path
) -> None:
    env = make(server.url, tmp_path)
    env.reset(seed=0)
    env.step(HOLD)
    misbehave(server, how)
    began_s = time.monotonic()
    info, _ = run_until_truncated(env)
    assert info["truncation_reason"] == reason
    assert time.monotonic() - began_s < STATED_S
    assert info["live"]["fault"]
    records = read_requests(info["live"]["folder"])
    arrived = int(info["telemetry"].tenants["arrived_total"].sum())
    assert len(records) == arrived
    with pytest.raises(gym.error.ResetNeeded):
        env.step(HOLD)
    # while it fails no episode begins, and reset says why in time
    began_s = time.monotonic()
    with pytest.raises(LiveError, match=server.url):
        env.reset(seed=1)
    assert time.monotonic() - began_s < 5.0 + STATED_S
    # and when it is well again, the next one does
    server.status, server.frozen, server.metrics = 200, False, metrics_page()
    server.frames = FakeServer().frames
    env.reset(seed=1)
    *_, truncated, info = env.step(HOLD)
    assert not truncated
    env.close()


def test_a_server_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    with fake_server() as first:
        port = int(first.url.rsplit(":", 1)[1])
        env = make(first.url, tmp_path)
        env.reset(seed=0)
        env.step(HOLD)
    info, _ = run_until_truncated(env)
    assert info["truncation_reason"] == "server_unreachable"
    assert read_requests(info["live"]["folder"])
    with pytest.raises(LiveError, match="is not ready"):
        env.reset(seed=1)
    with fake_server(port):
        env.reset(seed=1)
        assert not env.step(HOLD)[3]
        env.close()


@contextmanager
def not_accepting(port: int) -> Iterator[None]:
    """A server that listens there and accepts nobody: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(100):
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(("127.0.0.1", port))
            except TimeoutError:
                break
        else:
            raise AssertionError("the queue never fills")
        yield


def test_a_server_that_is_slow_to_accept(tmp_path: Path) -> None:
    with fake_server() as first:
        port = int(first.url.rsplit(":", 1)[1])
        env = make(first.url, tmp_path)
        env.reset(seed=0)
        env.step(HOLD)
    with not_accepting(port):
        began_s = time.monotonic()
        info, _ = run_until_truncated(env)
        assert info["truncation_reason"] in ("server_hung", "server_unreachable")
        assert time.monotonic() - began_s < STATED_S
        began_s = time.monotonic()
        with pytest.raises(LiveError, match="is not ready"):
            env.reset(seed=1)
        assert time.monotonic() - began_s < 5.0 + STATED_S
    with fake_server(port):
        env.reset(seed=1)
        assert not env.step(HOLD)[3]
        env.close()


def test_without_metrics_readings_are_unavailable(server: FakeServer, tmp_path: Path) -> None:
    server.metrics = None
    env = make(server.url, tmp_path, task(episode_s=2.0))
    env.reset(seed=0)
    info, _ = run_until_truncated(env)
    env.close()
    assert info["truncation_reason"] == "time_limit"
    cluster = info["telemetry"].cluster
    assert np.isnan(cluster["kv_cache_usage"])
    assert np.isnan(cluster["generation_tokens"])
    assert cluster["mean_running"] >= 0  # what the reward charges for is always known
    assert "HTTP 404" in info["live"]["metrics_problem"]


def test_an_agent_that_forgets_its_environment(server: FakeServer, tmp_path: Path) -> None:
    env = make(server.url, tmp_path, agent_timeout_s=1.0)
    env.reset(seed=0)
    env.step(HOLD)
    time.sleep(1.5)
    requests = len(server.bodies)
    time.sleep(0.5)
    assert len(server.bodies) == requests  # the load has stopped
    info, _ = run_until_truncated(env, 1)
    assert info["truncation_reason"] == "agent_timeout"
    env.reset(seed=1)
    env.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where a shell started the tests in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_load_and_the_next_reset_works(server: FakeServer, tmp_path: Path) -> None:
    env = make(server.url, tmp_path, task(interval_s=5.0))
    env.reset(seed=0)
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        env.step(HOLD)
    requests = len(server.bodies)
    time.sleep(0.5)
    assert len(server.bodies) == requests
    *_, truncated, info = env.step(HOLD)
    assert (truncated, info["truncation_reason"]) == (True, "interrupted")
    assert (env.unwrapped.outcomes().arrival_s >= 0).all()
    env.reset(seed=1)
    env.close()


@pytest.mark.parametrize("end", ["raise RuntimeError", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_load_process_goes_with_its_agent(end: str, server: FakeServer, tmp_path: Path) -> None:
    program = f"""
        import os, signal
        import gymnasium as gym, numpy as np, vllm_tenant_tuning
        env = gym.make("VLLMTenantTuning-v0", scenario="cpu_chat_batch", backend="live",
                       url={server.url!r}, out_dir={str(tmp_path)!r})
        env.reset(seed=0)
        print(env.unwrapped._loop.backend._process.pid, flush=True)
        {end}
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert process.returncode != 0
    pid = int(process.stdout)
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)
    assert list(tmp_path.glob("episode-*/requests.jsonl"))


def test_lengths_that_do_not_fit_are_refused(server: FakeServer, tmp_path: Path) -> None:
    server.max_model_len = 300
    env = make(server.url, tmp_path)
    with pytest.raises(LiveError, match=r"'batch' has a request of 384 .* max_model_len is 300"):
        env.reset(seed=0)
    env.close()


def test_a_model_that_is_not_served_is_refused(server: FakeServer, tmp_path: Path) -> None:
    env = make(server.url, tmp_path, model="other")
    with pytest.raises(LiveError, match=r"'other'.* serves fake"):
        env.reset(seed=0)
    env.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "one of url"),
        ({"url": "http://x", "serve": (), "model": "m"}, "not both"),
        ({"url": "x:80"}, "http://HOST:PORT"),
        ({"url": "http://user:secret@x"}, "api_key_env"),
        ({"serve": ()}, "needs model"),
        ({"url": "http://x", "worker": 2}, "worker: unknown key"),
        ({"url": "http://x", "workers": 0}, "workers: got 0"),
        ({"url": "http://x", "prompt_token_ids": (5, 6)}, "at least 16 ids"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        make_backend("live", task(), **options)
    assert "secret" not in str(refused.value)


def test_one_cluster_only() -> None:
    with pytest.raises(ValueError, match="got 2 clusters"):
        make_backend("live", task(), 2, url="http://x")


def test_a_command_or_port_that_is_not_there(server: FakeServer) -> None:
    with pytest.raises(ServerError, match="no such command"):
        make_backend("live", task(), serve=(), model="m", vllm="no-such-vllm")
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ServerError, match=f"port: {port} .* Address already in use"):
        make_backend("live", task(), serve=(), model="m", vllm=sys.executable, port=port)
