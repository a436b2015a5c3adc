"""Beside a real vLLM server with a saturated KV cache (LLMServingSim's RTX 4090 record)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_tenant_tuning.profile import load_profile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rtx4090_saturated_cache.py"


@pytest.fixture(scope="module")
def benchmark_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rtx4090_saturated_cache", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.shared
def test_what_was_not_fitted_is_predicted(
    benchmark_script: ModuleType, shared: Callable[[str], Path]
) -> None:
    record = benchmark_script.read_record(shared("rtx4090"))
    found = benchmark_script.compare(record, load_profile("rtx4090-8b"))
    assert found["held_out_requests"] == 150
    assert found["same_scheduling_order"]
    # of requests that wait 65 s on average and finish within 184 s
    assert found["mean_error_scheduled_s"] < 2.0
    assert found["mean_error_first_token_s"] < 2.0
    assert found["mean_error_last_token_s"] < 2.0
    assert found["makespan_simulated_s"] == pytest.approx(found["makespan_record_s"], rel=0.01)
    assert found["running"]["mean_absolute_error"] < 2.0
    assert found["waiting"]["mean_absolute_error"] < 4.0
    assert found["kv_cache_usage"]["mean_absolute_error"] < 0.03
    for series in ("running", "waiting", "kv_cache_usage"):
        assert found[series]["correlation"] > 0.95
    # the cache overflows in both; a record of running requests proves only some preemptions
    assert found["preemptions_simulated"] >= found["fewest_preemptions_simulated"] > 0
    assert found["fewest_preemptions_simulated"] == pytest.approx(
        found["fewest_preemptions_record"], rel=0.3
    )


@pytest.mark.shared
def test_the_packaged_profile_is_the_fit(
    benchmark_script: ModuleType, shared: Callable[[str], Path]
) -> None:
    record = benchmark_script.read_record(shared("rtx4090"))
    assert benchmark_script.profile_of(benchmark_script.fit(record)) == load_profile("rtx4090-8b")
