"""One episode of a policy: played in an environment, told as a record and over time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

import vllm_tenant_tuning  # noqa: F401  (registers the environment)
from vllm_tenant_tuning.agents import Policy, TranscribedPolicy
from vllm_tenant_tuning.backends import RequestOutcomes
from vllm_tenant_tuning.baselines.live import live_record
from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.token_measures import latency_measures, token_measures
from vllm_tenant_tuning.reward import REWARD_TERMS
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

Env = gym.Env[npt.NDArray[np.float32], npt.NDArray[np.int64]]

Trajectory = dict[str, npt.NDArray[np.float64]]
"""One episode over time: `time_s` (K,), and (K, n_tenants) each `caps`, `queued`,
`latency_p99_s` (NaN before the first completion), `completed` and `dropped` (requests in the
interval)."""


def make_env(
    scenario: Scenario,
    backend: str = "sim",
    trace_dir: str | Path | None = None,
    **backend_options: Any,
) -> Env:
    """The scalar environment that evaluations play."""
    return gym.make(
        "VLLMTenantTuning-v0",
        scenario=scenario,
        backend=backend,
        trace_dir=trace_dir,
        **backend_options,
    )


def play(env: Env, policy: Policy, seed: int) -> tuple[EpisodeRecord, Trajectory]:
    """Play one episode.

    Args:
        env: made by `make_env`.
        policy: decides; it is reset first.
        seed: of the environment and of the policy.

    Returns:
        The record, its label and digest those of `policy.name` and empty, and the trajectory.
    """
    inner: Any = env.unwrapped
    scenario: Scenario = inner.scenario
    began = time.perf_counter()
    policy.reset(scenario, seed)
    observation, info = env.reset(seed=seed, options={"caps": policy.initial_caps(scenario)})
    terms = dict.fromkeys(REWARD_TERMS, 0.0)
    seen: list[Telemetry] = []
    total = 0.0
    cap_changes = 0
    caps = info["caps"]
    live: list[dict[str, Any]] = []
    truncated = False
    while not truncated:
        observation, reward, _, truncated, info = env.step(policy.act(observation, info))
        total += float(reward)
        for name in REWARD_TERMS:
            terms[name] += info["reward_terms"][name]
        cap_changes += int((info["caps"] != caps).sum())
        caps = info["caps"]
        seen.append(info["telemetry"])
        if "live" in info:
            live.append(info["live"])
    wall_s = time.perf_counter() - began
    tenants = np.stack([telemetry.tenants for telemetry in seen])
    record = _record(
        scenario,
        policy.name,
        seed,
        tenants,
        np.stack([telemetry.cluster for telemetry in seen]),
        inner.outcomes(),
        total,
        terms,
        cap_changes,
        str(info["truncation_reason"]),
        wall_s,
        policy.decision_summary() if isinstance(policy, TranscribedPolicy) else None,
    )
    if live:
        record = record.model_copy(update={"live": live_record(live)})
    trajectory = {
        "time_s": np.array([float(telemetry.cluster["time_s"]) for telemetry in seen]),
        "caps": tenants["cap"],
        **{name: tenants[name] for name in ("queued", "latency_p99_s", "completed", "dropped")},
    }
    return record, trajectory


def _record(
    scenario: Scenario,
    label: str,
    seed: int,
    tenants: npt.NDArray[np.void],
    cluster: npt.NDArray[np.void],
    outcomes: RequestOutcomes,
    total: float,
    terms: dict[str, float],
    cap_changes: int,
    truncation: str,
    wall_s: float,
    decisions: dict[str, Any] | None,
) -> EpisodeRecord:
    last = tenants[-1]
    # where a live episode's load died in the first interval no time was read
    episode_s = max(float(cluster["time_s"][-1]), scenario.control.control_interval_s)
    good = tenants["good"].sum(axis=0)
    mean_in_flight = tenants["mean_in_flight"].mean(axis=0)
    latency_s = outcomes.latency_s
    weights = np.array([tenant.drop_weight for tenant in scenario.tenants])
    by_tenant = {}
    for i, name in enumerate(scenario.tenant_names):
        by_tenant[name] = {
            "arrived": float(last["arrived_total"][i]),
            "completed": float(last["completed_total"][i]),
            "good": float(good[i]),
            "dropped": float(last["dropped_total"][i]),
            "failed": float(last["failed_total"][i]),
            **_percentiles(latency_s[outcomes.tenant == i]),
            **latency_measures(outcomes, outcomes.tenant == i),
            "mean_cap": float(tenants["cap"][:, i].mean()),
            "mean_in_flight": float(mean_in_flight[i]),
        }
    return EpisodeRecord.model_validate(
        {
            "scenario": scenario.name,
            "scenario_digest": "",
            "policy": label,
            "seed": seed,
            "backend": "sim",
            "truncation": truncation,
            "steps": len(tenants),
            "episode_s": episode_s,
            "return": total,
            "reward_terms": terms,
            "throughput_rps": float(last["completed_total"].sum()) / episode_s,
            "goodput_rps": float(good.sum()) / episode_s,
            "drops": float(last["dropped_total"].sum()),
            "weighted_drops": float((weights * last["dropped_total"]).sum()),
            "failed": float(last["failed_total"].sum()),
            **_percentiles(latency_s),
            "cost": float(mean_in_flight.sum()) / scenario.max_num_seqs,
            "cap_changes": cap_changes,
            "jain_fairness": _jain(last["completed_total"], last["arrived_total"]),
            "wall_s": wall_s,
            **token_measures(scenario, cluster, outcomes, episode_s, float(good.sum())),
            "decisions": decisions,
            "tenants": by_tenant,
        }
    )


def _percentiles(latency_s: npt.NDArray[np.float64]) -> dict[str, float | None]:
    done = latency_s[~np.isnan(latency_s)]
    values = np.percentile(done, [50, 95, 99]) if done.size else [None] * 3
    return {
        f"latency_p{level}_s": None if value is None else float(value)
        for level, value in zip((50, 95, 99), values, strict=True)
    }


def _jain(completed: npt.NDArray[np.float64], arrived: npt.NDArray[np.float64]) -> float:
    """Jain's index of the tenants' served shares (Jain, Chiu, Hawe 1984): 1 is even."""
    share = completed[arrived > 0] / arrived[arrived > 0]
    if not share.any():
        return 1.0
    return float(share.sum() ** 2 / (share.size * (share**2).sum()))
