"""One streamed completion: what is sent, and when every token came back.

Tokens are counted by the server's own usage, which vLLM puts into every chunk when asked: a
chunk may carry several tokens, and chunks without any (a role, half a character) may come first.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp

READ_BUFFER_BYTES = 2**20
"""aiohttp's own 64 KiB pause the connection under bursts (vllm issue 39963)."""

KEEPALIVE_S = 2.0
"""Below the 5 s after which vLLM's server closes an idle connection, which a request sent just
then would be lost on."""

MAX_ERROR_CHARACTERS = 200

End = Literal["completed", "refused", "failed", "cut_off"]

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


OnTokens = Callable[[float, float, int], None]
"""Called for every chunk with tokens: when it came, when the one before it came (NaN for the
first), and how many tokens it has."""


@dataclass(slots=True)
class Completion:
    """A request and what came of it. Times are of `time.monotonic()`, NaN before they are known.

    Attributes:
        end: "refused" is HTTP 503 or 429; "cut_off" is a request that was cancelled.
        error: why it was refused or failed; empty otherwise.
        sent_s: when the request was handed to the connection.
        first_token_s, last_token_s: when the first and the last chunk with tokens came.
        answered_s: when the server's answer began.
        tokens: generated, by the server's usage.
        prompt_tokens: of the prompt, by the server's usage.
        chunk_s: when each chunk with tokens came.
        chunk_tokens: how many tokens each had.
    """

    end: End = "cut_off"
    error: str = ""
    sent_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    answered_s: float = math.nan
    tokens: int = 0
    prompt_tokens: int = 0
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("l"))

    def add_chunk(self, now_s: float, tokens: int, on_tokens: OnTokens | None) -> None:
        """Take a chunk with tokens that came at `now_s`, and tell `on_tokens`."""
        self.tokens += tokens
        self.chunk_s.append(now_s)
        self.chunk_tokens.append(tokens)
        if len(self.chunk_s) == 1:
            self.first_token_s = now_s
        if on_tokens is not None:
            on_tokens(now_s, self.last_token_s, tokens)
        self.last_token_s = now_s


class BrokenStreamError(Exception):
    """A stream that is not what the completions API promises."""


def completion_body(
    model: str, prompt: list[int], output_tokens: int, priority: int | None = None
) -> bytes:
    """The JSON body of a streamed completion of exactly `output_tokens` tokens.

    Args:
        model: the served model's name.
        prompt: token ids.
        output_tokens: how many to generate, whatever the model would like.
        priority: of the request, lower first; None where the server does not schedule by it.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if priority is not None:
        body["priority"] = priority
    return json.dumps(body, separators=(",", ":")).encode()


class CompletionClient:
    """Sends completions to one server, any number at once.

    Args:
        url: of the server, without `/v1`.
        api_key_env: the environment variable that holds the API key, if there is one. The key
            is kept nowhere else.
        connect_timeout_s: how long a connection may take to be accepted.
        read_timeout_s: how long a stream may be silent.
    """

    def __init__(
        self, url: str, api_key_env: str, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        self._url = url.rstrip("/")
        self._api_key_env = api_key_env
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_note_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
            ),
            read_bufsize=READ_BUFFER_BYTES,
            trace_configs=[trace],
        )

    async def complete(
        self, body: bytes, completion: Completion, on_tokens: OnTokens | None = None
    ) -> None:
        """Send a completion and fill in what comes of it, as it comes.

        Every fault of the server ends up in `completion`; only cancellation is raised.
        """
        try:
            async with self._session.post(
                f"{self._url}/v1/completions",
                data=body,
                headers=self._headers({"Content-Type": "application/json"}),
                allow_redirects=False,
                trace_request_ctx=completion,
            ) as response:
                completion.answered_s = time.monotonic()
                if response.status != 200:
                    completion.end = "refused" if response.status in (429, 503) else "failed"
                    text = await response.content.read(4096)
                    completion.error = self._clean(
                        f"HTTP {response.status}: {text.decode(errors='replace')}"
                    )
                    return
                await _read_stream(response.content, completion, on_tokens)
        except (TimeoutError, aiohttp.ClientError, OSError, BrokenStreamError) as error:
            completion.end = "failed"
            completion.error = self._clean(f"{type(error).__name__}: {error}")

    def take_lags(self) -> list[float]:
        """Lags of other event loops than the caller's: there is none."""
        return []

    async def get(self, path: str, timeout_s: float) -> tuple[int, str]:
        """Get a page of the server: status and text.

        Raises:
            ConnectionError: no answer within `timeout_s`; the message says why.
        """
        try:
            async with self._session.get(
                f"{self._url}{path}",
                headers=self._headers({}),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                return response.status, await response.text()
        except TimeoutError as error:
            raise ConnectionError(f"{path}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise ConnectionError(f"{path}: {self._clean(str(error))}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def _headers(self, headers: dict[str, str]) -> dict[str, str]:
        key = os.environ.get(self._api_key_env)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _clean(self, text: str) -> str:
        """One short line without the API key, should a server repeat it."""
        key = os.environ.get(self._api_key_env)
        if key:
            text = text.replace(key, "***")
        return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


async def _note_sent(_session: Any, context: SimpleNamespace, _chunk: Any) -> None:
    if isinstance(context.trace_request_ctx, Completion):
        context.trace_request_ctx.sent_s = time.monotonic()


async def _read_stream(
    content: aiohttp.StreamReader, completion: Completion, on_tokens: OnTokens | None
) -> None:
    """Read server-sent events up to the end of the response.

    Raises:
        BrokenStreamError: an event that is no completion chunk, an error sent by the server, or
            an end before `[DONE]`.
    """
    done = False
    rest = b""
    usage = None
    while block := await content.readany():
        now = time.monotonic()
        if rest or not block.endswith(b"\n\n"):
            block = (rest + block).replace(b"\r\n", b"\n")
            events, separator, rest = block.rpartition(b"\n\n")
            block = events + separator
        tokens = completion.tokens
        for event in block.split(b"\n\n"):
            if event.startswith(b"data: {"):
                found = _COMPLETION_TOKENS.search(event)
                if found and b'"choices":[]' not in event:
                    tokens = int(found[1])
                    continue
                chunk = _parse(event)
                if chunk["choices"]:
                    # without usage in every chunk, one with text counts as one token at first
                    tokens += any(choice.get("text") for choice in chunk["choices"])
                else:
                    usage = chunk["usage"]
            elif event == b"data: [DONE]":
                done = True
            elif event and not event.startswith(b":"):
                raise BrokenStreamError(f"got {event[:80]!r}, no event of a completion")
        new = tokens - completion.tokens
        if new > 0:
            completion.add_chunk(now, new, on_tokens)
    if not done:
        raise BrokenStreamError(f"the stream ended after {completion.tokens} tokens")
    if completion.tokens == 0:
        raise BrokenStreamError("the stream ended without a token")
    if usage is not None:
        completion.tokens = int(usage["completion_tokens"])
        completion.prompt_tokens = int(usage["prompt_tokens"])
    completion.end = "completed"


def _parse(event: bytes) -> dict[str, Any]:
    """A chunk that the short way does not cover: without usage, an error, or the last one.

    Raises:
        BrokenStreamError: an error sent by the server, or no chunk of a completion.
    """
    try:
        content = json.loads(event.removeprefix(b"data: "))
    except ValueError as error:
        raise BrokenStreamError(f"got {event[:80]!r}, no chunk of a completion") from error
    if "error" in content:
        raise BrokenStreamError(f"the server sent an error: {content['error']}")
    choices, usage = content.get("choices"), content.get("usage")
    is_choices = isinstance(choices, list) and all(isinstance(c, dict) for c in choices)
    is_usage = isinstance(usage, dict) and {"completion_tokens", "prompt_tokens"} <= usage.keys()
    if not is_choices or not (choices or is_usage):
        raise BrokenStreamError(f"got {event[:80]!r}, no chunk of a completion")
    return dict(content)
