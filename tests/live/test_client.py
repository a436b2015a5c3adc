"""One streamed completion against a server that cuts, lumps and breaks its answers."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from fake_server import FakeServer, chunk, event, fake_server, last, usage_frames

from vllm_tenant_tuning.backends.live.client import (
    Completion,
    CompletionClient,
    completion_body,
)

KEY = "sk-very-secret"


def complete(server: FakeServer, tokens: int = 4, url: str | None = None) -> Completion:
    async def main() -> Completion:
        client = CompletionClient(url or server.url, "TEST_KEY", 2.0, 2.0)
        completion = Completion()
        await client.complete(completion_body("fake", [1, 2, 3], tokens), completion)
        await client.close()
        return completion

    return asyncio.run(main())


def test_counts_tokens_and_times() -> None:
    with fake_server() as server:
        completion = complete(server, 5)
    assert (completion.end, completion.error, completion.tokens) == ("completed", "", 5)
    assert completion.prompt_tokens == 3
    times = [completion.sent_s, *completion.chunk_s]
    assert times == sorted(times)
    assert completion.chunk_s[0] == completion.first_token_s
    assert completion.chunk_s[-1] == completion.last_token_s
    assert sum(completion.chunk_tokens) == 5
    body = server.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2, 3], 5, True)
    assert "priority" not in body


def test_tpot_counts_tokens_not_chunks() -> None:
    """Role-only and empty chunks come first, then four tokens in one, then three."""

    def frames(prompt: int, tokens: int) -> list[bytes]:
        role = event({"choices": [{"delta": {"role": "assistant"}}]})
        return [
            role,
            chunk(""),
            chunk("", (prompt, 0)),
            b": a comment\n\n",
            chunk("abcd", (prompt, 4)),
            chunk("efg", (prompt, 7)),
            last(prompt, 7),
        ]

    with fake_server() as server:
        server.token_s = 0.05
        server.frames = frames
        completion = complete(server, 7)
    assert completion.tokens == 7
    assert completion.chunk_tokens.tolist() == [4, 3]
    # four events of 50 ms went before the first token
    assert completion.first_token_s - completion.sent_s > 4 * 0.05
    assert completion.last_token_s - completion.first_token_s > 0.045


def test_without_usage_in_every_chunk_the_last_one_counts() -> None:
    with fake_server() as server:
        server.frames = lambda prompt, tokens: [chunk("ab"), chunk("cd"), last(prompt, tokens)]
        completion = complete(server, 4)
    assert completion.tokens == 4
    assert completion.chunk_tokens.tolist() == [1, 1]
    assert completion.last_token_s == completion.chunk_s[1]


def test_events_cut_anywhere_are_put_together() -> None:
    for ending in (b"\n\n", b"\r\n\r\n"):
        with fake_server() as server:
            stream = b"".join(usage_frames(3, 6)).replace(b"\n\n", ending)
            cuts = [stream[i : i + 41] for i in range(0, len(stream), 41)]
            server.frames = lambda prompt, tokens, cuts=cuts: cuts  # type: ignore[misc]
            completion = complete(server, 6)
        assert (completion.end, completion.tokens) == ("completed", 6)
        assert sum(completion.chunk_tokens) == 6


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ([b"<html>not what was asked</html>\n\n"], "no event"),
        ([chunk("a", (3, 1)), b"data: {broken\n\n"], "no chunk"),
        ([event({"choices": "none"})], "no chunk"),
        ([event({"choices": [], "usage": {}})], "no chunk"),
        ([chunk("a", (3, 1)), event({"error": {"message": "engine died"}})], "engine died"),
        ([chunk("a", (3, 1))], "ended after 1 tokens"),
        ([last(3, 0)], "without a token"),
    ],
)
def test_broken_streams_fail(frames: list[bytes], says: str) -> None:
    with fake_server() as server:
        server.frames = lambda prompt, tokens: frames
        completion = complete(server)
    assert completion.end == "failed"
    assert says in completion.error
    assert completion.answered_s >= completion.sent_s


@pytest.mark.parametrize(
    ("status", "end"), [(503, "refused"), (429, "refused"), (500, "failed"), (302, "failed")]
)
def test_refusals(status: int, end: str) -> None:
    with fake_server() as server:
        server.status = status
        completion = complete(server)
    assert completion.end == end
    assert f"HTTP {status}" in completion.error
    assert "as told" in completion.error
    assert math.isnan(completion.first_token_s)


def test_refused_connection() -> None:
    with fake_server() as server:
        url = server.url
    completion = complete(server, url=url)
    assert completion.end == "failed"
    assert math.isnan(completion.answered_s)


def test_silent_stream_fails_in_time() -> None:
    with fake_server() as server:
        server.frozen = True
        completion = complete(server)
    assert completion.end == "failed"
    assert "Timeout" in completion.error


def test_api_key_goes_to_the_server_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    with fake_server() as server:
        complete(server)
        assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
        server.status, server.error_body = 401, json.dumps({"error": f"no such key: {KEY}"})
        completion = complete(server)
    assert completion.end == "failed"
    assert "no such key" in completion.error
    assert KEY not in repr(completion)
