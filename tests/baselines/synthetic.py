"""Episode records made up for the tests of what is computed from them."""

from __future__ import annotations

from typing import Any

from vllm_tenant_tuning.baselines.records import EpisodeRecord


def record(policy: str = "static", seed: int = 0, **values: Any) -> EpisodeRecord:
    """A record whose values are harmless but for those given."""
    latencies = {"latency_p50_s": 2.0, "latency_p95_s": 7.0, "latency_p99_s": 11.0}
    tenant = {
        "arrived": 10,
        "completed": 9,
        "good": 8,
        "dropped": 1,
        "failed": 0,
        **latencies,
        "mean_cap": 4,
        "mean_in_flight": 1.5,
    }
    content: dict[str, Any] = {
        "scenario": "study",
        "scenario_digest": "0123",
        "policy": policy,
        "seed": seed,
        "backend": "sim",
        "truncation": "time_limit",
        "steps": 600,
        "episode_s": 1800.0,
        "return": 100.0,
        "reward_terms": {"throughput": 101.0, "slo": -0.5, "drop": -0.5, "cost": 0.0},
        "throughput_rps": 0.69,
        "goodput_rps": 0.68,
        "drops": 2.0,
        "weighted_drops": 2.0,
        "failed": 0.0,
        **latencies,
        "cost": 0.2,
        "cap_changes": 0,
        "jain_fairness": 1.0,
        "wall_s": 0.1,
        "tenants": {"a": tenant, "b": tenant},
    }
    return EpisodeRecord.model_validate(content | values)
