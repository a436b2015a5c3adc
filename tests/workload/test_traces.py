"""Trace readers on handwritten files, on faulty ones and on the public traces."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vllm_tenant_tuning.workload import TraceError
from vllm_tenant_tuning.workload.traces import TraceFormat, find_trace, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE = '{"timestamp": 0, "input_length": 10, "output_length": 5}\n'
GOOD_AZURE = "2023-11-16 18:00:00.0000000,10,5\n"
GOOD_BURSTGPT = "5,ChatGPT,10,5,15,Conversation log\n"


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_azure(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE
        + "2023-11-16 23:59:59.9999999,374,44\r\n"
        + "2023-11-17 00:00:00.0000001,396,109\r\n"
        + "\r\n"
        + "2023-11-17 00:00:01,1,2\r\n"
        + "2023-11-17 00:00:01.5,3,4",
    )
    trace = read_trace(path, "azure")
    np.testing.assert_array_equal(trace.arrival_s, [0, 2e-7, 1.0000001, 1.5000001])
    np.testing.assert_array_equal(trace.prompt_tokens, [374, 396, 1, 3])
    np.testing.assert_array_equal(trace.output_tokens, [44, 109, 2, 4])
    assert trace.arrival_s.dtype == np.float64
    assert trace.prompt_tokens.dtype == trace.output_tokens.dtype == np.int64
    assert trace.skipped_rows == 0
    assert len(trace) == 4


def test_azure_with_time_zones(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE
        + "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        + "2024-05-10 02:00:00.017335+02:00,2399,6\n"
        + "2024-05-10T00:00:01.009930Z,7,8\n",
    )
    trace = read_trace(path, "azure")
    np.testing.assert_allclose(trace.arrival_s, [0, 0.007405, 1.0], rtol=0, atol=1e-12)


def test_burstgpt(tmp_path: Path) -> None:
    path = write(
        tmp_path, BURSTGPT + "5,ChatGPT,472,18,490,Conversation log\n45.25,GPT-4,7,230,237,API log"
    )
    trace = read_trace(path, "burstgpt")
    np.testing.assert_array_equal(trace.arrival_s, [0, 40.25])
    np.testing.assert_array_equal(trace.prompt_tokens, [472, 7])
    np.testing.assert_array_equal(trace.output_tokens, [18, 230])


def test_burstgpt_with_more_columns_and_a_byte_order_mark(tmp_path: Path) -> None:
    header = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n"
    )
    path = write(
        tmp_path, b"\xef\xbb\xbf" + header.encode() + b'5,3,1.5,"a, b",4,18,22,Conversation log\n'
    )
    trace = read_trace(path, "burstgpt")
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == (4, 18)


def test_mooncake(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 1, "output_length": 2},
        {"output_length": 4, "timestamp": 1250.5, "input_length": 3, "chat_id": "x"},
    ]
    trace = read_trace(write(tmp_path, "\n".join(map(json.dumps, rows))), "mooncake")
    np.testing.assert_array_equal(trace.arrival_s, [0, 0, 0.2505])
    np.testing.assert_array_equal(trace.prompt_tokens, [6758, 1, 3])
    np.testing.assert_array_equal(trace.output_tokens, [500, 2, 4])


MALFORMED: list[tuple[TraceFormat, str | bytes, str]] = [
    ("azure", "2023-11-16 18:00:01.0,10\n", "got 2 columns, the header has 3"),
    ("azure", "2023-11-16 18:00:01.0,10,5,1\n", "got 4 columns, the header has 3"),
    ("azure", "2023-11-16 18:00:01.0,ten,5\n", "ContextTokens: got ten"),
    ("azure", "2023-11-16 18:00:01.0,,5\n", "ContextTokens: got ;"),
    ("azure", "2023-11-16 18:00:01.0,10,0\n", "GeneratedTokens: got 0"),
    ("azure", "2023-11-16 18:00:01.0,-3,5\n", "ContextTokens: got -3"),
    ("azure", "2023-11-16 18:00:01.0,nan,5\n", "ContextTokens: got nan"),
    ("azure", "2023-11-16 18:00:01.0,1_0,5\n", "ContextTokens: got 1_0"),
    ("azure", "2023-11-16 18:00:01.0,10,5.5\n", "GeneratedTokens: got 5.5"),
    ("azure", f"2023-11-16 18:00:01.0,10,{'9' * 30}\n", "GeneratedTokens: got 999"),
    ("azure", "2023-11-16 17:59:59.9999999,10,5\n", "time is before that of the row above"),
    ("azure", "2023-13-16 18:00:01.0,10,5\n", "TIMESTAMP: got '2023-13-16 18:00:01.0'"),
    ("azure", "2023-11-16 18:00,10,5\n", "TIMESTAMP: got '2023-11-16 18:00'"),
    ("azure", "1700000000.5,10,5\n", "TIMESTAMP: got '1700000000.5'"),
    ("azure", ",10,5\n", "TIMESTAMP: got ''"),
    ("azure", "1969-01-01 00:00:00,10,5\n", "TIMESTAMP: got -"),
    ("azure", "9999-01-01 00:00:00,10,5\n", "a finite number from 0 to"),
    ("azure", b"2023-11-16 18:00:01.0,1\xff0,5\n", "not UTF-8 text"),
    ("burstgpt", "6,ChatGPT,10,0,10,Conversation log\n", "Response tokens: got 0"),
    ("burstgpt", "6,ChatGPT,10,5,15\n", "got 5 columns, the header has 6"),
    ("burstgpt", "nan,ChatGPT,10,5,15,Conversation log\n", "Timestamp: got 'nan'"),
    ("burstgpt", "inf,ChatGPT,10,5,15,Conversation log\n", "Timestamp: got 'inf'"),
    ("burstgpt", "1e999,ChatGPT,10,5,15,Conversation log\n", "Timestamp: got inf"),
    ("burstgpt", "-6,ChatGPT,10,5,15,Conversation log\n", "Timestamp: got -6"),
    ("burstgpt", "4,ChatGPT,10,5,15,Conversation log\n", "time is before that of the row above"),
    ("burstgpt", "6,ChatGPT,,5,5,Conversation log\n", "Request tokens: got ;"),
    ("burstgpt", "6," + "x" * 200_000 + ",1,5,5,Conversation log\n", "not CSV"),
    ("mooncake", "{'timestamp': 1}\n", "not JSON"),
    ("mooncake", '{"timestamp": 1, "input_length": 10\n', "not JSON"),
    ("mooncake", "[" * 100_000 + "\n", "not JSON"),
    ("mooncake", "[1, 10, 5]\n", "got a JSON list; an object is accepted"),
    ("mooncake", '{"timestamp": 1, "input_length": 10}\n', "missing: output_length"),
    ("mooncake", '{"timestamp": "1", "input_length": 10, "output_length": 5}\n', "timestamp: got"),
    ("mooncake", '{"timestamp": NaN, "input_length": 10, "output_length": 5}\n', "timestamp: got"),
    ("mooncake", '{"timestamp": -1, "input_length": 10, "output_length": 5}\n', "timestamp: got"),
    ("mooncake", '{"timestamp": 1, "input_length": true, "output_length": 5}\n', "input_length:"),
    ("mooncake", '{"timestamp": 1, "input_length": 10, "output_length": "5"}\n', "output_length:"),
    ("mooncake", '{"timestamp": 1, "input_length": 10, "output_length": 0}\n', "output_length:"),
    ("mooncake", '{"timestamp": 1, "input_length": 2.5, "output_length": 5}\n', "input_length:"),
]
START = {"azure": AZURE + GOOD_AZURE, "burstgpt": BURSTGPT + GOOD_BURSTGPT, "mooncake": MOONCAKE}


@pytest.mark.parametrize(
    ("trace_format", "row", "reason"), MALFORMED, ids=[case[2] for case in MALFORMED]
)
def test_malformed_row(
    tmp_path: Path, trace_format: TraceFormat, row: str | bytes, reason: str
) -> None:
    start = START[trace_format].encode()
    row = row if isinstance(row, bytes) else row.encode()
    last = start.splitlines(keepends=True)[-1]
    path = write(tmp_path, start + row + last)
    line = start.count(b"\n") + 1

    with pytest.raises(TraceError) as caught:
        read_trace(path, trace_format)
    assert str(caught.value).startswith(f"trace {path}, line {line}: ")
    assert reason in caught.value.reason
    assert (caught.value.file, caught.value.line) == (path, line)
    assert "\n" not in str(caught.value)

    trace = read_trace(path, trace_format, "skip")
    assert trace.skipped_rows == 1
    np.testing.assert_array_equal(trace.prompt_tokens, [10, 10])
    np.testing.assert_array_equal(trace.arrival_s, [0, 0])


@pytest.mark.parametrize("malformed", ["error", "skip"])
@pytest.mark.parametrize(
    ("trace_format", "content", "line", "reason"),
    [
        ("azure", "", 1, "header must name TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("azure", GOOD_AZURE, 1, "missing: TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("azure", "TIMESTAMP,ContextTokens\n" + GOOD_AZURE, 1, "missing: GeneratedTokens"),
        ("azure", b"\x1f\x8b\x08\x00\xff\xfe", 1, "missing: TIMESTAMP"),
        ("burstgpt", AZURE + GOOD_AZURE, 1, "missing: Timestamp, Request tokens"),
        ("azure", AZURE, None, "holds no requests"),
        ("burstgpt", BURSTGPT + "\n\n", None, "holds no requests"),
        ("mooncake", "", None, "holds no requests"),
    ],
)
def test_unusable_file(
    tmp_path: Path,
    trace_format: TraceFormat,
    content: str | bytes,
    line: int | None,
    reason: str,
    malformed: str,
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, trace_format, malformed)  # type: ignore[arg-type]
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(path) in str(caught.value)


def test_a_file_of_malformed_rows_only(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE + "x,1,1\nx,2,2\n")
    with pytest.raises(TraceError, match=r"holds no requests \(2 malformed rows were skipped\)"):
        read_trace(path, "azure", "skip")


def test_a_folder_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path, "azure")


def test_error_crosses_processes() -> None:
    error = TraceError("x.csv", 3, "bad")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.line) == (str(error), 3)


def test_where_a_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("argument", "variable", "current")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "t.csv").write_text(AZURE)
    monkeypatch.chdir(folders["current"])
    monkeypatch.delenv("VLLM_TENANT_TRACE_DIR", raising=False)
    assert find_trace("t.csv") == folders["current"] / "t.csv"
    monkeypatch.setenv("VLLM_TENANT_TRACE_DIR", str(folders["variable"]))
    assert find_trace("t.csv") == folders["variable"] / "t.csv"
    assert find_trace("t.csv", folders["argument"]) == folders["argument"] / "t.csv"
    absolute = folders["current"] / "t.csv"
    assert find_trace(str(absolute), folders["argument"]) == absolute


def test_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught:
        find_trace("absent.csv", tmp_path)
    message = str(caught.value)
    for part in ("absent.csv", str(tmp_path), "--trace-dir", "VLLM_TENANT_TRACE_DIR"):
        assert part in message


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "trace_format", "rows", "first", "second_s", "last"),
    [
        (
            "AzureLLMInferenceTrace_conv.csv",
            "azure",
            19366,
            (374, 44),
            4.314579,
            None,
        ),
        ("AzureLLMInferenceTrace_code.csv", "azure", 8819, (4808, 10), 0.052, (549, 173)),
        ("mooncake_conversation_trace.jsonl", "mooncake", 12031, (6758, 500), 0.0, None),
    ],
)
def test_public_trace(
    shared: Callable[[str], Path],
    file: str,
    trace_format: TraceFormat,
    rows: int,
    first: tuple[int, int],
    second_s: float,
    last: tuple[int, int] | None,
) -> None:
    trace = read_trace(shared(f"traces/{file}"), trace_format)
    assert len(trace) == rows
    assert (trace.prompt_tokens[0], trace.output_tokens[0]) == first
    assert trace.arrival_s[1] == pytest.approx(second_s, abs=1e-9)
    assert 3400 < trace.arrival_s[-1] < 3600
    if last is not None:
        assert (trace.prompt_tokens[-1], trace.output_tokens[-1]) == last
