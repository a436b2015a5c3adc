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
import yaml
from test_env import short
from test_llm import episode

from vllm_tenant_tuning.agents.llm import LLMPolicy, agent_text
from vllm_tenant_tuning.agents.llm.prompt import tenant_ids

ROOT = Path(__file__).resolve().parents[2]
PORT = 8471
READY_TIMEOUT_S = 300.0
# 20 decisions, each with time enough on a busy machine
SCENARIO = short("premium_burst", 600.0, control_interval_s=30.0, window_s=30.0)


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
    command += ' --structured-outputs-config {"backend":"xgrammar","disable_any_whitespace":true}'
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
    # Random weights would fill a JSON schema's optional white space; a regular expression has none.
    changes = ",".join(rf'"{id_}":(-1|0|1)' for id_ in tenant_ids(SCENARIO))
    content = {
        "base_url": base_url,
        "model": model,
        "output": "text",
        "extra_body": {"structured_outputs": {"regex": rf"\{{{changes}\}}"}},
    }
    config = tmp_path / "regex.yaml"
    config.write_text(yaml.safe_dump(content))
    policy = LLMPolicy(f"llm:{config}")
    policy.record_to(tmp_path)
    recorded, trajectory = episode(policy, SCENARIO)
    policy.close()
    decisions = recorded.decisions
    assert (decisions.decisions, decisions.held, decisions.failures) == (20, 0, {})
    assert decisions.unreported == 0
    assert decisions.prompt_tokens > 20 * 300
    assert 20 * 5 <= decisions.completion_tokens <= 20 * 32
    assert 0 < decisions.latency_p50_s <= decisions.latency_max_s
    assert len(set(map(tuple, trajectory["caps"].tolist()))) > 1

    replay = LLMPolicy(agent_text(f"llm:{config}", {"replay": tmp_path}))
    replayed, again = episode(replay, SCENARIO)
    replay.close()
    assert replayed.model_copy(update={"wall_s": 0}) == recorded.model_copy(update={"wall_s": 0})
    for name, values in trajectory.items():
        assert values.tobytes() == again[name].tobytes(), name


@pytest.mark.parametrize("form", ["json_schema", "tool", "text"])
def test_a_real_server_knows_every_form(server: tuple[str, str], form: str) -> None:
    base_url, model = server
    config = {"base_url": base_url, "model": model, "max_tokens": 48, "output": form}
    policy = LLMPolicy(agent_text("llm", config))
    control = SCENARIO.control.model_copy(update={"episode_s": 150.0})
    recorded, _ = episode(policy, SCENARIO.model_copy(update={"control": control}))
    policy.close()
    decisions = recorded.decisions
    assert decisions.decisions == 5
    assert decisions.attempts == decisions.answered + sum(decisions.failures.values())
    # the model is free to say nonsense or too much, where the form lets it
    nonsense = {"unreadable", "no_answer", "wrong_tenants", "wrong_type", "out_of_range"}
    possible = {
        "json_schema": {"cut_off"},
        "tool": {"cut_off", "bad_request"},  # vLLM refuses it without --tool-call-parser
        "text": {"cut_off"} | nonsense,
    }
    assert set(decisions.failures) <= possible[form]
