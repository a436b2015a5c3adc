"""Raw records of a live episode: a line of JSON for each request as it ends, and for each step."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.live.client import Completion

EPISODE_FILE = "episode.json"
REQUESTS_FILE = "requests.jsonl"
STEPS_FILE = "steps.jsonl"

OUTCOMES = {
    "completed": Outcome.COMPLETED,
    "patience": Outcome.DROPPED,
    "queue_full": Outcome.DROPPED,
    "refused": Outcome.FAILED,
    "failed": Outcome.FAILED,
    "cut_off": Outcome.IN_FLIGHT,
    "waiting": Outcome.QUEUED,
}
"""What a record calls the end of a request, and what that is in `RequestOutcomes`: "patience" and
"queue_full" are drops at the gate, "refused" is HTTP 503 or 429, "cut_off" and "waiting" were in
flight and at the gate when the episode ended."""


class RecordFile:
    """Appends JSON lines to a file; each is on disk before the next.

    Args:
        path: of the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def request_record(
    *,
    request: int,
    tenant: str,
    prompt_tokens: int,
    output_tokens: int,
    end: str,
    start_s: float,
    arrival_s: float,
    admitted_s: float,
    finished_s: float,
    completion: Completion | None,
) -> dict[str, Any]:
    """The record of a request, times in seconds from the start of the episode.

    `chunk_us` is base64 of little-endian int32: microseconds from being sent to the first chunk
    with tokens, then from chunk to chunk; `chunk_tokens` the tokens of each, left out where every
    chunk has one.
    """
    record: dict[str, Any] = {
        "request": request,
        "tenant": tenant,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "end": end,
        "arrival_s": _rounded(arrival_s),
        "admitted_s": _rounded(admitted_s),
        "finished_s": _rounded(finished_s),
    }
    if completion is not None:
        record |= {
            "sent_s": _rounded(completion.sent_s - start_s),
            "first_token_s": _rounded(completion.first_token_s - start_s),
            "usage_prompt_tokens": completion.prompt_tokens,
            "usage_output_tokens": completion.tokens,
        }
        if completion.error:
            record["error"] = completion.error
        if completion.chunk_s:
            times = np.array([completion.sent_s, *completion.chunk_s])
            gaps_us = np.rint(np.diff(times) * 1e6).astype("<i4")
            record["chunk_us"] = base64.b64encode(gaps_us.tobytes()).decode()
            if any(tokens != 1 for tokens in completion.chunk_tokens):
                record["chunk_tokens"] = completion.chunk_tokens.tolist()
    return record


def read_requests(folder: str | Path) -> list[dict[str, Any]]:
    """The records of an episode's requests, in the order in which they ended.

    A last line that a crash has cut off is left out. The file may be compressed (`.gz`).
    """
    records = []
    path = Path(folder) / REQUESTS_FILE
    packed = path.with_name(f"{REQUESTS_FILE}.gz")
    is_packed = packed.exists() and not path.exists()
    with (
        gzip.open(packed, "rt", encoding="utf-8") if is_packed else path.open(encoding="utf-8")
    ) as lines:
        for line in lines:
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def chunk_times_s(record: Mapping[str, Any]) -> tuple[npt.NDArray[np.float64], list[int]]:
    """When each chunk of a recorded request came, and how many tokens it had.

    Returns:
        (chunks,) float64, seconds from the start of the episode; and as many counts.
    """
    gaps_us = np.frombuffer(base64.b64decode(record.get("chunk_us", "")), "<i4")
    times = (record.get("sent_s") or 0.0) + np.cumsum(gaps_us) / 1e6
    return times, record.get("chunk_tokens") or [1] * len(times)


def read_outcomes(folder: str | Path) -> RequestOutcomes:
    """What became of every request that arrived, from the records, in order of its number."""
    records = sorted(read_requests(folder), key=lambda record: record["request"])
    tenants = json.loads((Path(folder) / EPISODE_FILE).read_text())["tenants"]

    def column(name: str) -> npt.NDArray[np.float64]:
        values = [record.get(name) for record in records]
        return np.array([math.nan if value is None else value for value in values], np.float64)

    ends = [OUTCOMES[record["end"]] for record in records]
    finished_s = column("finished_s")
    finished_s[np.isin(ends, (Outcome.IN_FLIGHT, Outcome.QUEUED))] = np.nan
    return RequestOutcomes(
        tenant=np.array([tenants.index(record["tenant"]) for record in records], np.int64),
        prompt_tokens=column("prompt_tokens").astype(np.int64),
        output_tokens=column("output_tokens").astype(np.int64),
        outcome=np.array(ends, np.int8),
        arrival_s=column("arrival_s"),
        admitted_s=column("admitted_s"),
        scheduled_s=np.full(len(records), np.nan),
        first_token_s=column("first_token_s"),
        finished_s=finished_s,
        preemptions=np.zeros(len(records), np.int64),
    )


def _rounded(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds, 6)
