"""Readers of public request traces: Azure, BurstGPT and Mooncake.

A row is malformed if it has not its header's number of columns (or is not a JSON object), if a
needed value is missing or not a finite number, if a time is negative or before that of the row
above, or if a token count is not a whole number of at least 1. So the failed requests of
BurstGPT, which have no response tokens, are malformed rows. Blank lines are passed over.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

TRACE_DIR_VARIABLE = "VLLM_TENANT_TRACE_DIR"

TraceFormat = Literal["azure", "burstgpt", "mooncake"]
Row = tuple[int, int, int]
"""Time in nanoseconds, prompt tokens and output tokens."""
RowParser = Callable[[bytes], Row]

_MAX_TOKENS = 10_000_000
_MAX_TIME_NS = 9.2e18  # what an int64 can hold: the year 2261
_TIMESTAMP = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class TraceError(ValueError):
    """A trace that cannot be used.

    Attributes:
        file: the trace file.
        line: number of the faulty line, counted from 1; None if the whole file is meant.
        reason: what is wrong.
    """

    def __init__(self, file: str | Path, line: int | None, reason: str) -> None:
        place = f"{file}" if line is None else f"{file}, line {line}"
        super().__init__(f"trace {place}: {reason}")
        self.file, self.line, self.reason = Path(file), line, reason

    def __reduce__(self) -> tuple[type[TraceError], tuple[Path, int | None, str]]:
        return type(self), (self.file, self.line, self.reason)


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace, in order.

    Attributes:
        file: where they were read.
        arrival_s: (n,) float64, seconds since the first request, not decreasing.
        prompt_tokens: (n,) int64, at least 1.
        output_tokens: (n,) int64, at least 1.
        skipped_rows: number of malformed rows that were left out.
    """

    file: Path
    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    skipped_rows: int

    def __len__(self) -> int:
        return len(self.arrival_s)


def find_trace(file: str | Path, trace_dir: str | Path | None = None) -> Path:
    """Where a trace file lies.

    A relative `file` is looked for in `trace_dir` if given, else in the folder named by the
    environment variable VLLM_TENANT_TRACE_DIR if set, else in the current directory.

    Raises:
        TraceError: there is no such file.
    """
    path = Path(file)
    if not path.is_absolute():
        folder = Path(trace_dir or os.environ.get(TRACE_DIR_VARIABLE) or Path.cwd())
        path = folder / path
    if not path.is_file():
        raise TraceError(
            file,
            None,
            f"not found: there is no file {path}; name its folder with --trace-dir (in "
            f"Python trace_dir=...) or the environment variable {TRACE_DIR_VARIABLE}",
        )
    return path


def read_trace(
    path: str | Path, trace_format: TraceFormat, malformed: Literal["error", "skip"] = "error"
) -> Trace:
    """Read a trace file.

    Args:
        path: the file.
        trace_format: "azure" (CSV with TIMESTAMP, ContextTokens, GeneratedTokens), "burstgpt"
            (CSV with Timestamp in seconds, Request tokens, Response tokens) or "mooncake"
            (JSON lines with timestamp in milliseconds, input_length, output_length). Other
            columns and keys are ignored.
        malformed: what to do with a malformed row: "error" raises, "skip" leaves it out and
            counts it.

    Raises:
        TraceError: a file that cannot be read, a wrong header, a malformed row, or no request.
    """
    path = Path(path)
    time_ns, prompt_tokens, output_tokens = array("q"), array("q"), array("q")
    skipped = 0
    try:
        with path.open("rb") as file:
            lines = _numbered_lines(file)
            parse = _PARSERS[trace_format](path, lines)
            for line, raw in lines:
                try:
                    now_ns, prompt, output = parse(raw)
                    if time_ns and now_ns < time_ns[-1]:
                        raise ValueError("its time is before that of the row above")
                except ValueError as error:
                    if malformed == "error":
                        raise TraceError(path, line, str(error)) from error
                    skipped += 1
                    continue
                time_ns.append(now_ns)
                prompt_tokens.append(prompt)
                output_tokens.append(output)
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from error
    if not time_ns:
        rows = f" ({skipped} malformed rows were skipped)" if skipped else ""
        raise TraceError(path, None, f"holds no requests{rows}")
    times = np.array(time_ns, np.int64)
    return Trace(
        file=path,
        arrival_s=(times - times[0]) / 1e9,
        prompt_tokens=np.array(prompt_tokens, np.int64),
        output_tokens=np.array(output_tokens, np.int64),
        skipped_rows=skipped,
    )


def _numbered_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without a byte order mark, with their numbers."""
    for line, raw in enumerate(file, 1):
        stripped = raw.removeprefix(codecs.BOM_UTF8).strip()
        if stripped:
            yield line, stripped


def _csv_parser(
    path: Path,
    lines: Iterator[tuple[int, bytes]],
    columns: tuple[str, str, str],
    parse_time_ns: Callable[[str], int],
) -> RowParser:
    """Read the header and return what parses a row below it.

    Raises:
        TraceError: the header lacks one of the columns.
    """
    line, raw = next(lines, (1, b""))
    header = [name.strip() for name in raw.decode("utf-8", "replace").split(",")]
    missing = [name for name in columns if name not in header]
    if missing:
        raise TraceError(
            path, line, f"the header must name {', '.join(columns)}; missing: {', '.join(missing)}"
        )
    time_at, prompt_at, output_at = (header.index(name) for name in columns)

    def parse(raw: bytes) -> Row:
        try:
            (cells,) = csv.reader([_text(raw)])
        except csv.Error as error:
            raise ValueError(f"not CSV: {error}") from error
        if len(cells) != len(header):
            raise ValueError(f"got {len(cells)} columns, the header has {len(header)}")
        return (
            parse_time_ns(cells[time_at].strip()),
            _tokens(columns[1], cells[prompt_at].strip()),
            _tokens(columns[2], cells[output_at].strip()),
        )

    return parse


def _azure_parser(path: Path, lines: Iterator[tuple[int, bytes]]) -> RowParser:
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    return _csv_parser(path, lines, columns, _timestamp_ns)


def _burstgpt_parser(path: Path, lines: Iterator[tuple[int, bytes]]) -> RowParser:
    def time_ns(text: str) -> int:
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"Timestamp: got {text!r}; a number of seconds is accepted")
        return _nanoseconds("Timestamp", float(text), 1e9)

    columns = ("Timestamp", "Request tokens", "Response tokens")
    return _csv_parser(path, lines, columns, time_ns)


def _mooncake_parser(path: Path, lines: Iterator[tuple[int, bytes]]) -> RowParser:
    return _mooncake_row


def _mooncake_row(raw: bytes) -> Row:
    try:
        row = json.loads(_text(raw))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"got a JSON {type(row).__name__}; an object is accepted")
    missing = [key for key in ("timestamp", "input_length", "output_length") if key not in row]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    timestamp = row["timestamp"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise ValueError(f"timestamp: got {timestamp!r}; a number of milliseconds is accepted")
    tokens = []
    for key in ("input_length", "output_length"):
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, int):
            value = repr(value)
        tokens.append(_tokens(key, str(value)))
    return _nanoseconds("timestamp", timestamp, 1e6), tokens[0], tokens[1]


_PARSERS: dict[str, Callable[[Path, Iterator[tuple[int, bytes]]], RowParser]] = {
    "azure": _azure_parser,
    "burstgpt": _burstgpt_parser,
    "mooncake": _mooncake_parser,
}


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error


def _timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of a date and time; without a zone it is UTC.

    `datetime` keeps microseconds only, and the traces have seven digits: the fraction is read
    apart.
    """
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        seconds, fraction, zone = match.groups()
        moment = datetime.fromisoformat(seconds + (zone or "+00:00"))
    except ValueError as error:
        raise ValueError(
            f"TIMESTAMP: got {text!r}; accepted is YYYY-MM-DD HH:MM:SS, with up to nine more "
            "digits and a time zone"
        ) from error
    whole_ns = _nanoseconds("TIMESTAMP", moment.timestamp(), 1e9)
    return whole_ns + int((fraction or "").ljust(9, "0"))


def _nanoseconds(name: str, time: float, unit_ns: float) -> int:
    """A time in nanoseconds, so that differences of absolute times are exact."""
    if not 0 <= time <= _MAX_TIME_NS / unit_ns:
        raise ValueError(
            f"{name}: got {time:g}; a finite number from 0 to {_MAX_TIME_NS / unit_ns:g} "
            "is accepted"
        )
    return round(time * unit_ns)


def _tokens(name: str, text: str) -> int:
    """A number of tokens."""
    if text.isascii() and text.isdigit() and len(text) <= 20:
        tokens = int(text)
        if 1 <= tokens <= _MAX_TOKENS:
            return tokens
    raise ValueError(f"{name}: got {text}; a whole number from 1 to {_MAX_TOKENS} is accepted")
