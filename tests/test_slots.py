"""The slots simulator: against its plain twin, hand calculations, closed forms, invariants."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins.readings import Case, check_against_twin, seeded, step
from twins.slots import SlotsTwin
from twins.slots_cases import (
    advance,
    fingerprint,
    make_scenario,
    make_stream,
    play,
    random_case,
)

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.sim.slots import SlotsBackend
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import conservation_error
from vllm_tenant_tuning.workload import RequestStream


@st.composite
def cases(draw: st.DrawFn, knees: bool = True) -> Case:
    return random_case(lambda options: draw(st.sampled_from(options)), knees=knees)


# --- against the twin ---------------------------------------------------------------------


def check(case: Case) -> None:
    check_against_twin(case, SlotsBackend(case.scenario, case.n_clusters, n_threads=1), SlotsTwin)


@pytest.mark.parametrize("block", range(4))
def test_equals_the_twin_event_by_event(block: int) -> None:
    for seed in range(750 * block, 750 * (block + 1)):
        try:
            check(random_case(seeded(seed)))
        except AssertionError as error:
            raise AssertionError(f"case {seed}: {error}") from error


@settings(max_examples=150)
@given(cases())
def test_equals_the_twin_wherever_hypothesis_looks(case: Case) -> None:
    check(case)


# --- invariants ---------------------------------------------------------------------------


def ticks(times_s: npt.NDArray[np.float64], tick_s: float) -> npt.NDArray[np.int64]:
    """Times as numbers of ticks; what has not happened is far away."""
    return np.where(np.isnan(times_s), 10**9, np.rint(times_s / tick_s)).astype(np.int64)


def check_gate(
    scenario: Scenario, stream: RequestStream, caps: list[Any], outcomes: RequestOutcomes
) -> None:
    """The gate's promises, tick by tick, from the times alone; `caps` has a row an interval."""
    tick_s, slots = scenario.engine.tick_s, scenario.engine.max_num_seqs
    interval_ticks = round(scenario.control.control_interval_s / tick_s)
    arrival = ticks(outcomes.arrival_s, tick_s)
    admitted = ticks(outcomes.admitted_s, tick_s)
    finished = ticks(outcomes.finished_s, tick_s)
    sent = admitted < 10**9
    assert np.array_equal(sent, np.isin(outcomes.outcome, (Outcome.IN_FLIGHT, Outcome.COMPLETED)))
    if scenario.engine.knee is None:
        # Whatever the caps did meanwhile, what was sent is served to its end.
        service = np.ceil(stream.service_s / tick_s - 1e-9)
        done = outcomes.outcome == Outcome.COMPLETED
        assert np.array_equal((finished - admitted)[done], service[done])
        assert np.all((admitted + service)[sent & ~done] > interval_ticks * len(caps))
    for tick in range(interval_ticks * len(caps)):
        running = (admitted <= tick) & (finished > tick)
        queued = (arrival <= tick) & (admitted > tick) & (finished >= tick)
        assert running.sum() <= slots
        for i, cap in enumerate(caps[tick // interval_ticks]):
            own = outcomes.tenant == i
            now = np.flatnonzero(own & (admitted == tick))
            if len(now):
                assert (running & own).sum() <= cap, "sent beyond the cap"
            waiting = np.flatnonzero(own & queued)
            if len(waiting):
                assert np.all(now < waiting[0]), "overtaken within a tenant"
                full = (running & own).sum() >= cap or running.sum() == slots
                assert full, "waits although it may be sent"


@settings(max_examples=150)
@given(st.booleans().flatmap(lambda knees: cases(knees=knees)))
def test_requests_are_conserved_and_the_gate_keeps_its_promises(case: Case) -> None:
    backend = SlotsBackend(case.scenario, case.n_clusters, n_threads=1)
    streams: dict[int, RequestStream] = {}
    caps: dict[int, list[list[int]]] = {}
    for event in case.script:
        before = backend.telemetry_tenants["in_flight"].copy()
        step(backend, event)
        assert not conservation_error(backend.telemetry_tenants).any()
        if len(event) == 3:
            cluster, streams[cluster], _ = event
            caps[cluster] = []
            continue
        for cluster, (row, active) in enumerate(zip(*event, strict=True)):
            if active:
                caps[cluster].append(row)
                in_flight = backend.telemetry_tenants["in_flight"][cluster]
                assert np.all(in_flight <= np.maximum(row, before[cluster]))
            outcomes = backend.outcomes(cluster)
            check_gate(case.scenario, streams[cluster], caps[cluster], outcomes)


def test_lowering_a_cap_drains_and_cancels_nothing() -> None:
    stream = make_stream([(0, 1.0 + r) for r in range(8)] + [(0, 1.0)] * 4)
    backend = SlotsBackend(make_scenario(slots=10, interval_s=1.0))
    backend.reset(0, stream, np.array([8]))
    in_flight = [int(advance(backend, [cap])["in_flight"][0, 0]) for cap in [8] + [2] * 9]
    # Services of 1, 2, ... 8 s end one a second; the rest fit from 7, 8, 8 and 9 s on.
    assert in_flight == [7, 6, 5, 4, 3, 2, 1, 0, 0, 0]
    assert backend.outcomes(0).admitted_s.tolist() == [0.0] * 8 + [7, 8, 8, 9]
    assert not np.any(backend.outcomes(0).outcome == Outcome.DROPPED)
    assert backend.telemetry_tenants["completed_total"][0, 0] == 12


def test_raising_a_cap_lets_in_more() -> None:
    stream = make_stream([(0, 100.0)] * 20)
    backend = SlotsBackend(make_scenario(slots=10))
    backend.reset(0, stream, np.array([0]))
    in_flight = [int(advance(backend, [cap])["in_flight"][0, 0]) for cap in (0, 3, 7, 5, 10, 20)]
    assert in_flight == [0, 3, 7, 7, 10, 10]


# --- by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize("tick_s", ["0.5", "0.25", "0.1", "0.02"])
@pytest.mark.parametrize("service_s", ["0.001", "0.1", "0.3", "0.5", "0.7", "1.0", "2.13"])
@pytest.mark.parametrize("arrival_s", ["0", "0.3", "1.0", "1.01"])
def test_a_request_alone_takes_its_service_in_whole_ticks(
    arrival_s: str, service_s: str, tick_s: str
) -> None:
    tick = Fraction(tick_s)
    arrives = math.ceil(Fraction(arrival_s) / tick)
    takes = math.ceil(Fraction(service_s) / tick)
    scenario = make_scenario(slots=2, tick_s=float(tick_s), interval_s=4.0, window_s=4.0)
    backend, outcomes = play(scenario, make_stream([(float(arrival_s), float(service_s))]), [[1]])
    assert outcomes.arrival_s[0] == arrives * float(tick_s)
    assert outcomes.admitted_s[0] == arrives * float(tick_s)
    assert outcomes.finished_s[0] == (arrives + takes) * float(tick_s)
    tenant = backend.telemetry_tenants[0, 0]
    assert tenant["latency_p50_s"] == tenant["latency_p99_s"] == takes * float(tick_s)
    assert tenant["mean_in_flight"] == pytest.approx(float(takes * tick / 4))


def test_more_tenants_than_slots_take_turns_at_being_first() -> None:
    scenario = make_scenario(slots=2, tenants=[{}, {}, {}])
    _, outcomes = play(scenario, make_stream(*[[(0, 1.0)] * 2] * 3), [[1, 1, 1]] * 2)
    # Tick 0 begins with tenant 0, tick 2 with tenant 2, tick 4 with tenant 1.
    assert outcomes.admitted_s.tolist() == [0, 1, 0, 2, 1, 2]
    assert outcomes.finished_s.tolist() == [1, 2, 1, 3, 2, 3]


def test_patience_ends_after_it_and_a_full_queue_turns_the_youngest_away() -> None:
    # Freed slots are given away before the impatient leave: with patience 1 s a request waits at
    # 1.0, is still sent at 1.5, and leaves at 1.5 if nothing is free.
    for service_s, end in ((1.0, (1.0, 2.0)), (1.5, (1.5, 2.5)), (2.0, (1.5, 1.5))):
        stream = make_stream([(0, service_s), (0, 1.0)])
        _, outcomes = play(make_scenario(slots=1, tenants=[{"patience_s": 1.0}]), stream, [[1]])
        sent = outcomes.outcome[1] == Outcome.COMPLETED
        assert outcomes.finished_s[1] == end[1]
        assert outcomes.admitted_s[1] == end[0] if sent else np.isnan(outcomes.admitted_s[1])
        assert sent == (service_s < 2.0)
    stream = make_stream([(0, 1.0), (0, 1.0), (0, 1.0), (0.5, 1.0)])
    _, outcomes = play(make_scenario(slots=1, tenants=[{"queue_limit": 1}]), stream, [[1]])
    assert outcomes.finished_s.tolist() == [1.0, 2.0, 0.0, 0.5]
    dropped = [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.DROPPED, Outcome.DROPPED]
    assert outcomes.outcome.tolist() == dropped


def test_beyond_the_knee_everyone_slows_down() -> None:
    knee = {"slowdown": 0.5, "segments": [{"duration_s": 100, "knee": 2}]}
    scenario = make_scenario(slots=4, knee=knee)
    stream = make_stream([(0, 1.0), (0, 1.0), (0, 3.0), (0, 3.0)])
    backend, outcomes = play(scenario, stream, [[4]] * 2)
    # Four run at 1 / (1 + 0.5 * 2) = 1/2: at 2 s two are done, and two go on alone with 2 s left.
    assert outcomes.finished_s.tolist() == [2, 2, 4, 4]
    # Four readings of 50 ms, then four of 25 ms in the window's eight busy ticks.
    tenant = backend.telemetry_tenants[0, 0]
    assert tenant["itl_p50_s"] == tenant["itl_p99_s"] == 0.05
    assert backend.telemetry_cluster["mean_running"][0] == pytest.approx(2 * 1 / 3)


def test_the_knee_moves_with_its_schedule() -> None:
    segments = [{"duration_s": 2.0, "knee": 3}, {"duration_s": 1.0, "knee": 1}]
    scenario = make_scenario(slots=3, knee={"slowdown": 0.5, "segments": segments})
    _, outcomes = play(scenario, make_stream([(0, 5.0)] * 3), [[3]] * 3)
    # Three run: 2 s at full speed, 1 s at 1/2, 2 s at full speed make 4.5; then 1/2 again.
    assert outcomes.finished_s.tolist() == [6.0] * 3


# --- tenants share evenly -----------------------------------------------------------------


def test_saturated_tenants_share_a_pool_evenly() -> None:
    n_clusters, rng = 32, np.random.default_rng(3)
    scenario = make_scenario(slots=5, tenants=[{}, {}], interval_s=100.0)
    backend = SlotsBackend(scenario, n_clusters)
    for cluster in range(n_clusters):
        queues = [[(0, demand) for demand in rng.exponential(2.5, 2000)] for _ in range(2)]
        backend.reset(cluster, make_stream(*queues), np.array([8, 8]))
    for _ in range(6):
        advance(backend, [8, 8])
    assert np.all(backend.telemetry_tenants["queued"] > 0)
    held = backend.telemetry_tenants["completed_total"]
    share = held[:, 0] / held.sum(axis=1)
    error = share.std(ddof=1) / math.sqrt(n_clusters)
    assert error < 0.005
    assert abs(share.mean() - 0.5) < 4 * error


# --- closed forms -------------------------------------------------------------------------

TICK_S = 0.01
LONGER_S = 1.0 + TICK_S / 2
"""Mean of an Exp(1 s) service rounded up to ticks."""


def simulate_queue(
    seed: int, rate_per_s: float, n_servers: int, n_clusters: int = 64, **tenant: Any
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A tenant with Poisson arrivals and Exp(1 s) service, in independent clusters.

    Returns:
        Means and standard errors of (waits at all, wait in seconds, dropped), over the clusters'
        requests after a warm-up of 200 s; the first two of those that were sent.
    """
    rng, length_s = np.random.default_rng(seed), 4000.0
    scenario = make_scenario(
        slots=n_servers, tenants=[tenant], tick_s=TICK_S, interval_s=length_s / 4, window_s=TICK_S
    )
    backend = SlotsBackend(scenario, n_clusters)
    for cluster in range(n_clusters):
        n = rng.poisson(rate_per_s * length_s)
        arrivals, demands = np.sort(rng.uniform(0, length_s, n)), rng.exponential(1.0, n)
        ones = np.ones(n, dtype=np.int64)
        stream = RequestStream(np.array([0, n]), arrivals, ones, ones, demands)
        backend.reset(cluster, stream, np.array([n_servers]))
    for _ in range(4):
        advance(backend, [n_servers])
    means = []
    for cluster in range(n_clusters):
        outcomes = backend.outcomes(cluster)
        kept = (outcomes.arrival_s > 200) & (outcomes.arrival_s < length_s - 100)
        wait_s = (outcomes.admitted_s - outcomes.arrival_s)[kept]
        wait_s = wait_s[~np.isnan(wait_s)]
        dropped = outcomes.outcome[kept] == Outcome.DROPPED
        means.append((np.mean(wait_s > 0), np.mean(wait_s), np.mean(dropped)))
    backend.close()
    return np.mean(means, axis=0), np.std(means, axis=0, ddof=1) / math.sqrt(n_clusters)


def assert_closed_form(measured: float, error: float, exact: float, *in_ticks: float) -> None:
    """Within four standard errors and the bias of the ticks.

    `in_ticks` are values of the closed form with one effect of first order in the tick each:
    services rounded up last `tick_s / 2` longer in the mean, waits under a tick are not seen, and
    patience is looked at once a tick, after admission. Their shifts, added up, bound the bias.
    """
    bias = sum(abs(value - exact) for value in in_ticks)
    assert 4 * error + bias < 0.15 * exact, "too coarse to say anything"
    assert abs(measured - exact) < 4 * error + bias, (measured, error, exact, bias)


def erlang_c(n_servers: int, load: float) -> float:
    """Probability to wait in M/M/c (Erlang 1917), `load` in servers."""
    last = load**n_servers / math.factorial(n_servers) * n_servers / (n_servers - load)
    return last / (sum(load**k / math.factorial(k) for k in range(n_servers)) + last)


@pytest.mark.parametrize(("n_servers", "load"), [(1, 0.6), (3, 2.1), (8, 5.6)])
def test_waiting_is_erlangs(n_servers: int, load: float) -> None:
    means, errors = simulate_queue(n_servers, load, n_servers)

    def waits(mean_s: float) -> float:
        return erlang_c(n_servers, load * mean_s)

    def wait_s(mean_s: float) -> float:
        return waits(mean_s) * mean_s / (n_servers - load * mean_s)

    unseen = waits(1.0) * (1 - (n_servers - load) * TICK_S)
    assert_closed_form(means[0], errors[0], waits(1.0), waits(LONGER_S), unseen)
    assert_closed_form(means[1], errors[1], wait_s(1.0), wait_s(LONGER_S))
    assert means[2] == 0


@pytest.mark.parametrize(("rate_per_s", "patience_s"), [(0.7, 2.0), (0.95, 0.5), (1.5, 1.0)])
def test_loss_to_impatience_is_barrers(rate_per_s: float, patience_s: float) -> None:
    """M/M/1+D, patience d until service starts (D. Y. Barrer, Operations Research 5, 1957).

    The offered wait V (what an arrival would wait if it were patient) has an atom p0 at zero.
    By level crossing its density is `p0 rate exp(-(mu - rate) v)` up to d and falls like
    `exp(-mu v)` beyond, where nobody joins. All of it sums to 1, and the loss is P(V > d):

        loss = (1 - r) r E / (1 - r^2 E),  r = rate / mu,  E = exp(-mu (1 - r) d)
    """
    means, errors = simulate_queue(round(100 * rate_per_s), rate_per_s, 1, patience_s=patience_s)

    def loss(mean_s: float, patience_s: float) -> float:
        r = rate_per_s * mean_s
        e = math.exp(-(1 - r) * patience_s / mean_s)
        return (1 - r) * r * e / (1 - r**2 * e)

    in_ticks = loss(LONGER_S, patience_s), loss(1.0, patience_s + TICK_S)
    assert_closed_form(means[2], errors[2], loss(1.0, patience_s), *in_ticks)


def test_loss_at_a_full_queue_is_that_of_m_m_1_k() -> None:
    """With one server and room for q more, loss = (1 - r) r^K / (1 - r^(K+1)), K = q + 1."""
    means, errors = simulate_queue(5, 0.8, 1, queue_limit=2)

    def loss(mean_s: float) -> float:
        r = 0.8 * mean_s
        return (1 - r) * r**3 / (1 - r**4)

    assert_closed_form(means[2], errors[2], loss(1.0), loss(LONGER_S))


# --- the same bits everywhere -------------------------------------------------------------


def test_threads_and_processes_do_not_change_a_bit() -> None:
    once = fingerprint(1)
    assert fingerprint(2) == once
    assert fingerprint(3) == once
    code = "from twins.slots_cases import fingerprint; print(fingerprint(2))"
    folder = Path(__file__).parent
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == once
