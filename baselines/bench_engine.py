"""Speed of the engine fidelity: against real time, and how its cost grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_tenant_tuning.backends import make_backend
from vllm_tenant_tuning.backends.sim.engine import EngineBackend
from vllm_tenant_tuning.scenario import Scenario, parse_scenario
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv
from vllm_tenant_tuning.workload import Workload

PROFILE = "h200-llama-3.1-8b"
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 256
REPEATS = 20
VECTOR_SCENARIO = "h200_chat_batch"
VECTOR_ENVS = 256

Row = dict[str, Any]


def load_scenario_of(
    rate_per_s: float, simulated_s: float, n_tenants: int = 1, **engine: Any
) -> Scenario:
    """The load of the speed measurements: Poisson arrivals, 1024 prompt and 256 output tokens.

    Args:
        rate_per_s: of all tenants together, which share it equally.
        simulated_s: length of the episode, in whole control intervals of 3 s.
        n_tenants: number of tenants.
        engine: further keys of the engine section.
    """
    tenant = {
        "arrivals": {"process": "poisson", "rate_per_s": rate_per_s / n_tenants},
        "prompt_tokens": {"distribution": "fixed", "tokens": PROMPT_TOKENS},
        "output_tokens": {"distribution": "fixed", "tokens": OUTPUT_TOKENS},
        "cap_initial": 1024,
        "slo_latency_p99_s": 10.0,
    }
    return parse_scenario(
        {
            "name": "speed",
            "question": "How fast is the simulator?",
            "tenants": [tenant | {"name": f"tenant-{i}"} for i in range(n_tenants)],
            "engine": {"fidelity": "engine", "profile": PROFILE} | engine,
            "control": {"cap_max": 1024, "episode_s": simulated_s},
        }
    )


def engine_real_time_ratio(
    rate_per_s: float, simulated_s: float, n_tenants: int = 1, **engine: Any
) -> Row:
    """Simulated seconds in a second of one core, the best of `REPEATS` episodes.

    Telemetry is read every 3 s; drawing the requests is left out.

    Returns:
        `real_time_ratio`, `requests_per_s` (simulated, a second of wall clock), and what was
        simulated: `completed`, `mean_ttft_s`, `mean_tpot_s`, `mean_running`.
    """
    scenario = load_scenario_of(rate_per_s, simulated_s, n_tenants, **engine)
    stream = Workload(scenario).sample(np.random.default_rng(0))
    backend = make_backend("sim", scenario, n_threads=1)
    caps = np.array([scenario.caps_initial])
    active = np.ones(1, np.bool_)
    best_s = np.inf
    running: list[float] = []
    for _ in range(REPEATS):
        backend.reset(0, stream, caps[0])
        running.clear()
        began = time.perf_counter()
        for _ in range(scenario.control.n_steps):
            backend.advance(caps, active)
            running.append(float(backend.telemetry_cluster["mean_running"][0]))
        best_s = min(best_s, time.perf_counter() - began)
    outcomes = backend.outcomes(0)
    decode_s = (outcomes.finished_s - outcomes.first_token_s) / (OUTPUT_TOKENS - 1)
    return {
        "real_time_ratio": simulated_s / best_s,
        "requests_per_s": len(stream) / best_s,
        "completed": int(np.isfinite(outcomes.latency_s).sum()),
        "mean_ttft_s": float(np.nanmean(outcomes.first_token_s - outcomes.arrival_s)),
        "mean_tpot_s": float(np.nanmean(decode_s)),
        "mean_running": float(np.mean(running)),
    }


def run_engine_bench() -> Row:
    """Measure the engine fidelity's speed.

    Returns:
        `real_time_ratio` at 20 requests/s and `real_time_ratio_5_per_s`; `at_20_per_s`, what was
        simulated; `vector` with `steps_per_s`, `num_envs`, `scenario` and
        `bytes_per_environment`.
    """
    at_20 = engine_real_time_ratio(20.0, 1800.0)
    at_5 = engine_real_time_ratio(5.0, 1800.0)
    return {
        "real_time_ratio": at_20["real_time_ratio"],
        "real_time_ratio_5_per_s": at_5["real_time_ratio"],
        "at_20_per_s": at_20,
        "profile": PROFILE,
        "vector": _vector(VECTOR_SCENARIO, VECTOR_ENVS),
    }


def engine_scaling() -> dict[str, list[Row]]:
    """How the cost of a simulated second grows with load, tenants, sequences and environments.

    Returns:
        Rows of `x` and `microseconds` of one core for each simulated second (`environments`: of
        wall clock for each environment's).
    """

    def rows(values: list[float], measure: Callable[[float], Row]) -> list[Row]:
        return [{"x": x, "microseconds": 1e6 / measure(x)["real_time_ratio"]} for x in values]

    return {
        "requests per second": rows(
            [1, 2, 5, 10, 20, 25, 30, 40], lambda x: engine_real_time_ratio(x, 600.0)
        ),
        "tenants (20 requests/s)": rows(
            [1, 2, 4, 8, 16, 32, 64], lambda x: engine_real_time_ratio(20.0, 600.0, int(x))
        ),
        "max_num_seqs (40 requests/s)": rows(
            [16, 32, 64, 128, 256, 512, 1024],
            lambda x: engine_real_time_ratio(40.0, 600.0, max_num_seqs=int(x)),
        ),
        "environments (2 tenants, 20 requests/s)": rows(
            [1, 4, 16, 64, 256], lambda x: _many(int(x))
        ),
    }


def plot_engine_scaling(scaling: dict[str, list[Row]], file: str | Path) -> None:
    """Draw what `engine_scaling` measured, one panel for each quantity.

    Args:
        scaling: its result.
        file: where to write; the suffix chooses the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for axes, (quantity, rows) in zip(figure.subplots(2, 2).flat, scaling.items(), strict=True):
        axes.plot([row["x"] for row in rows], [row["microseconds"] for row in rows], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(quantity)
        axes.set_ylabel("µs for each simulated second")
        axes.grid(alpha=0.3)
    figure.savefig(file)


def _vector(name: str, num_envs: int) -> Row:
    env = VLLMTenantTuningVectorEnv(num_envs, name)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(100)]
    n_steps = env.scenario.control.n_steps
    best_s = np.inf
    for _ in range(3):
        env.reset(seed=0)
        began = time.perf_counter()
        for i in range(n_steps):
            env.step(actions[i % 100])
        best_s = min(best_s, time.perf_counter() - began)
    env.close()
    alone = EngineBackend(env.scenario)
    stream = Workload(env.scenario).sample(np.random.default_rng(0))
    alone.reset(0, stream, np.array(env.scenario.caps_initial))
    return {
        "steps_per_s": num_envs * n_steps / best_s,
        "num_envs": num_envs,
        "scenario": name,
        "requests_per_step": len(stream) / n_steps,
        "bytes_per_environment": alone.bytes_per_cluster,
    }


def _many(num_envs: int) -> Row:
    scenario = load_scenario_of(20.0, 300.0, 2)
    env = VLLMTenantTuningVectorEnv(num_envs, scenario)
    hold = np.full((num_envs, 2), scenario.control.max_delta)
    best_s = np.inf
    for _ in range(REPEATS):
        env.reset(seed=0)
        began = time.perf_counter()
        for _ in range(scenario.control.n_steps - 1):
            env.step(hold)
        best_s = min(best_s, time.perf_counter() - began)
    env.close()
    played_s = (scenario.control.n_steps - 1) * scenario.control.control_interval_s
    return {"real_time_ratio": num_envs * played_s / best_s}
