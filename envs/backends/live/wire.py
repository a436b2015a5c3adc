"""What the load process and its sending processes say to each other, and how.

Not in `worker.py`: what a process's main module defines has another name in the others.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from vllm_tenant_tuning.backends.live.client import End

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Server:
    """The server to send to: arguments of `CompletionClient`."""

    url: str
    api_key_env: str
    connect_timeout_s: float
    read_timeout_s: float


@dataclass(frozen=True)
class Request:
    """Send a completion; `number` names it from then on."""

    number: int
    body: bytes


@dataclass(frozen=True)
class Cancel:
    """Cancel a completion that was sent."""

    number: int


@dataclass(frozen=True)
class Ended:
    """What came of a completion, its chunks aside."""

    number: int
    end: End
    error: str
    sent_s: float
    answered_s: float
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class Batch:
    """What happened since the batch before.

    Attributes:
        sent: numbers of requests, and when each was handed to its connection.
        chunks: numbers of requests, when a chunk came, and how many tokens it had; in order.
        ended: requests that have ended, after their chunks.
        lag_s: how late the event loop woke up.
    """

    sent: list[tuple[int, float]]
    chunks: list[tuple[int, float, int]]
    ended: list[Ended]
    lag_s: float


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message without waiting for the other end."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(_LENGTH.pack(len(data)) + data)


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Read the next message.

    Raises:
        EOFError: the other end is gone.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
