"""The open loop against a counting server: how many at once, how many a second, what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, chunk, fake_server, last

from vllm_tenant_tuning import Scenario, load_scenario
from vllm_tenant_tuning.backends import Outcome
from vllm_tenant_tuning.backends.live.client import CompletionClient
from vllm_tenant_tuning.backends.live.load import Load, Prompts
from vllm_tenant_tuning.backends.live.pool import WorkerPool
from vllm_tenant_tuning.backends.live.records import (
    EPISODE_FILE,
    RecordFile,
    chunk_times_s,
    read_outcomes,
    read_requests,
)
from vllm_tenant_tuning.backends.live.wire import Server
from vllm_tenant_tuning.telemetry import conservation_error
from vllm_tenant_tuning.workload import RequestStream


def scenario(n_tenants: int = 1, **tenant: Any) -> Scenario:
    packaged = load_scenario("cpu_chat_batch")
    tenants = tuple(
        packaged.tenants[0].model_copy(update={"name": f"t{i}", **tenant}) for i in range(n_tenants)
    )
    return packaged.model_copy(update={"tenants": tenants})


def stream(*arrivals_s: list[float], prompt: int = 8, output: int = 4) -> RequestStream:
    counts = [len(times) for times in arrivals_s]
    n = sum(counts)
    return RequestStream(
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        arrival_s=np.concatenate([np.asarray(times, float) for times in arrivals_s]),
        prompt_tokens=np.full(n, prompt),
        output_tokens=np.full(n, output),
        service_s=np.full(n, np.nan),
    )


def play(
    server: FakeServer,
    task: Scenario,
    requests: RequestStream,
    caps: list[int],
    folder: Path,
    then: Callable[[Load], Coroutine[Any, Any, Any]],
    workers: int = 1,
) -> Any:
    """Play requests from now on, do `then`, stop."""

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        settings = (server.url, "NO_KEY", 5.0, 30.0)
        client: CompletionClient | WorkerPool = (
            CompletionClient(*settings)
            if workers == 1
            else await WorkerPool.start(Server(*settings), workers)
        )
        records = RecordFile(folder / "requests.jsonl")
        (folder / EPISODE_FILE).write_text(json.dumps({"tenants": list(task.tenant_names)}))
        load = Load(task, requests, caps, client, "fake", Prompts(1, 100, 356), records)
        load.begin(loop.time())
        try:
            return await then(load)
        finally:
            await load.stop()
            records.close()
            await client.close()

    return asyncio.run(main())


async def all_ended(load: Load) -> Load:
    while load.delivered < len(load.outcomes().outcome) or load.in_flight:
        await asyncio.sleep(0.02)
    return load


@pytest.mark.parametrize("cap", [1, 99, 100, 101, 256])
def test_in_flight_at_the_server_is_exactly_the_cap(cap: int, tmp_path: Path) -> None:
    with fake_server() as server:
        # long enough for all 256 to have arrived before the first ends
        server.first_token_s = 0.02 if cap == 1 else 1.5
        n = 8 if cap == 1 else 2 * cap
        play(server, scenario(), stream([0.0] * n), [cap], tmp_path, all_ended)
    assert len(server.in_flight) == n
    assert max(server.in_flight) == cap
    # full from the first moment to the last wave
    assert server.in_flight[:cap] == list(range(1, cap + 1))


@pytest.mark.parametrize("workers", [2, 3])
def test_worker_processes_share_one_gate(workers: int, tmp_path: Path) -> None:
    with fake_server() as server:
        server.first_token_s, server.token_s = 0.3, 0.05
        load = play(server, scenario(), stream([0.0] * 20), [7], tmp_path, all_ended, workers)
    assert max(server.in_flight) == 7
    outcomes = load.outcomes()
    assert (outcomes.outcome == Outcome.COMPLETED).all()
    assert (outcomes.ttft_s >= 0.3).all()
    assert (outcomes.tpot_s > 0.04).all()
    records = read_requests(tmp_path)
    assert [record["usage_output_tokens"] for record in records] == [4] * 20
    for record in records:
        times, tokens = chunk_times_s(record)
        assert sum(tokens) == 4
        assert record["sent_s"] < times[0]
        assert times[-1] == pytest.approx(record["finished_s"], abs=1e-5)
    assert load.report(asyncio.new_event_loop().time())["event_loop_lag_max_s"] > 0


def test_a_worker_that_dies_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    async def kill_one(load: Load) -> Load:
        await asyncio.sleep(0.5)
        worker = load._sender._workers[0]  # type: ignore[attr-defined]
        worker._process.kill()
        return await all_ended(load)

    with fake_server() as server:
        server.first_token_s = 1.5
        load = play(
            server,
            scenario(),
            stream(
                [0.0] * 6,
            ),
            [4],
            tmp_path,
            kill_one,
            2,
        )
    ends = [record["end"] for record in read_requests(tmp_path)]
    assert sorted(ends) == ["completed"] * 4 + ["failed"] * 2
    assert "sending process is gone" in load.last_error


def test_stopping_with_workers_ends_streams_at_the_server(tmp_path: Path) -> None:
    async def stop_early(load: Load) -> None:
        await asyncio.sleep(0.8)
        assert load.in_flight == 3

    with fake_server() as server:
        server.first_token_s = 60.0
        play(server, scenario(), stream([0.0] * 5), [3], tmp_path, stop_early, 2)
        asyncio.run(asyncio.sleep(0.5))
        assert server._now_in_flight == 0
    ends = [record["end"] for record in read_requests(tmp_path)]
    assert ends == ["waiting"] * 2 + ["cut_off"] * 3


def test_each_tenant_has_its_own_cap(tmp_path: Path) -> None:
    with fake_server() as server:
        server.first_token_s = 0.3
        play(server, scenario(2), stream([0.0] * 9, [0.0] * 6), [3, 2], tmp_path, all_ended)
    assert max(server.in_flight) == 5


def test_delivered_rate_is_the_scheduled_one(tmp_path: Path) -> None:
    """An open loop: a slow server does not slow it down."""
    rng = np.random.default_rng(0)
    arrivals_s = np.sort(rng.uniform(0, 4, 400))
    with fake_server() as server:
        server.first_token_s = 0.5
        load = play(server, scenario(), stream(arrivals_s.tolist()), [4096], tmp_path, all_ended)
    seen_s = np.array(server.arrived_s)
    assert len(seen_s) == 400
    rate = 399 / (seen_s[-1] - seen_s[0])
    assert rate == pytest.approx(399 / (arrivals_s[-1] - arrivals_s[0]), rel=0.01)
    assert load.delivered == 400


def test_a_load_that_falls_behind_is_labelled_invalid(tmp_path: Path) -> None:
    async def block(load: Load) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0.2)
        until_s = loop.time() + 1.0
        while loop.time() < until_s:  # the loop can do nothing else
            pass
        report = load.report(loop.time())
        await all_ended(load)
        return {"blocked": report, "after": load.report(loop.time())}

    with fake_server() as server:
        arrivals_s = np.linspace(0, 1.1, 100).tolist()
        reports = play(server, scenario(), stream(arrivals_s), [100], tmp_path, block)
    assert "reached the gate in time" in reports["blocked"]["invalid"][0]
    assert "sends were late by" in reports["after"]["invalid"][0]
    assert reports["after"]["send_lateness_max_s"] > 0.5
    assert reports["after"]["event_loop_lag_max_s"] > 0.5


def test_latency_counts_from_arrival_at_the_gate(tmp_path: Path) -> None:
    """With a cap of 1 the k-th of a burst waits for k - 1 services of at least 0.2 s."""
    with fake_server() as server:
        server.first_token_s = 0.2
        load = play(server, scenario(), stream([0.0] * 5), [1], tmp_path, all_ended)
    outcomes = load.outcomes()
    least_s = 0.2 * np.arange(1, 6)
    assert (outcomes.ttft_s >= least_s).all()
    assert (outcomes.latency_s >= outcomes.ttft_s).all()
    # and not from before: what is left is the tokens' pace and the client
    assert (np.diff(outcomes.ttft_s) >= 0.2).all()


def test_conservation_holds_at_any_moment(tmp_path: Path) -> None:
    """Also between the end of a request and the turn in which the gate learns of it."""

    async def observe_often(load: Load) -> int:
        loop = asyncio.get_running_loop()
        turns = 0
        while load.delivered < 200 or load.in_flight:
            await asyncio.sleep(0)
            turns += 1
            assert conservation_error(load.observe(loop.time())).tolist() == [0.0]
        return turns

    with fake_server() as server:
        arrivals_s = np.linspace(0, 1, 200).tolist()
        turns = play(server, scenario(), stream(arrivals_s), [9], tmp_path, observe_often)
    assert turns > 200


def test_patience_full_queue_failure_and_refusal(tmp_path: Path) -> None:
    async def observe(load: Load) -> Any:
        await asyncio.sleep(0.6)
        seen = load.observe(asyncio.get_running_loop().time())
        assert conservation_error(seen).tolist() == [0.0]
        await all_ended(load)
        return load.outcomes(), seen

    with fake_server() as server:
        server.first_token_s = 1.0
        task = scenario(patience_s=0.3, queue_limit=2)
        outcomes, seen = play(server, task, stream([0.0] * 5), [1], tmp_path, observe)
    assert seen["dropped_total"].tolist() == [4.0]
    ends = {record["request"]: record for record in read_requests(tmp_path)}
    assert [ends[i]["end"] for i in range(5)] == [
        "completed",
        "patience",
        "patience",
        "queue_full",
        "queue_full",
    ]
    assert ends[1]["finished_s"] == pytest.approx(0.3, abs=0.1)
    assert (outcomes.outcome[1:] == Outcome.DROPPED).all()
    assert np.isnan(outcomes.latency_s[1:]).all()


def test_patience_of_the_episode_goes_before_the_scenarios(tmp_path: Path) -> None:
    with fake_server() as server:
        server.first_token_s = 1.0
        requests = replace(stream([0.0] * 2), patience_s=(0.3,))
        play(server, scenario(patience_s=60.0), requests, [1], tmp_path, all_ended)
    ends = {record["request"]: record for record in read_requests(tmp_path)}
    assert [ends[i]["end"] for i in range(2)] == ["completed", "patience"]
    assert ends[1]["finished_s"] == pytest.approx(0.3, abs=0.1)


def test_refused_and_failed_requests_are_told_apart(tmp_path: Path) -> None:
    async def change(load: Load) -> Any:
        await asyncio.sleep(0.25)
        server.status = 500
        await all_ended(load)
        return load

    with fake_server() as server:
        server.status = 503
        load = play(server, scenario(), stream([0.0, 0.5]), [2], tmp_path, change)
    assert [record["end"] for record in read_requests(tmp_path)] == ["refused", "failed"]
    assert load.tenants[0].counts["failed"] == 2
    assert load.failures == 2


def test_telemetry_of_known_times(tmp_path: Path) -> None:
    """Three requests of 0.3 s, one after the other, in a gate of cap 1."""

    async def observe(load: Load) -> Any:
        await all_ended(load)
        await asyncio.sleep(0.05)
        return load.observe(asyncio.get_running_loop().time())[0], load

    with fake_server() as server:
        server.first_token_s, server.token_s = 0.3, 0.0
        seen, load = play(server, scenario(), stream([0.0] * 3), [1], tmp_path, observe)
    latencies = np.sort(load.outcomes().latency_s)
    assert seen["window_completions"] == seen["completed"] == seen["admitted"] == 3
    assert seen["latency_p50_s"] == pytest.approx(latencies[1])
    assert seen["latency_p99_s"] == pytest.approx(latencies[2])
    assert seen["ttft_p50_s"] == pytest.approx(load.outcomes().ttft_s[1])
    assert (seen["prompt_tokens"], seen["output_tokens"]) == (24, 12)
    assert 0.8 < seen["mean_in_flight"] <= 1.0
    # a later window without completions keeps the last percentiles
    assert seen["good"] == (latencies <= 2.5).sum()


def test_tokens_of_one_chunk_come_together(tmp_path: Path) -> None:
    async def observe(load: Load) -> Any:
        await all_ended(load)
        return load

    with fake_server() as server:
        server.token_s = 0.1
        server.frames = lambda prompt, tokens: [
            chunk("ab", (prompt, 2)),
            chunk("cde", (prompt, 5)),
            last(prompt, 5),
        ]
        load = play(server, scenario(), stream([0.0], output=5), [1], tmp_path, observe)
    gaps = np.array(load.tenants[0].itl)
    assert gaps[[0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert gaps[1] > 0.09
    [record] = read_requests(tmp_path)
    times, tokens = chunk_times_s(record)
    assert tokens == [2, 3]
    assert times[0] == pytest.approx(record["first_token_s"], abs=2e-6)
    assert times[1] == pytest.approx(record["finished_s"], abs=3e-6)
    # TPOT by usage: four gaps, not one
    assert load.outcomes().tpot_s[0] == pytest.approx(gaps[1] / 4)


def test_records_give_the_outcomes_again(tmp_path: Path) -> None:
    async def stop_early(load: Load) -> Load:
        await asyncio.sleep(1.0)
        return load

    with fake_server() as server:
        server.first_token_s, server.token_s = 0.3, 0.01
        requests = stream(np.linspace(0, 1.5, 30).tolist(), [0.0] * 4)
        load = play(server, scenario(2), requests, [4, 1], tmp_path, stop_early)
    outcomes, read = load.outcomes(), read_outcomes(tmp_path)
    arrived = outcomes.outcome != Outcome.PENDING
    assert 0 < arrived.sum() < len(requests)
    assert {Outcome.COMPLETED, Outcome.IN_FLIGHT, Outcome.QUEUED} <= set(outcomes.outcome.tolist())
    for name in ("tenant", "outcome", "prompt_tokens", "output_tokens"):
        assert (getattr(read, name) == getattr(outcomes, name)[arrived]).all(), name
    for name in ("arrival_s", "admitted_s", "first_token_s", "finished_s"):
        assert getattr(read, name) == pytest.approx(
            getattr(outcomes, name)[arrived], abs=2e-6, nan_ok=True
        ), name


def test_stopping_ends_streams_at_the_server(tmp_path: Path) -> None:
    async def stop_early(load: Load) -> None:
        await asyncio.sleep(0.5)
        assert load.in_flight == 3

    with fake_server() as server:
        server.first_token_s = 60.0
        play(server, scenario(), stream([0.0] * 3), [3], tmp_path, stop_early)
        for _ in range(100):
            if server._now_in_flight == 0:
                break
            asyncio.run(asyncio.sleep(0.02))
        assert server._now_in_flight == 0
    assert [record["end"] for record in read_requests(tmp_path)] == ["cut_off"] * 3


def test_prompts_are_other_ones_in_every_episode() -> None:
    prompts = [Prompts(salt, 100, 356) for salt in (1, 2)]
    first, second = (
        [tuple(prompt.tokens(request, 64)) for request in range(200)] for prompt in prompts
    )
    blocks = {tokens[:16] for tokens in first}
    assert len(blocks) == 200
    assert not blocks & {tokens[:16] for tokens in second}
    assert Prompts(1, 100, 356).tokens(3, 64) == list(first[3])
    flat = [token for tokens in first for token in tokens]
    assert min(flat) >= 100
    assert max(flat) < 356
