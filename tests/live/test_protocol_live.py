"""The measured protocol and live evaluation on a real vLLM server, by the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Installation

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.backends.live.records import read_outcomes
from vllm_tenant_tuning.backends.live.server import VLLMServer
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.records import read_records

KEY = "sk-known-to-nobody"


@pytest.fixture(scope="module")
def server(vllm: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """With an API key, which no record may hold."""
    os.environ["VLLM_API_KEY"] = KEY
    options = LiveOptions.model_validate(vllm.options)
    running = VLLMServer(options, load_scenario("cpu_chat_batch").engine)
    running.start(tmp_path_factory.mktemp("server") / "server.log")
    yield running
    running.stop()
    del os.environ["VLLM_API_KEY"]


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """The packaged scenario with an episode of 10 s, as a file."""
    import yaml

    content = load_scenario("cpu_chat_batch").model_dump(mode="json")
    content["control"]["episode_s"] = 10.0
    file = tmp_path / "short.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(file)


def test_the_protocol_measures_and_resumes(
    server: VLLMServer, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "out"
    command = ["protocol", "--url", server.url, "--scenario", scenario, "--out", str(out_dir)]
    command += ["--policies", "static,naive", "--seeds", "0:1", "--warm-up-s", "4"]
    command += ["--cool-down-s", "1", "--hardware-note", "two cores"]
    status = main(command)
    records = read_records(out_dir / "episodes.jsonl")
    assert {(r.policy, r.seed) for r in records} == {("static", 0), ("naive", 0)}
    for record in records:
        assert record.truncation == "time_limit"
        assert record.backend == "live"
        assert record.episode_s == 10
        assert record.live is not None
        assert record.live.scheduled > 0
        # what the raw records say
        outcomes = read_outcomes(out_dir / record.live.folder)
        assert len(outcomes.tenant) == record.live.delivered
        done = outcomes.latency_s[outcomes.latency_s == outcomes.latency_s]
        assert len(done) == round(record.throughput_rps * record.episode_s) > 0
    (run,) = json.loads((out_dir / "protocol.json").read_text())["runs"]
    assert run["hardware_note"] == "two cores"
    assert run["server"]["version"].startswith("0.")
    assert run["server"]["num_gpu_blocks"] == 1024
    left_out = [record for record in records if record.left_out]
    if not left_out:  # a machine that was busy has delivered another load, and says so
        assert status == 0
        assert (out_dir / "report.html").exists()
    printed = capsys.readouterr().out
    assert printed.count("the load was not delivered") == len(left_out)
    for file in out_dir.rglob("*"):
        assert file.is_dir() or KEY not in file.read_text(errors="replace"), file
    main(command)
    assert read_records(out_dir / "episodes.jsonl") == records
    assert "2 are recorded, 0 are left" in capsys.readouterr().out


def test_evaluate_plays_a_live_server(server: VLLMServer, scenario: str, tmp_path: Path) -> None:
    out_dir = tmp_path / "out"
    command = ["evaluate", "--backend", "live", "--url", server.url, "--scenario", scenario]
    command += ["--policies", "static:8/2,differentiated", "--seeds", "1:2", "--out", str(out_dir)]
    main(command)
    records = read_records(out_dir / "episodes.jsonl")
    assert [(r.policy, r.seed) for r in records] == [("static:8/2", 1), ("differentiated", 1)]
    assert {r.truncation for r in records} == {"time_limit"}
    assert records[0].cap_changes == 0
    assert records[0].tenants["batch"].mean_cap == 2
