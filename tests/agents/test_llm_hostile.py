"""Whatever an endpoint does, the episode goes on, and what it did is counted as what it is."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from llm_server import OK, Behaviour, Exchange, completion, llm_server, says, tool_call
from test_env import short

from vllm_tenant_tuning.agents.llm import LLMPolicy, agent_text
from vllm_tenant_tuning.baselines.episode import make_env, play

SCENARIO = short("premium_burst", 9.0)  # 3 decisions, max_delta 1, caps 4/4 in 1 to 8
HANGING = short("premium_burst", 3.0)
TIMEOUT_S = 0.4


def status(code: int, body: str = "{}", **headers: str) -> Behaviour:
    return lambda exchange: exchange.respond(body, status=code, **headers)


def sends(body: str | bytes, **more: Any) -> Behaviour:
    return lambda exchange: exchange.respond(body, **more)


def flood(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    while not exchange.stop.is_set():
        exchange.raw(b"x" * 65536)


def flood_with_an_error(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 500 X\r\nContent-Type: application/json\r\n\r\n")
    while not exchange.stop.is_set():
        exchange.raw(b"x" * 65536)


def gzip_bomb(exchange: Exchange) -> None:
    bomb = gzip.compress(b" " * 30_000_000 + completion(OK).encode())
    assert len(bomb) < 60_000
    exchange.respond(bomb, Content_Encoding="gzip")


def stall(exchange: Exchange) -> None:
    exchange.stop.wait(20)


def stall_after_headers(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
    exchange.stop.wait(20)


def drip(exchange: Exchange) -> None:
    """A whole and valid answer, a byte at a time."""
    exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    for byte in completion(OK).encode():
        if exchange.stop.wait(0.02):
            return
        exchange.raw(bytes([byte]))


def drip_headers(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\n")
    for number in range(1000):
        if exchange.stop.wait(0.02):
            return
        exchange.raw(f"X-{number}: y\r\n".encode())


def huge_header(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\nX-Long: " + b"y" * 1_000_000 + b"\r\n\r\n")


def no_http(exchange: Exchange) -> None:
    exchange.raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")


def hang_up(exchange: Exchange) -> None:
    pass


def reset(exchange: Exchange) -> None:
    exchange.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    exchange.socket.close()


def break_off(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + completion(OK).encode()[:50])


def bad_chunks(exchange: Exchange) -> None:
    exchange.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nnonsense\r\n")


def redirect_to_itself(exchange: Exchange) -> None:
    exchange.respond("", status=307, Location=exchange.path)


def redirect_elsewhere(exchange: Exchange) -> None:
    exchange.respond("", status=302, Location="http://192.0.2.1/v1/chat/completions")


def event_stream(exchange: Exchange) -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": OK}}]}
    exchange.respond(
        f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
    )


def no_choices(exchange: Exchange) -> None:
    exchange.respond(json.dumps({"id": "x", "choices": [], "model": "tiny"}))


def calls(*arguments: str, name: str = "change_caps") -> Behaviour:
    return says(None, tool_calls=[tool_call(argument, name) for argument in arguments])


NESTED = "[" * 20_000

# name: what the endpoint does, and what its two attempts of a decision count as
HOSTILE: dict[str, tuple[Behaviour, str]] = {
    # on the way
    "hangs up": (hang_up, "connection"),
    "resets": (reset, "connection"),
    "breaks off": (break_off, "connection"),
    "not HTTP": (no_http, "connection"),
    "bad chunks": (bad_chunks, "connection"),
    "huge header": (huge_header, "connection"),
    "floods": (flood, "too_large"),
    "floods with an error": (flood_with_an_error, "too_large"),
    "gzip bomb": (gzip_bomb, "too_large"),
    "long whole body": (sends(completion("x" * 70_000)), "too_large"),
    # said by the status
    "401": (status(401), "unauthorized"),
    "403": (status(403), "unauthorized"),
    "404": (status(404, "<html>no</html>"), "not_found"),
    "429": (status(429, Retry_After="9999"), "rate_limited"),
    "418": (status(418), "bad_request"),
    "500": (status(500, "Internal Server Error"), "server_error"),
    "503 with an answer": (status(503, completion(OK)), "server_error"),
    "redirects to itself": (redirect_to_itself, "redirect"),
    "redirects elsewhere": (redirect_elsewhere, "redirect"),
    # no completion
    "empty body": (sends(""), "not_json"),
    "204": (status(204, ""), "not_json"),
    "garbage": (sends(b"\x00\xff\xfe garbage"), "not_json"),
    "truncated JSON": (sends(completion(OK)[:80]), "not_json"),
    "HTML": (sends("<html>hello</html>", content_type="text/html"), "not_json"),
    "event stream": (event_stream, "not_json"),
    "deep nesting": (sends(NESTED), "not_json"),
    "JSON null": (sends("null"), "not_a_completion"),
    "JSON list": (sends("[1, 2]"), "not_a_completion"),
    "error as success": (sends('{"error": {"message": "no"}}'), "not_a_completion"),
    "choices a string": (sends('{"choices": "t1"}'), "not_a_completion"),
    "content a list": (says([{"type": "text", "text": OK}]), "not_a_completion"),
    "lone surrogate": (says("\ud800"), "unreadable"),
    # no answer
    "no choices": (no_choices, "no_answer"),
    "null content": (says(None), "no_answer"),
    "blank content": (says(" \n\t "), "no_answer"),
    "only thinking": (says("<think>t1: 1, t2: 1</think>"), "no_answer"),
    "cut off": (says('{"t1":           ', finish_reason="length"), "cut_off"),
    "cut off in a number": (says('{"t1": 1, "t2": 1', finish_reason="length"), "cut_off"),
    # an answer that is none
    "prose": (says("I would hold both caps for now."), "unreadable"),
    "a JSON list": (says("[0, 0]"), "unreadable"),
    "deep nesting inside": (says(NESTED), "unreadable"),
    "many braces": (says("{" * 60_000), "unreadable"),
    "nested opening objects": (says('{"a":' * 7_000), "unreadable"),
    "another tool": (calls('{"t1": 0, "t2": 0}', name="rm"), "unreadable"),
    "two tool calls": (calls(OK, OK), "unreadable"),
    "broken arguments": (calls('{"t1": 0,'), "unreadable"),
    # wrong tenants
    "too few tenants": (says('{"t1": 0}'), "wrong_tenants"),
    "too many tenants": (says('{"t1": 0, "t2": 0, "t3": 0}'), "wrong_tenants"),
    "unknown tenants": (says('{"premium": 0, "batch": 0}'), "wrong_tenants"),
    "a tenant twice": (says('{"t1": 0, "t1": 1, "t2": 0}'), "wrong_tenants"),
    "a tenant twice in a call": (calls('{"t1": 0, "t1": 1, "t2": 0}'), "wrong_tenants"),
    "nested": (says('{"changes": {"t1": 0, "t2": 0}}'), "wrong_tenants"),
    "empty object": (says("{}"), "wrong_tenants"),
    # wrong types
    "strings": (says('{"t1": "1", "t2": "0"}'), "wrong_type"),
    "NaN": (says('{"t1": NaN, "t2": 0}'), "wrong_type"),
    "infinity": (says('{"t1": -Infinity, "t2": 1e999}'), "wrong_type"),
    "fractions": (says('{"t1": 0.5, "t2": 0}'), "wrong_type"),
    "booleans": (says('{"t1": true, "t2": false}'), "wrong_type"),
    "null": (says('{"t1": null, "t2": 0}'), "wrong_type"),
    "nested numbers": (says('{"t1": [1], "t2": {"x": 1}}'), "wrong_type"),
    # out of range
    "beyond max_delta": (says('{"t1": 2, "t2": 0}'), "out_of_range"),
    "huge": (says('{"t1": -99999999999999999999999, "t2": 0}'), "out_of_range"),
    "thousands of digits": (says(f'{{"t1": {"9" * 5000}, "t2": 0}}'), "out_of_range"),
    "beyond, in a call": (calls('{"t1": 0, "t2": 1000000}'), "out_of_range"),
    "beyond, in prose": (says("t1: 9, t2: -9"), "out_of_range"),
}
HANGS: dict[str, Behaviour] = {
    "stalls": stall,
    "stalls after headers": stall_after_headers,
    "drips the body": drip,
    "drips headers": drip_headers,
}
ASKED_ONCE = {"unauthorized", "not_found", "rate_limited", "redirect"}


def played(scenario: Any, url: str, **options: Any) -> tuple[Any, Any]:
    """One episode against an endpoint: the record and the caps over time."""
    policy = LLMPolicy(agent_text("llm", {"base_url": url, "model": "m"} | options))
    env = make_env(scenario)
    try:
        record, trajectory = play(env, policy, 0)
    finally:
        policy.close()
        env.close()
    return record, trajectory["caps"]


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) + len(HANGS) >= 65


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_endpoint_holds_the_caps_and_is_counted(name: str) -> None:
    behaviour, failure = HOSTILE[name]
    with llm_server(behaviour) as server:
        record, caps = played(SCENARIO, server.url, output="json_schema")
        asked = len(server.exchanges)
    once = failure in ASKED_ONCE or failure == "bad_request"
    decisions = record.decisions
    assert decisions.failures == {failure: 3 if once else 6}
    assert decisions.attempts == asked == (3 if once else 6)
    assert decisions.retries == (0 if once else 3)
    assert (decisions.decisions, decisions.held, decisions.applied) == (3, 3, 0)
    assert (caps == 4).all()
    assert (record.steps, record.truncation) == (3, "time_limit")


@pytest.mark.parametrize("name", HANGS)
def test_an_endpoint_that_hangs_is_left_at_the_deadline(name: str) -> None:
    with llm_server(HANGS[name]) as server:
        began = time.perf_counter()
        record, caps = played(HANGING, server.url, timeout_s=TIMEOUT_S)
        took_s = time.perf_counter() - began
    assert record.decisions.failures == {"timeout": 1}  # no time is left to ask again
    assert record.decisions.latency_max_s == TIMEOUT_S
    assert took_s < 15  # a drip would take 8 s at least, a stall 20
    assert (caps == 4).all()


def test_nobody_there() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
        record, caps = played(SCENARIO, url)
    assert record.decisions.failures == {"connection": 6}
    assert (caps == 4).all()


def test_no_such_host_and_no_tls() -> None:
    record, _ = played(HANGING, "http://no-such-host.invalid/v1")
    assert set(record.decisions.failures) <= {"connection", "timeout"}
    with llm_server() as server:
        record, _ = played(HANGING, server.url.replace("http:", "https:"))
    assert record.decisions.failures == {"connection": 2}


@pytest.mark.parametrize(
    "content",
    [
        OK,
        f"```json\n{OK}\n```",
        f"Premium queues, so:\n\n```\n{OK}\n```\nDone.",
        f"<think>maybe {{'t1': 0}} or t1: -1</think>\n{OK}",
        f'First {{"t1": 0, "t2": 0}}, no: {OK}',
        "t1: +1, t2: -1",
        "I choose **t1**: 1 and `t2` = -1.",
        '{"t1": +1, "t2": -1}',  # not JSON, and common
        f'{OK[:-1]}, "reason": "queue \\ud800"}}',
    ],
)
def test_answers_with_something_around_them_are_read(content: str) -> None:
    with llm_server(says(content)) as server:
        record, caps = played(SCENARIO, server.url, decision_latency_s=0)
    assert record.decisions.failures == {}
    assert caps.tolist() == [[5, 3], [6, 2], [7, 1]]


@pytest.mark.parametrize("name", ["tool call", "tool call beside content", "another content type"])
def test_other_forms_of_a_good_answer_are_read(name: str) -> None:
    behaviours = {
        "tool call": calls(OK),
        "tool call beside content": says("As you wish.", tool_calls=[tool_call(OK)]),
        "another content type": sends(completion(OK), content_type="text/plain"),
    }
    with llm_server(behaviours[name]) as server:
        record, caps = played(SCENARIO, server.url, decision_latency_s=0)
    assert record.decisions.failures == {}
    assert caps[0].tolist() == [5, 3]


@pytest.mark.parametrize(
    "usage",
    [
        None,
        "many",
        {},
        {"prompt_tokens": -5, "completion_tokens": 1},
        {"prompt_tokens": 1e300, "completion_tokens": 1},
        {"prompt_tokens": True, "completion_tokens": 1},
        {"prompt_tokens": 10**30, "completion_tokens": 1},
        {"prompt_tokens": "5", "completion_tokens": 1},
    ],
)
def test_a_lie_about_tokens_is_not_believed(usage: Any) -> None:
    prices = {
        "price_per_million_prompt_tokens_usd": 1,
        "price_per_million_completion_tokens_usd": 1,
    }
    with llm_server(says(OK, usage=usage)) as server:
        record, _ = played(SCENARIO, server.url, **prices)
    decisions = record.decisions
    assert (decisions.prompt_tokens, decisions.completion_tokens) == (0, 0)
    assert (decisions.unreported, decisions.answered) == (3, 3)
    assert decisions.cost_usd == 0


def test_a_mixture_of_all_of_them_cannot_move_a_cap_out_of_its_bounds() -> None:
    rng = np.random.default_rng(0)
    mixed = [behaviour for behaviour, _ in HOSTILE.values()] + [says(OK)] * 30
    order = rng.permutation(len(mixed) * 8) % len(mixed)

    def any_of_them(exchange: Exchange) -> None:
        mixed[order[exchange.number % len(order)]](exchange)

    scenario = short("premium_burst", 300.0)
    with llm_server(any_of_them) as server:
        record, caps = played(scenario, server.url, decision_latency_s=0)
        asked = len(server.exchanges)
    decisions = record.decisions
    assert decisions.decisions == 100
    assert decisions.answered + decisions.held == 100
    assert decisions.applied == decisions.answered > 20
    assert decisions.held > 5
    assert decisions.attempts == asked == decisions.answered + sum(decisions.failures.values())
    assert (caps >= 1).all()
    assert (caps <= 8).all()
    assert np.abs(np.diff(caps, axis=0)).max() == 1
    known = Counter(failure for _, failure in HOSTILE.values())
    assert set(decisions.failures) <= set(known)
