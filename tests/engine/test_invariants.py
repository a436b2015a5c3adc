"""What holds of every episode of the engine, whatever the load, the caps and the memory."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins.engine import EngineTwin
from twins.engine_cases import make_scenario, make_stream, random_case
from twins.readings import Case, step

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.sim.engine import EngineBackend
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import conservation_error
from vllm_tenant_tuning.workload import RequestStream


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return random_case(lambda options: draw(st.sampled_from(options)))


def changed(scenario: Scenario, **control: float) -> Scenario:
    return scenario.model_copy(update={"control": scenario.control.model_copy(update=control)})


def assert_equal(ours: RequestOutcomes, others: RequestOutcomes) -> None:
    for name in EngineTwin.OUTCOME_FIELDS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(others, name), err_msg=name)


@settings(max_examples=200)
@given(cases())
def test_requests_are_conserved_and_the_cache_is_never_overfull(case: Case) -> None:
    backend = EngineBackend(case.scenario, case.n_clusters, n_threads=1)
    for event in case.script:
        step(backend, event)
        assert not conservation_error(backend.telemetry_tenants).any()
        seen = backend.telemetry_cluster
        assert np.all((seen["kv_cache_usage"] >= 0) & (seen["kv_cache_usage"] <= 1))
        assert np.all(seen["num_requests_running"] <= case.scenario.max_num_seqs)
        at_engine = seen["num_requests_running"] + seen["num_requests_waiting"]
        assert np.all(at_engine <= backend.telemetry_tenants["in_flight"].sum(axis=1))
        assert np.all((seen["num_requests_running"] == 0) == (seen["kv_cache_usage"] == 0))
        for cluster in range(case.n_clusters):
            if not seen["time_s"][cluster]:
                continue
            outcomes = backend.outcomes(cluster)
            for i, tenant in enumerate(backend.telemetry_tenants[cluster]):
                mine = outcomes.outcome[outcomes.tenant == i]
                assert (mine == Outcome.COMPLETED).sum() == tenant["completed_total"]
                assert (mine == Outcome.DROPPED).sum() == tenant["dropped_total"]
                assert (mine == Outcome.FAILED).sum() == tenant["failed_total"]
                assert (mine == Outcome.QUEUED).sum() == tenant["queued"]
                assert (mine == Outcome.IN_FLIGHT).sum() == tenant["in_flight"]


@settings(max_examples=200)
@given(cases())
def test_first_schedules_keep_the_order_of_sending_under_fcfs(case: Case) -> None:
    engine = case.scenario.engine.model_copy(update={"scheduling_policy": "fcfs"})
    scenario = case.scenario.model_copy(update={"engine": engine})
    backend = EngineBackend(scenario, case.n_clusters, n_threads=1)
    for event in case.script:
        step(backend, event)
    for cluster in range(case.n_clusters):
        outcomes = backend.outcomes(cluster)
        taken = np.isin(outcomes.outcome, (Outcome.IN_FLIGHT, Outcome.COMPLETED))
        never_s = np.where(np.isnan(outcomes.scheduled_s), np.inf, outcomes.scheduled_s)
        sent = sorted(zip(outcomes.admitted_s[taken], never_s[taken], strict=True))
        # of requests sent at one instant the pairs above put the first scheduled first
        assert all(a[1] <= b[1] for a, b in itertools.pairwise(sent))


@settings(max_examples=200)
@given(cases())
def test_no_step_exceeds_the_budget_the_sequences_or_the_blocks(case: Case) -> None:
    """On the twin, which the engine equals: compiled code does not stop between its steps."""
    limits, n_blocks = case.scenario.engine.scheduler, case.scenario.engine.num_gpu_blocks
    steps = []

    def look(twin: EngineTwin) -> None:
        chunks = [request.chunk for request in twin.running]
        assert 0 < sum(chunks) <= limits.max_num_batched_tokens
        assert len(chunks) <= limits.max_num_seqs
        assert sum(request.blocks for request in twin.running) <= n_blocks
        for request in twin.running:
            assert request.blocks * twin.block_size >= request.computed + request.chunk
        steps.append(twin.now)

    twins = [EngineTwin(case.scenario) for _ in range(case.n_clusters)]
    for twin in twins:
        twin.on_step = look
    for event in case.script:
        if len(event) == 3:
            twins[event[0]].reset(event[1], event[2])
            continue
        for twin, caps, active in zip(twins, *event, strict=True):
            if active:
                twin.advance(caps)


@settings(max_examples=200)
@given(cases(), st.sampled_from((1, 2, 7)))
def test_the_state_after_a_horizon_does_not_depend_on_where_it_is_cut(case: Case, n: int) -> None:
    """Under constant caps: n intervals of a length are one of n times the length."""
    _, stream, caps = case.script[0]
    length_s = case.scenario.control.control_interval_s
    n_intervals = 3
    long = changed(case.scenario, control_interval_s=n * length_s, window_s=n * length_s)
    one, many = EngineBackend(long), EngineBackend(case.scenario)
    for backend, repeats in ((one, n_intervals), (many, n * n_intervals)):
        backend.reset(0, stream, np.array(caps))
        for _ in range(repeats):
            backend.advance(np.array([caps]), np.array([True]))
    assert_equal(one.outcomes(0), many.outcomes(0))
    for name in ("time_s", "num_requests_running", "num_requests_waiting", "kv_cache_usage"):
        assert one.telemetry_cluster[name] == many.telemetry_cluster[name]


@settings(max_examples=100)
@given(cases())
def test_the_cache_is_empty_when_all_is_done(case: Case) -> None:
    backend = EngineBackend(case.scenario, case.n_clusters, n_threads=1)
    for event in case.script:
        step(backend, event)
    everyone = np.ones(case.n_clusters, dtype=bool)
    caps = np.full((case.n_clusters, case.scenario.n_tenants), 1)
    last_arrival_s = max(
        event[1].arrival_s.max(initial=0) for event in case.script if len(event) == 3
    )
    # every token of every request alone, several times over
    demand_s = 0.05 * sum(
        (event[1].output_tokens + event[1].prompt_tokens).sum()
        for event in case.script
        if len(event) == 3
    )
    interval_s = case.scenario.control.control_interval_s
    for _ in range(int((last_arrival_s + demand_s) / interval_s) + 2):
        backend.advance(caps, everyone)
        outcomes = [backend.outcomes(cluster).outcome for cluster in range(case.n_clusters)]
        if np.isin(np.concatenate(outcomes), DONE).all():
            break
    for cluster in range(case.n_clusters):
        assert np.all(np.isin(backend.outcomes(cluster).outcome, DONE)), "a request is stuck"
        assert backend.telemetry_cluster["kv_cache_usage"][cluster] == 0
        assert backend.telemetry_cluster["num_requests_running"][cluster] == 0


DONE = (Outcome.COMPLETED, Outcome.DROPPED, Outcome.FAILED)


# --- bit for bit --------------------------------------------------------------------------


def fingerprint(n_threads: int | None, n_clusters: int = 70, n_intervals: int = 30) -> str:
    """Hash of every telemetry byte and outcome of many clusters under random caps."""
    rng = np.random.default_rng(7)
    tenants: list[dict[str, Any]] = [{"patience_s": 4}, {"queue_limit": 3}, {}]
    scenario = make_scenario(tenants=tenants, num_gpu_blocks=120, max_num_seqs=16)
    backend = EngineBackend(scenario, n_clusters, n_threads)
    for cluster in range(n_clusters):
        backend.reset(cluster, _stream(rng, len(tenants)), np.ones(3, dtype=np.int64))
    digest = hashlib.sha256()
    for _ in range(n_intervals):
        caps = rng.integers(0, 12, (n_clusters, 3))
        backend.advance(caps, rng.random(n_clusters) < 0.9)
        digest.update(backend.telemetry_tenants.tobytes())
        digest.update(backend.telemetry_cluster.tobytes())
    for cluster in range(n_clusters):
        outcomes = backend.outcomes(cluster)
        for name in EngineTwin.OUTCOME_FIELDS:
            digest.update(getattr(outcomes, name).tobytes())
    assert backend.telemetry_cluster["time_s"].max() > 20
    backend.close()
    return digest.hexdigest()


def _stream(rng: np.random.Generator, n_tenants: int) -> RequestStream:
    return make_stream(
        *(
            [
                (arrival_s, int(rng.integers(1, 900)), int(rng.integers(1, 300)))
                for arrival_s in np.sort(rng.uniform(0, 30, 60))
            ]
            for _ in range(n_tenants)
        )
    )


def test_the_same_bits_from_any_number_of_threads_and_in_another_process() -> None:
    here = fingerprint(1)
    assert fingerprint(2) == here
    code = "from engine.test_invariants import fingerprint; print(fingerprint(2))"
    folder = Path(__file__).resolve().parents[1]
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here


@pytest.mark.parametrize("cluster", [0, 33, 63])
def test_a_cluster_among_many_is_the_same_as_alone(cluster: int) -> None:
    rng = np.random.default_rng(3)
    scenario = make_scenario(tenants=[{}, {"patience_s": 2}], num_gpu_blocks=150)
    streams = [_stream(rng, 2) for _ in range(64)]
    caps = rng.integers(0, 12, (20, 64, 2))
    many, alone = EngineBackend(scenario, 64, n_threads=2), EngineBackend(scenario)
    for i, stream in enumerate(streams):
        many.reset(i, stream, caps[0, i])
    alone.reset(0, streams[cluster], caps[0, cluster])
    for row in caps:
        many.advance(row, np.ones(64, dtype=bool))
        alone.advance(row[cluster : cluster + 1], np.ones(1, dtype=bool))
        assert many.telemetry_tenants[cluster].tobytes() == alone.telemetry_tenants[0].tobytes()
        assert many.telemetry_cluster[cluster].tobytes() == alone.telemetry_cluster[0].tobytes()
    assert_equal(many.outcomes(cluster), alone.outcomes(0))
    many.close()
