"""Servers that cannot be calibrated: one clear message each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import FakeServer, fake_server, metrics_page

from vllm_tenant_tuning.baselines.calibrate import CalibrationError
from vllm_tenant_tuning.baselines.calibrate_live import calibrate_server
from vllm_tenant_tuning.baselines.cli import main

CACHE = (
    'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",'
    'num_gpu_blocks="4000"} 1.0\n'
)
LIMITS = {"scheduler.max_num_seqs": 8, "scheduler.max_num_batched_tokens": 2048}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        running.metrics = metrics_page() + CACHE
        yield running


def refused(url: str, tmp_path: Path, model: str | None = None, **given: object) -> str:
    with pytest.raises(CalibrationError) as caught:
        calibrate_server(
            url,
            tmp_path / "mine.yaml",
            model=model,
            rounds=1,
            template=None,
            given={"name": "mine", "gpu": "a GPU", **LIMITS, **given},
            command="a test",
        )
    assert not (tmp_path / "mine.yaml").exists()
    return str(caught.value)


def test_no_metrics(server: FakeServer, tmp_path: Path) -> None:
    server.metrics = None
    assert "/metrics: HTTP 404" in refused(server.url, tmp_path)


def test_metrics_without_the_cache(server: FakeServer, tmp_path: Path) -> None:
    server.metrics = metrics_page()
    assert "vllm:cache_config_info" in refused(server.url, tmp_path)


def test_metrics_of_something_else(server: FakeServer, tmp_path: Path) -> None:
    server.metrics = "up 1\n"
    assert "vllm:num_requests_running" in refused(server.url, tmp_path)


def test_another_model(server: FakeServer, tmp_path: Path) -> None:
    assert "model: got 'other'" in refused(server.url, tmp_path, model="other")


def test_nothing_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tenant_tuning.baselines.calibration_trials.READY_TIMEOUT_S", 0.2)
    assert "http://127.0.0.1:9 is not ready" in refused("http://127.0.0.1:9", tmp_path)


def test_requests_that_fail(server: FakeServer, tmp_path: Path) -> None:
    server.status = 500
    assert "failed: HTTP 500" in refused(server.url, tmp_path)
    lines = (tmp_path / "mine.trials.jsonl").read_text().splitlines()
    assert '"num_gpu_blocks":4000' in lines[0]  # what was learnt is kept


def test_limits_that_nothing_tells(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "mine.yaml")
    assert main(["calibrate", "--url", server.url, "--out", out]) == 2
    assert "--max-num-seqs, --max-num-batched-tokens" in capsys.readouterr().err


def test_records_are_never_overwritten(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "mine.trials.jsonl").write_text("kept\n")
    assert "exists" in refused(server.url, tmp_path)
    assert (tmp_path / "mine.trials.jsonl").read_text() == "kept\n"
