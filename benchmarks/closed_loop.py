"""A closed loop of constant concurrency, played through the simulated engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.sim.engine import EngineBackend
from vllm_tenant_tuning.profile import EngineProfile
from vllm_tenant_tuning.scenario import parse_scenario
from vllm_tenant_tuning.workload import RequestStream

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

EPISODE_S = 1e5


@dataclass(frozen=True)
class ClosedLoop:
    """Requests of a closed loop, in the order they were sent.

    Attributes:
        ttft_s: (R,) submission to first token.
        tpot_s: (R,) mean time between tokens; NaN for a request of one.
        output_tokens_per_s: all output tokens over the time from start to the last one.
        first_token_s, finished_s: (R,) from the start of the loop.
        preemptions: of all requests; 0 for records, which do not tell.
    """

    ttft_s: Floats
    tpot_s: Floats
    output_tokens_per_s: float
    first_token_s: Floats
    finished_s: Floats
    preemptions: int = 0


def play_closed_loop(
    profile: EngineProfile,
    prompt_tokens: Integers,
    output_tokens: Integers,
    concurrency: int,
    *,
    connections: int | None = None,
    ramp_s: float = 0.0,
) -> ClosedLoop:
    """Play requests in a closed loop through the simulated engine.

    The environment's workload is open loop. A closed loop of c is one tenant whose requests have
    all arrived, with unbounded patience, and whose cap is c.

    Args:
        profile: the engine.
        prompt_tokens, output_tokens: (R,) in the order of sending.
        concurrency: requests that the client has submitted and not got back.
        connections: of these, at most so many are sent to the server (none: all).
        ramp_s: the first `concurrency` requests are submitted evenly over so many seconds.

    Raises:
        ValueError: a request failed, or did not end within 100 000 s.
    """
    n = len(prompt_tokens)
    cap = min(concurrency, connections or concurrency)
    tenant = {
        "name": "client",
        "arrivals": {"process": "poisson", "rate_per_s": 0},
        "prompt_tokens": {"distribution": "fixed", "tokens": 1},
        "output_tokens": {"distribution": "fixed", "tokens": 1},
        "cap_initial": cap,
        "slo_latency_p99_s": EPISODE_S,
    }
    scenario = parse_scenario(
        {
            "name": "closed_loop",
            "question": "What does a closed loop of constant concurrency give?",
            "tenants": [tenant],
            "engine": {"fidelity": "engine", "profile": profile.model_dump()},
            "control": {
                "cap_max": cap,
                "control_interval_s": 100.0,
                "window_s": 100.0,
                "episode_s": EPISODE_S,
            },
            "reward": {"w_slo": 0.5, "slo_clip": 3.0},
        }
    )
    arrival_s = ramp_s * np.minimum(np.arange(n) / concurrency, 1.0)
    backend = EngineBackend(scenario)
    backend.reset(
        0,
        RequestStream(
            offsets=np.array([0, n]),
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            service_s=np.full(n, math.nan),
        ),
        np.array([cap]),
    )
    caps, active = np.array([[cap]]), np.array([True])
    for _ in range(scenario.control.n_steps):
        backend.advance(caps, active)
        outcomes = backend.outcomes(0)
        if np.isfinite(outcomes.finished_s).all():
            break
    if not np.isfinite(outcomes.tpot_s[output_tokens > 1]).all():
        raise ValueError(f"closed loop: a request failed, or did not end within {EPISODE_S:g} s")
    submitted_s = arrival_s.copy()
    submitted_s[concurrency:] = np.sort(outcomes.finished_s)[: max(0, n - concurrency)]
    return ClosedLoop(
        ttft_s=outcomes.first_token_s - submitted_s,
        tpot_s=outcomes.tpot_s,
        output_tokens_per_s=float(output_tokens.sum() / outcomes.finished_s.max()),
        first_token_s=outcomes.first_token_s,
        finished_s=outcomes.finished_s,
        preemptions=int(outcomes.preemptions.sum()),
    )
