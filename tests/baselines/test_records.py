"""Records survive crashes, and a wrong line is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from synthetic import record

from vllm_tenant_tuning.baselines.records import (
    RecordError,
    append_record,
    completed_keys,
    read_records,
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    assert read_records(file) == []
    written = [record(seed=seed, latency_p99_s=None) for seed in range(3)]
    for one in written:
        append_record(file, one)
    assert read_records(file) == written
    assert completed_keys(file) == {("study", "0123", "static", seed) for seed in range(3)}
    assert '"return":100.0' in file.read_text()


@pytest.mark.parametrize("cut", [1, 7, 40, 200])
def test_a_torn_line_loses_its_own_episode_only(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "episodes.jsonl"
    append_record(file, record(seed=0))
    append_record(file, record(seed=1, policy="größer"))
    file.write_bytes(file.read_bytes()[:-cut])
    kept = [0] if cut > 1 else [0, 1]  # without its line end alone a line is whole
    assert [one.seed for one in read_records(file)] == kept
    assert (f"{file}, line 2: torn" in caplog.text) == (cut > 1)
    append_record(file, record(seed=2))
    assert [one.seed for one in read_records(file)] == [*kept, 2]


def test_a_line_nested_beyond_reading_counts_as_torn(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(b"[" * 100_000 + b"\n")
    append_record(file, record(seed=0))
    assert [one.seed for one in read_records(file)] == [0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"scenario": "study"}', "line 2: scenario_digest: Field required"),
        ("[1, 2]", "line 2: line: Input should be"),
        (record().model_dump_json(by_alias=True)[:-1] + ',"x":1}', "line 2: x: Extra inputs"),
    ],
)
def test_a_whole_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "episodes.jsonl"
    append_record(file, record())
    with file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(RecordError, match=message) as caught:
        read_records(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_hold_is_refused_before_it_spoils_a_file(value: float) -> None:
    with pytest.raises(ValidationError, match="cost"):
        record(cost=value)
    with pytest.raises(ValidationError, match=r"reward_terms\.slo"):
        record(reward_terms={"throughput": 1.0, "slo": value, "drop": 0.0, "cost": 0.0})
