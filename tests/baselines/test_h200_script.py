"""What benchmarks/h200 can be checked for without an H200 and without a server."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.profile import load_profile

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "h200"


@pytest.fixture(scope="module")
def make_shape() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "make_shape.py"))


def test_the_shape_is_that_of_llama(make_shape: dict[str, Any], tmp_path: Path) -> None:
    make_shape["write_config"]("llama-3.1-8b", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # 8,030,261,248 parameters are what the published checkpoint holds
    assert make_shape["parameters"](config) == 8_030_261_248
    kv_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert 2 * kv_bytes == 131_072  # for a token, in bfloat16
    profile = load_profile("h200-llama-3.1-8b")
    assert config["max_position_embeddings"] == profile.scheduler.max_model_len


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
    )


def test_a_failing_stage_is_named_and_taken_up_again(tmp_path: Path) -> None:
    """Without a vLLM the stages before the server's run, and are not run again."""
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nif [ $1 = serve ]; then echo no GPU here; exit 3; fi\n")
    fake.chmod(0o755)
    (fake.parent / "python").symlink_to(sys.executable)
    arguments = ["--out", "out", "--vllm", str(fake), "--python", sys.executable]
    arguments += ["--skip", "model"]
    first = run(*arguments, cwd=tmp_path)
    assert first.returncode == 1
    assert "stage calibrate failed: vllm serve ended" in first.stderr
    assert "no GPU here" in first.stderr
    records = tmp_path / "out" / "records"
    assert load_scenario(records / "scenario.yaml").control.episode_s == 480
    served = json.loads((records / "serve.json").read_text())
    assert served[served.index("--max-num-seqs") + 1] == "1024"
    assert "hardware_note" in json.loads((records / "environment.json").read_text())
    second = run(*arguments, cwd=tmp_path)
    assert second.returncode == 1
    assert "scenario: done before" in second.stdout
    assert "calibrate: begins" in second.stdout


def test_a_missing_vllm_and_wheels_are_one_message(tmp_path: Path) -> None:
    missing = run("--out", "out", "--vllm", "nowhere", "--python", sys.executable, cwd=tmp_path)
    assert missing.returncode == 1
    assert "--vllm: got 'nowhere'; no such command was found" in missing.stderr
    wheels = run("--out", "out", "--wheels", "nowhere", cwd=tmp_path)
    assert wheels.returncode == 2
    assert "--wheels: got 'nowhere'; accepted is a folder" in wheels.stderr
