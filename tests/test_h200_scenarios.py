"""What the scenarios of the engine fidelity claim of themselves, against calculations apart."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vllm_tenant_tuning.baselines.statistics import CONFIDENCE
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario, load_scenario, scenario_names
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv
from vllm_tenant_tuning.workload import Workload

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "scenarios.md"
RESULTS = ROOT / "benchmarks" / "results" / "can_control_win"
H200 = [name for name in scenario_names() if name.startswith("h200_")]
TRACES = {"h200_azure", "h200_mooncake"}

OFFERED_PER_S = {
    "h200_chat_batch": {"chat": (20 * 90 + 4 * 150) / 240, "batch": (1.6 * 60 + 0.05 * 140) / 200},
    "h200_long_context": {"chat": (1.2 + 0.2) / 2, "documents": 0.2},
    "h200_azure_like": {"chat": 5.53, "code": 14.25 * 9.532 / (9.532 + 43.41)},
    "h200_four_slos": {"voice": 2.0, "chat": 5.0, "agents": (6 * 30 + 0.5 * 90) / 120,
                       "reports": 0.6},
    "h200_flash_crowd": {"app": 30 * 0.1 + 4 * 0.9, "assistant": 5.0, "documents": 0.8},
}  # fmt: skip
"""Written down from the descriptions, not computed by the workload."""

PROMPT_SHARE = {
    ("h200_chat_batch", "chat"): (20.0, 0.59),
    ("h200_chat_batch", "batch"): (1.6, 0.56),
    ("h200_flash_crowd", "app"): (30.0, 0.61),
    ("h200_flash_crowd", "assistant"): (5.0, 0.14),
    ("h200_flash_crowd", "documents"): (0.8, 0.28),
}
"""Rate in requests/s, and the share of the GPU's time that the prompts take then."""


def lognormal_prefill_s(scenario: Scenario, tenant: int) -> float:
    """Mean GPU time of a prompt: the step-time law over the clipped lognormal, by a sum."""
    engine, lengths = scenario.engine, scenario.tenants[tenant].prompt_tokens
    assert isinstance(engine, ContinuousBatchingEngine)
    assert lengths.distribution == "lognormal"
    law = engine.profile.step_time
    levels = (np.arange(200_000) + 0.5) / 200_000
    normal = math.sqrt(2) * erfinv(2 * levels - 1)
    tokens = np.clip(
        lengths.median_tokens * np.exp(lengths.sigma * normal),
        lengths.min_tokens,
        lengths.max_tokens,
    )
    ms = law.dense_ms_per_token * tokens + law.prefill_attention_ms_per_pair * tokens**2 / 2
    return float(ms.mean() / 1000)


def erfinv(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    special = pytest.importorskip("scipy.special")
    return np.asarray(special.erfinv(values))


def hold(
    scenario: Scenario | str, caps: list[tuple[int, ...]], seeds: list[int], **options: Any
) -> dict[str, npt.NDArray[np.float64]]:
    """Play static caps, each on every seed: sums over the episode, mean over the seeds."""
    n = len(seeds)
    env = VLLMTenantTuningVectorEnv(len(caps) * n, scenario, **options)
    env.reset(seed=seeds * len(caps), options={"caps": np.repeat(np.array(caps), n, axis=0)})
    action = np.full(env.action_space.shape or (), env.scenario.control.max_delta)
    sums: dict[str, Any] = {}
    largest = np.zeros(len(caps) * n)
    slo_s = np.array([tenant.slo_ttft_p99_s or np.inf for tenant in env.scenario.tenants])
    for _ in range(env.scenario.control.n_steps):
        _, reward, _, _, info = env.step(action)
        tenants, cluster = (info["telemetry"][name] for name in ("tenants", "cluster"))
        late = np.nan_to_num(tenants["ttft_p99_s"]) > slo_s
        for name, value in (
            ("return", reward),
            ("preemptions", cluster["preemptions"]),
            ("dropped", tenants["dropped"]),
            ("arrived", tenants["arrived"]),
            ("late_intervals", late),
        ):
            sums[name] = sums.get(name, 0.0) + value
        largest = np.maximum(largest, cluster["kv_cache_usage"])
    env.close()
    sums["largest_kv_cache_usage"] = largest
    return {
        name: np.asarray(value, np.float64).reshape(len(caps), n, *value.shape[1:]).mean(axis=1)
        for name, value in sums.items()
    }


@pytest.mark.parametrize("name", OFFERED_PER_S)
def test_the_offered_load_is_what_the_description_says(name: str) -> None:
    scenario = load_scenario(name)
    assert set(OFFERED_PER_S[name]) == set(scenario.tenant_names)
    workload = Workload(scenario)
    expected = np.array([OFFERED_PER_S[name][tenant] for tenant in scenario.tenant_names])
    # exact up to a burst that the end of the episode cuts off
    np.testing.assert_allclose(workload.offered_rate_per_s, expected, rtol=0.1)
    streams = [workload.sample(np.random.default_rng(seed)) for seed in range(200)]
    counts = np.array([np.diff(stream.offsets) for stream in streams])
    rates = counts / scenario.control.episode_s
    error = rates.std(axis=0, ddof=1) / math.sqrt(len(rates))
    assert np.all(abs(rates.mean(axis=0) - workload.offered_rate_per_s) < 4.5 * error)


@pytest.mark.parametrize(("name", "tenant"), PROMPT_SHARE)
def test_prompts_take_the_share_of_the_gpu_that_the_description_says(
    name: str, tenant: str
) -> None:
    scenario = load_scenario(name)
    rate_per_s, share = PROMPT_SHARE[name, tenant]
    own = lognormal_prefill_s(scenario, scenario.tenant_names.index(tenant))
    assert rate_per_s * own == pytest.approx(share, abs=0.01)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "shares", "kept"), [("h200_azure", 0.70, 1.0), ("h200_mooncake", 1.39, 0.5)]
)
def test_replayed_prompts_take_the_share_that_the_description_says(
    shared: Callable[[str], Path], name: str, shares: float, kept: float
) -> None:
    scenario = load_scenario(name)
    assert isinstance(scenario.engine, ContinuousBatchingEngine)
    law = scenario.engine.profile.step_time
    total = 0.0
    for tenant in scenario.tenants:
        if tenant.arrivals.process != "trace":
            continue
        assert tenant.arrivals.sample_fraction == kept
        path = shared(f"traces/{tenant.arrivals.file}")
        if tenant.arrivals.format == "mooncake":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            tokens = np.array([row["input_length"] for row in rows], float)
            duration_s = rows[-1]["timestamp"] / 1000
        else:
            lines = path.read_text(encoding="utf-8").splitlines()[1:]
            tokens = np.array([line.split(",")[1] for line in lines], float)
            stamps = [np.datetime64(lines[i].split(",")[0].strip()) for i in (0, -1)]
            duration_s = (stamps[1] - stamps[0]) / np.timedelta64(1, "s")
        ms = law.dense_ms_per_token * tokens + law.prefill_attention_ms_per_pair * tokens**2 / 2
        total += ms.sum() / 1000 / duration_s
    assert total == pytest.approx(shares, abs=0.01)


def test_h200_azure_like_has_the_distributions_of_azure_like() -> None:
    ours, measured = load_scenario("h200_azure_like").tenants, load_scenario("azure_like").tenants
    for tenant, source in zip(ours, measured, strict=True):
        for field in ("arrivals", "prompt_tokens", "output_tokens"):
            assert getattr(tenant, field) == getattr(source, field)


def test_documents_press_on_the_cache_under_large_caps_and_not_under_small_ones() -> None:
    seen = hold("h200_long_context", [(64, 64), (64, 20), (64, 2), (12, 4)], [0, 1, 2])
    preemptions, usage = seen["preemptions"], seen["largest_kv_cache_usage"]
    assert preemptions[0] > 10
    assert usage[0] > 0.98
    assert preemptions[3] == 0
    assert usage[3] < 0.9
    # a large cap for documents makes the chat wait, a small one loses documents
    late, dropped = seen["late_intervals"][:, 0], seen["dropped"][:, 1]
    assert late[0] > late[1] > 3 * late[2]
    assert dropped[2] > 2 * dropped[1] > 0


def test_a_cap_for_batch_is_too_large_for_a_busy_chat_or_too_small_for_the_bursts() -> None:
    seen = hold("h200_chat_batch", [(256, 1), (256, 3), (256, 32)], [0, 1, 2])
    late, dropped = seen["late_intervals"][:, 0], seen["dropped"][:, 1] / seen["arrived"][:, 1]
    assert late[2] > 2 * late[1] > 0
    assert dropped[0] > 2 * dropped[1] > 4 * dropped[2]
    assert seen["return"].argmax() == 1


def test_a_report_breaks_the_voices_promise_by_chunks_of_its_prompt() -> None:
    scenario = load_scenario("h200_four_slos")
    assert isinstance(scenario.engine, ContinuousBatchingEngine)
    law = scenario.engine.profile.step_time
    budget = scenario.engine.scheduler.max_num_batched_tokens
    chunk_ms = law.dense_ms_per_token * budget + law.prefill_attention_ms_per_pair * budget**2 / 2
    voice_s = scenario.tenants[0].slo_itl_p99_s
    assert voice_s is not None
    assert 0.15 < chunk_ms / 1000 < 0.21
    assert voice_s < chunk_ms / 2000


@pytest.mark.parametrize("name", H200)
def test_the_price_is_said_to_be_an_assumption(name: str) -> None:
    scenario = load_scenario(name)
    assert isinstance(scenario.engine, ContinuousBatchingEngine)
    price = scenario.engine.gpu_price_per_hour_usd
    assert price is not None
    text = scenario.description
    assert (f"{price:.2f} USD" in text and "assum" in text) or "are those of h200_azure" in text


@pytest.mark.parametrize("name", scenario_names())
def test_the_documentation_has_a_row_for_the_scenario(name: str) -> None:
    scenario = load_scenario(name)
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert any(f"`{name}`" in row and scenario.question in row for row in rows)


@pytest.mark.parametrize("name", H200)
def test_the_documentation_shows_what_was_measured(name: str) -> None:
    file = RESULTS / f"{name}.json"
    if not file.exists():
        row = next(line for line in DOCS.read_text("utf-8").splitlines() if f"`{name}`" in line)
        assert "not measured" in row
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    control = load_scenario(name).control
    assert all(control.cap_min <= cap <= control.cap_max for cap in found["static"]["caps"])
    text = DOCS.read_text(encoding="utf-8")
    caps = "/".join(map(str, found["static"]["caps"]))
    table = text[text.index(f"| `{name}` ({caps}) |") :]
    for line, policy in zip(table.splitlines()[1:3], ("feedback", "clairvoyant"), strict=True):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        assert cells[0] == policy
        shown = ("return_", "goodput_rps", "weighted_drops")
        for cell, metric in zip(cells[1:], shown, strict=True):
            theirs = np.array(found["episodes"]["static"][metric])
            differences = np.array(found["episodes"][policy][metric]) - theirs
            mean, low, high = (float(x) for x in re.findall(r"[-+][\d.e+-]*\d", cell)[:3])
            assert mean == pytest.approx(differences.mean(), rel=0.01, abs=1e-3)
            # a normal approximation to the interval, from the episodes themselves
            assert CONFIDENCE == 0.95
            half = 1.96 * differences.std(ddof=1) / math.sqrt(differences.size)
            assert (high - low) / 2 == pytest.approx(half, rel=0.2, abs=1e-3)
