"""An LLM agent on a real vLLM server: the whole path, whatever the model's wisdom.

Asks the server at VLLM_TENANT_TEST_URL, or starts the one of `.venv-vllm` (`VLLM_BIN` and
`VLLM_MODEL` name others); skips where there is neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest
from test_env import short
from test_llm import episode

from vllm_tenant_tuning.agents.llm import LLMPolicy, agent_text

ROOT = Path(__file__).resolve().parents[2]
PORT = 8471
READY_TIMEOUT_S = 300.0
SCENARIO = short("premium_burst", 120.0)  # 40 decisions


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base URL and model of a running vLLM."""
    url = os.environ.get("VLLM_TENANT_TEST_URL")
    if url:
        base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        yield base_url, _model(base_url)
        return
    binary = Path(os.environ.get("VLLM_BIN", str(ROOT / ".venv-vllm" / "bin" / "vllm")))
    model = Path(os.environ.get("VLLM_MODEL", str(ROOT / ".venv-vllm" / "model")))
    if not binary.exists() or not model.exists():
        pytest.skip("no vLLM: neither VLLM_TENANT_TEST_URL nor .venv-vllm is there")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("a real vLLM needs the machine for itself: pytest tests/agents -n 0")
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = f"{binary} serve {model} --served-model-name tiny --host 127.0.0.1 --port {PORT}"
    command += " --dtype bfloat16 --max-model-len 2048 --max-num-seqs 8 --enforce-eager"
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = os.environ | offline | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command.split(), stdout=output, stderr=output, env=environment)
    base_url = f"http://127.0.0.1:{PORT}/v1"
    give_up = time.monotonic() + READY_TIMEOUT_S
    try:
        while process.poll() is None and time.monotonic() < give_up:
            try:
                name = _model(base_url)
                break
            except (URLError, OSError):
                time.sleep(1)
        else:
            pytest.fail(f"vLLM did not get ready:\n{log.read_text()[-2000:]}")
        yield base_url, name
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _model(base_url: str) -> str:
    with urllib.request.urlopen(f"{base_url}/models", timeout=5) as response:
        return str(json.load(response)["data"][0]["id"])


def test_a_real_server_decides_and_its_episode_can_be_replayed(
    server: tuple[str, str], tmp_path: Path
) -> None:
    base_url, model = server
    config = {"base_url": base_url, "model": model, "max_tokens": 64, "output": "json_schema"}
    policy = LLMPolicy(agent_text("llm", config))
    policy.record_to(tmp_path)
    recorded, trajectory = episode(policy, SCENARIO)
    policy.close()
    decisions = recorded.decisions
    assert decisions.decisions == 40
    assert decisions.answered + decisions.held == 40
    assert decisions.attempts == decisions.answered + sum(decisions.failures.values())
    # under a schema nothing comes but the answer, unless it is late or runs out of tokens
    assert set(decisions.failures) <= {"timeout", "cut_off"}
    assert decisions.answered > 0
    assert decisions.unreported == decisions.failures.get("timeout", 0)
    assert decisions.completion_tokens > 0
    assert decisions.latency_max_s <= SCENARIO.control.control_interval_s

    replay = LLMPolicy(agent_text("llm", config | {"replay": tmp_path}))
    replayed, again = episode(replay, SCENARIO)
    replay.close()
    assert replayed.model_copy(update={"wall_s": 0}) == recorded.model_copy(update={"wall_s": 0})
    for name, values in trajectory.items():
        assert values.tobytes() == again[name].tobytes(), name


@pytest.mark.parametrize("form", ["tool", "text"])
def test_a_real_server_knows_the_other_forms(server: tuple[str, str], form: str) -> None:
    base_url, model = server
    config = {"base_url": base_url, "model": model, "max_tokens": 32, "output": form}
    policy = LLMPolicy(agent_text("llm", config))
    recorded, _ = episode(policy, short("premium_burst", 15.0))
    policy.close()
    assert not {"client", "connection", "not_json", "not_a_completion", "server_error"} & set(
        recorded.decisions.failures
    )
    assert recorded.decisions.decisions == 5
