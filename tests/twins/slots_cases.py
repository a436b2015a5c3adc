"""Scenarios, streams and random cases for the tests of the slots fidelity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twins.readings import Case, Choose
from vllm_tenant_tuning.backends.base import RequestOutcomes
from vllm_tenant_tuning.backends.sim.slots import SlotsBackend
from vllm_tenant_tuning.scenario import Scenario, parse_scenario
from vllm_tenant_tuning.workload import RequestStream


def make_scenario(
    *,
    slots: int,
    tenants: Sequence[dict[str, Any]] = ({},),
    tick_s: float = 0.5,
    interval_s: float = 3.0,
    window_s: float = 6.0,
    knee: dict[str, Any] | None = None,
) -> Scenario:
    """A scenario; its workload is not used, the streams are made by hand."""
    common: dict[str, Any] = {
        "arrivals": {"process": "poisson", "rate_per_s": 0},
        "prompt_tokens": {"distribution": "fixed", "tokens": 1},
        "output_tokens": {"distribution": "fixed", "tokens": 1},
        "service": {"model": "fixed", "service_s": 1},
        "cap_initial": 0,
        "slo_latency_p99_s": 6,
    }
    engine = {"fidelity": "slots", "max_num_seqs": slots, "tick_s": tick_s, "knee": knee}
    control = {"control_interval_s": interval_s, "episode_s": interval_s, "window_s": window_s}
    control |= {"cap_min": 0, "cap_max": 4096}
    return parse_scenario(
        {
            "name": "test",
            "question": "Does the simulator do what it says?",
            "tenants": [{**common, "name": f"t{i}", **own} for i, own in enumerate(tenants)],
            "engine": engine,
            "control": control,
        }
    )


def make_stream(*tenants: Sequence[tuple[float, float]]) -> RequestStream:
    """The stream of (arrival_s, service_s) pairs, one sequence for each tenant."""
    counts = [len(requests) for requests in tenants]
    flat = np.array([pair for requests in tenants for pair in requests]).reshape(-1, 2)
    numbers = np.arange(len(flat), dtype=np.int64)
    return RequestStream(
        offsets=np.cumsum([0, *counts], dtype=np.int64),
        arrival_s=flat[:, 0],
        prompt_tokens=7 + numbers,
        output_tokens=3 + 2 * numbers,
        service_s=flat[:, 1],
    )


def advance(backend: SlotsBackend, caps: Sequence[int]) -> npt.NDArray[np.void]:
    """One interval of every cluster under the same caps; the telemetry per tenant."""
    everywhere = np.tile(np.asarray(caps, dtype=np.int64), (backend.n_clusters, 1))
    backend.advance(everywhere, np.ones(backend.n_clusters, dtype=bool))
    return backend.telemetry_tenants


def play(
    scenario: Scenario, stream: RequestStream, caps: Sequence[Sequence[int]]
) -> tuple[SlotsBackend, RequestOutcomes]:
    """One cluster under the given caps, one row an interval."""
    backend = SlotsBackend(scenario)
    backend.reset(0, stream, np.asarray(caps[0], dtype=np.int64))
    for row in caps:
        advance(backend, row)
    return backend, backend.outcomes(0)


# --- random cases -------------------------------------------------------------------------


def random_case(choose: Choose, *, knees: bool = True) -> Case:
    """A small case; `choose` picks one of its options."""
    tick_s = choose((0.5, 0.25, 0.1, 1.0, 0.02, 0.3))
    n_tenants, slots = choose(range(1, 6)), choose((1, 2, 3, 4, 6, 9, 64, 64))
    interval_ticks, window_ticks = choose(range(1, 7)), choose(range(1, 13))
    n_intervals = choose(range(1, 7))
    horizon_ticks = interval_ticks * n_intervals
    tenants = [
        {
            "patience_s": choose((None, *(tick_s * t / 2 for t in (0, 1, 2, 3, 4, 6, 10)))),
            "queue_limit": choose((None, None, 1, 2, 3)),
            "slo_latency_p99_s": tick_s * choose(range(1, 17)) / 2,
        }
        for _ in range(n_tenants)
    ]
    knee = None
    if knees and choose((False, True)):
        segments = [
            {"duration_s": tick_s * choose(range(1, 13)) / 2, "knee": choose(range(1, 13)) / 2}
            for _ in range(choose(range(1, 4)))
        ]
        knee = {"slowdown": choose((0, 0.3, 0.5, 1, 2.5)), "segments": segments}

    def stream() -> RequestStream:
        requests = []
        busiest = choose((0, 2, 5, 20, 3 * slots))
        for _ in range(n_tenants):
            n = choose(range(busiest + 1))
            # Halves put every other arrival on a boundary, most of them together.
            arrivals = sorted(choose(range(2 * horizon_ticks + 3)) / 2 for _ in range(n))
            demands = [choose((1, 2, 3, 5, 8, choose(range(1, 8000)) / 1000)) for _ in range(n)]
            pairs = zip(arrivals, demands, strict=True)
            requests.append([(tick_s * arrival, tick_s * demand) for arrival, demand in pairs])
        return make_stream(*requests)

    def caps() -> list[int]:
        return [choose((0, 1, 2, 3, slots, slots, slots + 2)) for _ in range(n_tenants)]

    n_clusters = choose((1, 1, 2, 3))
    script: list[tuple[Any, ...]] = [(c, stream(), caps()) for c in range(n_clusters)]
    for _ in range(n_intervals):
        if choose(range(8)) == 0:
            script.append((choose(range(n_clusters)), stream(), caps()))
        active = [choose((True, True, True, False)) for _ in range(n_clusters)]
        script.append(([caps() for _ in range(n_clusters)], active))
    scenario = make_scenario(
        slots=slots,
        tenants=tenants,
        tick_s=tick_s,
        interval_s=tick_s * interval_ticks,
        window_s=tick_s * window_ticks,
        knee=knee,
    )
    return Case(scenario, n_clusters, script)


def fingerprint(n_threads: int | None, n_clusters: int = 110, n_intervals: int = 40) -> str:
    """Hash of every telemetry byte and outcome of many clusters under random caps."""
    rng = np.random.default_rng(7)
    knee = {"slowdown": 0.5, "segments": [{"duration_s": 20, "knee": k} for k in (3, 6)]}
    tenants = [{"patience_s": 4}, {"queue_limit": 3}, {}]
    scenario = make_scenario(slots=8, tenants=tenants, knee=knee)
    backend = SlotsBackend(scenario, n_clusters, n_threads)
    for cluster in range(n_clusters):
        demands = [
            zip(np.sort(rng.uniform(0, 120, 150)), rng.exponential(2, 150), strict=True)
            for _ in tenants
        ]
        stream = make_stream(*(list(pairs) for pairs in demands))
        backend.reset(cluster, stream, np.ones(3, dtype=np.int64))
    digest = hashlib.sha256()
    for _ in range(n_intervals):
        caps = rng.integers(0, 9, (n_clusters, 3))
        backend.advance(caps, rng.random(n_clusters) < 0.9)
        digest.update(backend.telemetry_tenants.tobytes())
        digest.update(backend.telemetry_cluster.tobytes())
    for cluster in range(n_clusters):
        outcomes = backend.outcomes(cluster)
        for column in (outcomes.outcome, outcomes.admitted_s, outcomes.finished_s):
            digest.update(column.tobytes())
    backend.close()
    return digest.hexdigest()
