"""The proxy of the serving tutorial, as the page has it, in front of a server."""

from __future__ import annotations

import asyncio
import importlib.util
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from fake_server import FakeServer, fake_server
from page import ROOT, blocks

from vllm_tenant_tuning import Scenario, load_scenario
from vllm_tenant_tuning.agents import make_policy

PAGE = ROOT / "docs" / "tutorials" / "serve_your_traffic.md"
BODY = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4}


@pytest.fixture(scope="module")
def tenant_gate(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    (text,) = [b.text for b in blocks(PAGE) if b.notes.get("file") == "tenant_gate.py"]
    file = tmp_path_factory.mktemp("page") / "tenant_gate.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("tenant_gate", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scenario(
    interval_s: float = 3.0, patience_s: float | None = 30.0, cap: int = 1, **tenant: Any
) -> Scenario:
    content = load_scenario("cpu_chat_batch").model_dump()
    content["control"] |= {"control_interval_s": interval_s, "window_s": interval_s}
    content["control"] |= {"episode_s": 100 * interval_s, "max_delta": 1}
    for each in content["tenants"]:
        each |= {"cap_initial": cap, "patience_s": patience_s, **tenant}
    return Scenario.model_validate(content)


async def ask(url: str, tenant: str | None = "chat") -> tuple[int, bytes]:
    headers = {} if tenant is None else {"X-Tenant": tenant}
    async with (
        ClientSession() as session,
        session.post(f"{url}/v1/completions", json=BODY, headers=headers) as answer,
    ):
        return answer.status, await answer.read()


def play(module: ModuleType, task: Scenario, policy: str, server: FakeServer, what: Any) -> Any:
    async def run() -> Any:
        proxy = module.TenantProxy(task, make_policy(policy), server.url)
        async with TestServer(proxy.app()) as front:
            return await what(proxy, str(front.make_url("")).rstrip("/"))

    return asyncio.run(run())


def test_requests_go_through_and_never_more_than_the_cap(tenant_gate: ModuleType) -> None:
    async def burst(proxy: Any, url: str) -> Any:
        answers = await asyncio.gather(*(ask(url) for _ in range(12)))
        return answers, dict(proxy.loads["chat"].counts)

    with fake_server() as server:
        answers, counts = play(tenant_gate, scenario(cap=2), "static", server, burst)
        assert {status for status, _ in answers} == {200}
        assert all(body.endswith(b"data: [DONE]\n\n") for _, body in answers)
        assert len(server.in_flight) == 12
        assert max(server.in_flight) == 2
    assert counts["arrived"] == counts["admitted"] == counts["completed"] == 12
    assert counts["dropped"] == counts["failed"] == 0


def test_a_tenant_waits_only_for_itself(tenant_gate: ModuleType) -> None:
    async def burst(proxy: Any, url: str) -> Any:
        held = [asyncio.create_task(ask(url, "batch")) for _ in range(3)]
        while not server.in_flight:
            await asyncio.sleep(0.01)
        server.frozen = False
        chat = await ask(url, "chat")
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return chat

    with fake_server() as server:
        server.frozen = True
        status, _ = play(tenant_gate, scenario(cap=1), "static", server, burst)
    assert status == 200


def test_who_waits_longer_than_its_patience_is_refused(tenant_gate: ModuleType) -> None:
    async def burst(proxy: Any, url: str) -> Any:
        answers = await asyncio.gather(*(ask(url) for _ in range(3)))
        return [status for status, _ in answers], dict(proxy.loads["chat"].counts)

    with fake_server() as server:
        server.first_token_s = 0.5
        task = scenario(cap=1, patience_s=0.1)
        statuses, counts = play(tenant_gate, task, "static", server, burst)
    assert sorted(statuses) == [200, 503, 503]
    assert counts["dropped"] == 2


@pytest.mark.parametrize("tenant", [None, "nobody"])
def test_strangers_are_refused(tenant_gate: ModuleType, tenant: str | None) -> None:
    with fake_server() as server:
        status, body = play(
            tenant_gate, scenario(), "static", server, lambda proxy, url: ask(url, tenant)
        )
        assert server.bodies == []
    assert status == 403
    assert b"chat, batch" in body


def test_the_policy_moves_the_caps(tenant_gate: ModuleType) -> None:
    """A backlog behind a cap of 1: the differentiated rule raises it, and lowers the idle one."""

    async def burst(proxy: Any, url: str) -> Any:
        before = proxy.caps.tolist()
        tasks = [asyncio.create_task(ask(url)) for _ in range(30)]
        while proxy.caps[0] < 3:
            await asyncio.sleep(0.01)
        gates = [load.gate.cap for load in proxy.loads.values()]
        await asyncio.gather(*tasks)
        return before, gates, max(server.in_flight)

    with fake_server() as server:
        server.first_token_s = 0.1
        before, gates, most = play(
            tenant_gate, scenario(0.05, cap=2), "differentiated", server, burst
        )
    assert before == [2, 2]
    assert gates[0] >= 3
    assert gates[1] == 1
    assert most > 2


def test_caps_stay_where_the_policy_fails(
    tenant_gate: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait(proxy: Any, url: str) -> Any:
        def fail(observation: Any, info: Any) -> Any:
            raise RuntimeError("as told")

        proxy.policy.act = fail
        while "the policy failed" not in caplog.text:
            await asyncio.sleep(0.01)
        return proxy.caps.tolist(), (await ask(url))[0]

    with fake_server() as server:
        caps, status = play(tenant_gate, scenario(0.05, cap=2), "static", server, wait)
    assert caps == [2, 2]
    assert status == 200


def test_the_server_that_is_gone_is_a_502(tenant_gate: ModuleType) -> None:
    async def burst(proxy: Any, url: str) -> Any:
        status, _ = await ask(url)
        return status, dict(proxy.loads["chat"].counts)

    gone = FakeServer()
    gone.url = "http://127.0.0.1:9"
    status, counts = play(tenant_gate, scenario(), "static", gone, burst)
    assert status == 502
    assert counts["failed"] == 1
    assert counts["completed"] == 0


def test_a_client_that_leaves_makes_room(tenant_gate: ModuleType) -> None:
    async def burst(proxy: Any, url: str) -> Any:
        first = asyncio.create_task(ask(url))
        while not server.in_flight:
            await asyncio.sleep(0.01)
        leaver = asyncio.create_task(ask(url))
        last = asyncio.create_task(ask(url))
        while proxy.loads["chat"].gate.queued < 2:
            await asyncio.sleep(0.01)
        leaver.cancel()
        statuses = [(await first)[0], (await last)[0]]
        return statuses

    with fake_server() as server:
        server.first_token_s = 0.3
        statuses = play(tenant_gate, scenario(cap=1), "static", server, burst)
    assert statuses == [200, 200]


def test_policies_that_read_more_than_the_gate_are_refused(
    tenant_gate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tenant_gate.py", "study", "robust", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit):
        tenant_gate.main()
    assert "accepted are those that read the gate only" in capsys.readouterr().err
