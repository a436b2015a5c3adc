"""The streams of whole scenarios."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from vllm_tenant_tuning.scenario import Scenario, ScenarioError, load_scenario
from vllm_tenant_tuning.workload import RequestStream, TraceError, Workload

ScenarioBuilder = Callable[..., Scenario]
Z = 4.5
FIELDS = ("arrival_s", "prompt_tokens", "output_tokens", "service_s")

AZURE_ROWS = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00.0000000,10,1
2023-11-16 18:00:10.0000000,20,2
broken
2023-11-16 18:00:20.0000000,30,3
"""
TRACED = {
    "arrivals": {
        "process": "trace",
        "format": "azure",
        "file": "t.csv",
        "malformed": "skip",
        "start": "first",
    },
    "prompt_tokens": {"distribution": "trace"},
    "output_tokens": {"distribution": "trace"},
    "service": {
        "model": "tokens",
        "first_token_s": 0.5,
        "per_prompt_token_s": 0.01,
        "per_output_token_s": 0.1,
    },
}


def digest(stream: RequestStream) -> str:
    parts = (stream.offsets, *(getattr(stream, field) for field in FIELDS))
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def of_tenant(stream: RequestStream, tenant: int) -> list[Any]:
    part = slice(stream.offsets[tenant], stream.offsets[tenant + 1])
    return [getattr(stream, field)[part].tolist() for field in FIELDS]


def test_stream_has_the_promised_form(make_scenario: ScenarioBuilder) -> None:
    gamma = {"process": "gamma", "rate_per_s": 2.0, "cv": 2.0}
    scenario = make_scenario({"name": "a"}, {"name": "b", "arrivals": gamma})
    stream = Workload(scenario).sample(np.random.default_rng(0))
    assert stream.offsets.dtype == np.int64
    assert stream.offsets[0] == 0
    assert stream.offsets[-1] == len(stream)
    dtypes = dict(zip(FIELDS, (np.float64, np.int64, np.int64, np.float64), strict=True))
    for field, dtype in dtypes.items():
        assert getattr(stream, field).dtype == dtype
        assert getattr(stream, field).shape == (len(stream),)
    assert stream.n_tenants == 2
    for tenant in range(2):
        times = stream.arrival_s[stream.tenant == tenant]
        assert np.all(np.diff(times) >= 0)
        assert times.size > 100
    assert stream.prompt_tokens.min() >= 1
    assert stream.output_tokens.min() >= 1
    assert stream.service_s.min() > 0


@pytest.mark.parametrize("n_silent", [1, 2])
def test_a_stream_without_requests(make_scenario: ScenarioBuilder, n_silent: int) -> None:
    silent = {"process": "poisson", "rate_per_s": 0}
    tenants = [{"name": f"t{i}", "arrivals": silent} for i in range(n_silent)]
    workload = Workload(make_scenario(*tenants))
    stream = workload.sample(np.random.default_rng(0))
    assert len(stream) == 0
    assert stream.n_tenants == n_silent
    assert stream.tenant.size == stream.arrival_s.size == stream.service_s.size == 0
    np.testing.assert_array_equal(workload.offered_rate_per_s, np.zeros(n_silent))
    assert np.all(np.isfinite(workload.mean_output_tokens))


def test_same_seed_same_stream_and_episodes_differ(make_scenario: ScenarioBuilder) -> None:
    workload = Workload(make_scenario({"name": "a"}, {"name": "b"}))
    rng, twin = np.random.default_rng(3), np.random.default_rng(3)
    episodes = [digest(workload.sample(rng)) for _ in range(3)]
    assert episodes == [digest(workload.sample(twin)) for _ in range(3)]
    assert len(set(episodes)) == 3
    stream = workload.sample(rng)
    assert of_tenant(stream, 0) != of_tenant(stream, 1)


def test_a_further_tenant_leaves_the_others_alone(make_scenario: ScenarioBuilder) -> None:
    burst = {
        "process": "random_bursts",
        "on_rate_per_s": 5,
        "off_rate_per_s": 0,
        "mean_on_s": 5,
        "mean_off_s": 9,
    }
    tenants = [{"name": "a"}, {"name": "b", "arrivals": burst}, {"name": "c"}]
    two, three = Workload(make_scenario(*tenants[:2])), Workload(make_scenario(*tenants))
    rng, other = np.random.default_rng(11), np.random.default_rng(11)
    for _ in range(3):  # in every episode, not in the first alone
        small, large = two.sample(rng), three.sample(other)
        for tenant in range(2):
            assert of_tenant(small, tenant) == of_tenant(large, tenant)


def test_nothing_is_drawn_from_the_episode_generator(make_scenario: ScenarioBuilder) -> None:
    rng = np.random.default_rng(0)
    Workload(make_scenario({"name": "a"})).sample(rng)
    assert rng.random() == np.random.default_rng(0).random()


def test_same_stream_in_another_process() -> None:
    code = (
        "import numpy as np\n"
        "from vllm_tenant_tuning.scenario import load_scenario\n"
        "from vllm_tenant_tuning.workload import Workload\n"
        "import hashlib\n"
        "s = Workload(load_scenario('azure_like')).sample(np.random.default_rng(42))\n"
        "parts = (s.offsets, s.arrival_s, s.prompt_tokens, s.output_tokens, s.service_s)\n"
        "print(hashlib.sha256(b''.join(p.tobytes() for p in parts)).hexdigest())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = Workload(load_scenario("azure_like")).sample(np.random.default_rng(42))
    assert done.stdout.strip() == digest(here)


def test_service_models(make_scenario: ScenarioBuilder) -> None:
    tokens = {
        "model": "tokens",
        "first_token_s": 0.5,
        "per_prompt_token_s": 0.01,
        "per_output_token_s": 0.1,
    }
    scenario = make_scenario(
        {"name": "exponential"},
        {"name": "fixed", "service": {"model": "fixed", "service_s": 1.25}},
        {"name": "tokens", "service": tokens},
        episode_s=6000.0,
    )
    workload = Workload(scenario)
    stream = workload.sample(np.random.default_rng(1))
    demand_s = [stream.service_s[stream.tenant == i] for i in range(3)]
    assert stats.kstest(demand_s[0], stats.expon(scale=2.5).cdf).pvalue > 1e-4
    assert set(demand_s[1].tolist()) == {1.25}
    prompt = stream.prompt_tokens[stream.tenant == 2]
    np.testing.assert_allclose(demand_s[2], 0.5 + 0.01 * prompt + 0.1 * 7)
    np.testing.assert_array_equal(workload.mean_service_s[:2], [2.5, 1.25])
    error = demand_s[2].std() / np.sqrt(demand_s[2].size)
    assert abs(demand_s[2].mean() - workload.mean_service_s[2]) < Z * error
    np.testing.assert_array_equal(workload.mean_output_tokens, [7, 7, 7])
    np.testing.assert_array_equal(workload.offered_rate_per_s, [1, 1, 1])
    assert workload.skipped_rows == {}


def test_traced_tenant(make_scenario: ScenarioBuilder, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(AZURE_ROWS)
    # The window of 30 s twice, and the first request of a third repetition.
    workload = Workload(make_scenario({"name": "x", **TRACED}, episode_s=69.0), tmp_path)
    stream = workload.sample(np.random.default_rng(0))
    np.testing.assert_allclose(stream.arrival_s, [0, 10, 20, 30, 40, 50, 60])
    np.testing.assert_array_equal(stream.output_tokens, [1, 2, 3, 1, 2, 3, 1])
    np.testing.assert_allclose(stream.service_s[:3], [0.7, 0.9, 1.1])
    assert workload.skipped_rows == {"x": 1}
    assert workload.offered_rate_per_s[0] == pytest.approx(7 / 69)
    assert workload.mean_output_tokens[0] == pytest.approx(13 / 7)
    assert workload.mean_service_s[0] == pytest.approx(stream.service_s.mean())


def test_missing_trace(make_scenario: ScenarioBuilder, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace t\.csv: not found: .*--trace-dir"):
        Workload(make_scenario({"name": "x", **TRACED}), tmp_path)


def test_too_many_requests_name_scenario_and_tenant(make_scenario: ScenarioBuilder) -> None:
    flood = {"process": "poisson", "rate_per_s": 1e5}
    with pytest.raises(ScenarioError, match=r"scenario test: tenants\.1\.arrivals: "):
        Workload(make_scenario({"name": "a"}, {"name": "b", "arrivals": flood}))


@pytest.mark.shared
def test_azure_like_is_like_azure(shared: Callable[[str], Path]) -> None:
    like = Workload(load_scenario("azure_like"))
    azure = Workload(load_scenario("azure"), shared("traces"))
    assert azure.skipped_rows == {"chat": 0, "code": 0}
    np.testing.assert_allclose(like.offered_rate_per_s, azure.offered_rate_per_s, rtol=0.002)
    np.testing.assert_allclose(like.mean_output_tokens, azure.mean_output_tokens, rtol=0.05)
    np.testing.assert_allclose(like.mean_service_s, azure.mean_service_s, rtol=0.05)
    for scenario, workload in (("azure", azure), ("azure_like", like)):
        slots = load_scenario(scenario).engine.max_num_seqs
        load = workload.offered_rate_per_s @ workload.mean_service_s / slots
        assert 0.75 < load < 0.85
    stream = azure.sample(np.random.default_rng(0))
    assert len(stream) == pytest.approx(1800 * azure.offered_rate_per_s.sum(), rel=0.25)
