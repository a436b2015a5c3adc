"""Scenarios, streams and random cases for the tests of the engine fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twins.readings import Case, Choose
from vllm_tenant_tuning.backends.base import RequestOutcomes
from vllm_tenant_tuning.backends.sim.engine import EngineBackend
from vllm_tenant_tuning.scenario import Scenario, parse_scenario
from vllm_tenant_tuning.workload import RequestStream

STEP_TIME = {
    "base_ms": 1.0,
    "weights_ms": 5.0,
    "dense_ms_per_token": 0.02,
    "sequence_ms": 0.01,
    "kv_read_ms_per_token": 3e-5,
    "prefill_attention_ms_per_pair": 1e-6,
}


def make_scenario(
    *,
    tenants: Sequence[dict[str, Any]] = ({},),
    step_time: dict[str, float] | None = None,
    num_gpu_blocks: int = 1000,
    block_size: int = 16,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 100_000,
    frontend: dict[str, float] | None = None,
    power: dict[str, Any] | None = None,
    interval_s: float = 1.0,
    window_s: float | None = None,
    **engine: Any,
) -> Scenario:
    """A scenario; its workload is not used, the streams are made by hand."""
    common: dict[str, Any] = {
        "arrivals": {"process": "poisson", "rate_per_s": 0},
        "prompt_tokens": {"distribution": "fixed", "tokens": 1},
        "output_tokens": {"distribution": "fixed", "tokens": 1},
        "cap_initial": 0,
        "slo_latency_p99_s": 6,
    }
    profile = {
        "name": "test",
        "model": "none",
        "gpu": "none",
        "source": "made up",
        "step_time": STEP_TIME | (step_time or {}),
        "kv_cache": {"num_gpu_blocks": num_gpu_blocks, "block_size": block_size},
        "scheduler": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        },
        "frontend": frontend or {},
        "power": power,
    }
    return parse_scenario(
        {
            "name": "test",
            "question": "Does the engine do what it says?",
            "tenants": [{**common, "name": f"t{i}", **own} for i, own in enumerate(tenants)],
            "engine": {"fidelity": "engine", "profile": profile, **engine},
            "control": {
                "control_interval_s": interval_s,
                "episode_s": interval_s,
                "window_s": interval_s if window_s is None else window_s,
                "cap_min": 0,
                "cap_max": 4096,
            },
        }
    )


def make_stream(*tenants: Sequence[tuple[float, int, int]]) -> RequestStream:
    """The stream of (arrival_s, prompt_tokens, output_tokens), one sequence for each tenant."""
    counts = [len(requests) for requests in tenants]
    flat = np.array([request for requests in tenants for request in requests]).reshape(-1, 3)
    return RequestStream(
        offsets=np.cumsum([0, *counts], dtype=np.int64),
        arrival_s=flat[:, 0].copy(),
        prompt_tokens=flat[:, 1].astype(np.int64),
        output_tokens=flat[:, 2].astype(np.int64),
        service_s=np.full(len(flat), np.nan),
    )


def play(
    scenario: Scenario, stream: RequestStream, caps: Sequence[Sequence[int]]
) -> tuple[EngineBackend, RequestOutcomes]:
    """One cluster under the given caps, one row an interval."""
    backend = EngineBackend(scenario)
    backend.reset(0, stream, np.asarray(caps[0], dtype=np.int64))
    for row in caps:
        backend.advance(np.asarray([row], dtype=np.int64), np.ones(1, dtype=bool))
    return backend, backend.outcomes(0)


def random_case(choose: Choose) -> Case:
    """A small case, mostly of tight memory; `choose` picks one of its options."""
    n_tenants = choose(range(1, 5))
    block_size = choose((1, 2, 4, 16))
    longest = choose((6, 20, 60))
    max_num_seqs = choose((1, 2, 3, 5, 8, 16, 64, 64))
    # Round times put arrivals, expiries and ends of intervals on the boundaries of steps.
    round_times = choose((True, False))
    step_time = {
        "base_ms": choose((1.0, 2.0)) if round_times else 1.37,
        "weights_ms": 0.0 if round_times else choose((0.0, 0.71)),
        "dense_ms_per_token": 0.0 if round_times else choose((0.0, 0.013, 0.11)),
        "sequence_ms": 0.0 if round_times else choose((0.0, 0.017)),
        "kv_read_ms_per_token": 0.0 if round_times else choose((0.0, 0.0031)),
        "prefill_attention_ms_per_pair": 0.0 if round_times else choose((0.0, 0.0007)),
    }
    frontend = {
        "request_s": choose((0.0, 0.0, 0.001, 0.00073)),
        "prompt_token_s": choose((0.0, 0.0, 0.00001)),
        "delay_s": choose((0.0, 0.0, 0.002, 0.00911)),
    }
    interval_s = choose((0.004, 0.02, 0.05, 0.1, 0.3, 0.0371))
    n_window, n_intervals = choose(range(1, 5)), choose(range(1, 8))
    horizon_ms = 1000 * interval_s * n_intervals

    tenants = [
        {
            "patience_s": choose((None, None, None, 0.0, 0.005, 0.02, 0.1)),
            "queue_limit": choose((None, None, 1, 3)),
            "priority": choose((0, 0, 1, -1)),
            "slo_latency_p99_s": choose((0.01, 0.05, 1.0)),
            "slo_ttft_p99_s": choose((None, 0.005, 0.02)),
            "slo_itl_p99_s": choose((None, 0.001, 0.0015, 0.003)),
        }
        for _ in range(n_tenants)
    ]

    def stream() -> RequestStream:
        requests = []
        busiest = choose((2, 12, 30))
        for _ in range(n_tenants):
            n = choose(range(busiest + 1))
            latest_ms = choose((1.0, horizon_ms / 2, horizon_ms))
            arrivals = [
                choose(range(int(latest_ms) + 1)) if round_times else choose(range(1000)) / 997
                for _ in range(n)
            ]
            scale = 1e-3 if round_times else 1e-3 * latest_ms
            requests.append(
                [
                    (scale * arrival, choose(range(1, longest + 1)), choose(range(1, longest + 1)))
                    for arrival in sorted(arrivals)
                ]
            )
        return make_stream(*requests)

    def caps() -> list[int]:
        return [choose((0, 1, 3, 8, 16, 64, 64)) for _ in range(n_tenants)]

    n_clusters = choose((1, 1, 1, 2))
    script: list[tuple[Any, ...]] = [(c, stream(), caps()) for c in range(n_clusters)]
    for _ in range(n_intervals):
        if choose(range(10)) == 0:
            script.append((choose(range(n_clusters)), stream(), caps()))
        active = [choose((True, True, True, False)) for _ in range(n_clusters)]
        script.append(([caps() for _ in range(n_clusters)], active))
    longest_blocks = -(-2 * longest // block_size)
    scenario = make_scenario(
        tenants=tenants,
        step_time=step_time,
        # from less than the longest request to plenty
        num_gpu_blocks=max(1, choose((1, 2, 2, 3, 3, 4, 5, 6)) * longest_blocks // 2),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + choose((0, 1, 3, 10, 50, 1000)),
        max_model_len=choose((longest, 2 * longest, 2 * longest, 2 * longest)),
        frontend=frontend,
        power=choose((None, {"idle_w": 100.0, "busy_w": 600.0, "source": "made up"})),
        interval_s=interval_s,
        window_s=interval_s * n_window,
        scheduling_policy=choose(("fcfs", "priority")),
        scheduler_reserve_full_isl=choose((True, True, False)),
        long_prefill_token_threshold=choose((0, 0, 1, 5, 16)),
        max_num_queued_reqs=choose((*(None,) * 7, 1, 4, 9)),
    )
    return Case(scenario, n_clusters, script)
