"""The engine simulator beside a real vLLM server whose KV cache is saturated.

The record (LLMServingSim, MIT): vLLM 0.19 on an RTX 4090 with 2588 blocks of 16 tokens; when
300 requests were queued, first scheduled, and gave their first and last token, and what the server
said each second of running, waiting and KV cache. The step time's coefficients are fitted on every
other request; the rest, and the series, are predicted.

    python benchmarks/rtx4090_saturated_cache.py RECORDS [--json FILE] [--profile FILE]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from scipy.optimize import minimize

from vllm_tenant_tuning.backends import RequestOutcomes, make_backend
from vllm_tenant_tuning.profile import EngineProfile, StepTimeCoefficients
from vllm_tenant_tuning.scenario import parse_scenario
from vllm_tenant_tuning.workload import RequestStream

FloatArray = npt.NDArray[np.float64]

GUESS = StepTimeCoefficients(
    base_ms=2.0,
    weights_ms=17.0,  # 16 GB over 1 TB/s
    dense_ms_per_token=0.095,
    sequence_ms=0.02,
    kv_read_ms_per_token=1.5e-4,
    prefill_attention_ms_per_pair=3e-6,
)
SECONDS = 5
NOT_REACHED_S = 500.0
"""Counted for a time that the simulation does not reach."""


@dataclass(frozen=True, eq=False)
class Record:
    """What the server did, in the order in which requests were queued; seconds from the first."""

    stream: RequestStream
    scheduled_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    second: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_cache_usage: FloatArray

    @property
    def fitted(self) -> npt.NDArray[np.bool_]:
        """(R,) bool: every other request."""
        return np.arange(self.scheduled_s.size) % 2 == 0


def read_record(folder: Path) -> Record:
    """Read `requests.jsonl` and `timeseries.csv`."""
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["queued_ts"])
    column = {
        name: np.array([row[name] for row in rows]) for name in rows[0] if name != "request_id"
    }
    began_s = column["queued_ts"][0]
    series = np.genfromtxt(folder / "timeseries.csv", delimiter=",", names=True)
    return Record(
        stream=RequestStream(
            offsets=np.array([0, len(rows)]),
            arrival_s=column["queued_ts"] - began_s,
            prompt_tokens=column["input_toks"],
            output_tokens=column["output_toks"],
            service_s=np.full(len(rows), np.nan),
        ),
        scheduled_s=column["scheduled_ts"] - began_s,
        first_token_s=column["first_token_ts"] - began_s,
        last_token_s=column["last_token_ts"] - began_s,
        second=series["t"],
        running=series["running"],
        waiting=series["waiting"],
        kv_cache_usage=series["kv_cache_pct"] / 100,
    )


def profile_of(step_time: StepTimeCoefficients) -> EngineProfile:
    """The server's profile: all that its record states, with these coefficients."""
    return EngineProfile.model_validate(
        {
            "name": "rtx4090-8b",
            "description": "An 8B model in bf16 (128 KiB of KV cache a token) on an RTX 4090",
            "model": "not named in the record",
            "gpu": "one NVIDIA RTX 4090 (24 GB)",
            "source": (
                "Fitted on every other request of LLMServingSim's record of vLLM 0.19 (MIT) by "
                "benchmarks/rtx4090_saturated_cache.py; the record has no idle steps, so a batch "
                "of one is extrapolated."
            ),
            "step_time": step_time,
            "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16},
            "scheduler": {
                "max_num_seqs": 256,
                "max_num_batched_tokens": 2048,
                "max_model_len": 8192,
            },
        }
    )


def simulate(
    record: Record, profile: EngineProfile
) -> tuple[RequestOutcomes, npt.NDArray[np.void]]:
    """Play the record's requests, queued when they were; also the telemetry of each second."""
    tenant = {
        "name": "all",
        "arrivals": {"process": "poisson", "rate_per_s": 1.0},
        "prompt_tokens": {"distribution": "fixed", "tokens": 1},
        "output_tokens": {"distribution": "fixed", "tokens": 1},
        "cap_initial": 4096,
        "slo_latency_p99_s": 60.0,
    }
    seconds = record.second.size + 30
    scenario = parse_scenario(
        {
            "name": "record",
            "question": "Does the simulator do what the server did?",
            "tenants": [tenant],
            "engine": {"fidelity": "engine", "profile": profile.model_dump()},
            "control": {
                "cap_max": 4096,
                "control_interval_s": 1.0,
                "window_s": 1.0,
                "episode_s": float(seconds),
            },
        }
    )
    backend = make_backend("sim", scenario)
    caps = np.array([scenario.caps_initial])
    backend.reset(0, record.stream, caps[0])
    seen = []
    for _ in range(seconds):
        backend.advance(caps, np.ones(1, np.bool_))
        seen.append(backend.telemetry_cluster[0].copy())
    return backend.outcomes(0), np.array(seen)[: record.second.size]


def fit(record: Record) -> StepTimeCoefficients:
    """Coefficients of the least mean error of first and last tokens of the fitted requests."""
    names = tuple(StepTimeCoefficients.model_fields)

    def coefficients(logs: FloatArray) -> StepTimeCoefficients:
        return StepTimeCoefficients(**dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def error_s(logs: FloatArray) -> float:
        outcomes, _ = simulate(record, profile_of(coefficients(logs)))
        errors = np.abs(outcomes.finished_s - record.last_token_s)
        errors += np.abs(outcomes.first_token_s - record.first_token_s)
        return float(np.nan_to_num(errors, nan=NOT_REACHED_S)[record.fitted].mean())

    start = np.log([getattr(GUESS, name) for name in names])
    simplex = start + np.vstack([np.zeros(start.size), 0.2 * np.eye(start.size)])
    found = minimize(
        error_s,
        start,
        method="Nelder-Mead",
        options={"maxfev": 600, "initial_simplex": simplex},
    )
    best = np.exp(found.x).tolist()
    # four digits say it
    return StepTimeCoefficients(
        **{name: float(f"{value:.4g}") for name, value in zip(names, best, strict=True)}
    )


def fewest_preemptions(
    second: FloatArray, running: FloatArray, scheduled_s: FloatArray, finished_s: FloatArray
) -> int:
    """Preemptions that a series of running requests proves.

    Where fewer run after some seconds than ran before, started in them and did not finish in
    them, the rest was preempted. (Preempted and resumed meanwhile does not show. Over single
    seconds, the unknown offset between the clocks of series and requests would show instead.)
    """
    second, running = second[SECONDS - 1 :: SECONDS], running[SECONDS - 1 :: SECONDS]
    edges = np.concatenate([[0.0], second])
    started = np.histogram(scheduled_s, edges)[0]
    finished = np.histogram(finished_s, edges)[0]
    net = np.diff(running, prepend=0) - started + finished
    return int(-net[net < 0].sum())


def compare(record: Record, profile: EngineProfile) -> dict[str, Any]:
    """How far the simulation is from the record, on what was not fitted and on the series."""
    outcomes, seen = simulate(record, profile)
    held_out = ~record.fitted

    def mean_error_s(simulated: FloatArray, real: FloatArray) -> float:
        return float(np.abs(simulated - real)[held_out].mean())

    def order(times_s: FloatArray) -> npt.NDArray[np.int64]:
        return np.argsort(times_s[held_out], kind="stable")

    def series(simulated: FloatArray, real: FloatArray) -> dict[str, float]:
        return {
            "mean_record": float(real.mean()),
            "mean_simulated": float(simulated.mean()),
            "mean_absolute_error": float(np.abs(simulated - real).mean()),
            "correlation": float(np.corrcoef(simulated, real)[0, 1]),
        }

    return {
        "held_out_requests": int(held_out.sum()),
        "same_scheduling_order": bool(
            (order(outcomes.scheduled_s) == order(record.scheduled_s)).all()
        ),
        "mean_error_scheduled_s": mean_error_s(outcomes.scheduled_s, record.scheduled_s),
        "mean_error_first_token_s": mean_error_s(outcomes.first_token_s, record.first_token_s),
        "mean_error_last_token_s": mean_error_s(outcomes.finished_s, record.last_token_s),
        "makespan_record_s": float(record.last_token_s.max()),
        "makespan_simulated_s": float(outcomes.finished_s.max()),
        "running": series(seen["num_requests_running"], record.running),
        "waiting": series(seen["num_requests_waiting"], record.waiting),
        "kv_cache_usage": series(seen["kv_cache_usage"], record.kv_cache_usage),
        "preemptions_simulated": int(outcomes.preemptions.sum()),
        "fewest_preemptions_record": fewest_preemptions(
            record.second, record.running, record.scheduled_s, record.last_token_s
        ),
        "fewest_preemptions_simulated": fewest_preemptions(
            record.second,
            seen["num_requests_running"],
            outcomes.scheduled_s,
            outcomes.finished_s,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, help="folder of requests.jsonl and timeseries.csv")
    parser.add_argument("--json", type=Path, help="write the comparison there")
    parser.add_argument("--profile", type=Path, help="write the fitted profile there")
    options = parser.parse_args()
    record = read_record(options.records)
    profile = profile_of(fit(record))
    result = compare(record, profile)
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    if options.profile:
        content = yaml.safe_dump(
            profile.model_dump(mode="json", exclude_none=True), sort_keys=False
        )
        options.profile.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
