"""What is read from `/metrics` and NVML, and what is not believed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_server import metrics_page

from vllm_tenant_tuning.backends.live.gpu import GPUMonitor
from vllm_tenant_tuning.backends.live.metrics import (
    MetricsError,
    Scrape,
    ServerMetrics,
    parse_metrics,
)


def test_a_page_of_vllm_0_32(shared: Callable[[str], Path]) -> None:
    scrape = parse_metrics(shared("vllm/metrics-sample-0.32.0.txt").read_text())
    assert scrape.values == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage": 0,
        "preemptions": 0,
        "prompt_tokens": 9728,
        "generation_tokens": 6417,
        "prefix_queries": 9728,
        "prefix_hits": 2688,
        "queue_time_s": pytest.approx(22.5497378640066),
        "queue_time_requests": 95,
        "prefill_time_s": pytest.approx(8.997445260999484),
        "prefill_time_requests": 95,
        "ttft_s": pytest.approx(35.5706205368042),
        "api_cpu_s": pytest.approx(8.43),
    }
    assert (scrape.num_gpu_blocks, scrape.block_size) == (1024, 128)


def test_engines_are_summed_and_older_names_known() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}"}} {3 + engine}\n'
        f'vllm:num_requests_waiting{{engine="{engine}"}} 1\n'
        f'vllm:gpu_cache_usage_perc{{engine="{engine}"}} 0.{2 + 2 * engine}\n'
        f'vllm:num_preemptions{{engine="{engine}"}} 5\n'
        f'vllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="100"}} 1\n'
        for engine in range(2)
    )
    scrape = parse_metrics(page)
    assert scrape.values == {
        "num_requests_running": 7,
        "num_requests_waiting": 2,
        "kv_cache_usage": pytest.approx(0.3),
        "preemptions": 10,
    }
    assert scrape.num_gpu_blocks == 200


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html></html>",
        "vllm:num_requests_running{ 3\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running many\nvllm:num_requests_waiting 0\n",
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n",
        metrics_page() + 'vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1\n',
    ],
)
def test_other_pages_are_refused(page: str) -> None:
    with pytest.raises(MetricsError, match="/metrics"):
        parse_metrics(page)


def scrape(**values: float) -> Scrape:
    return parse_metrics(metrics_page(**values))


def test_growth_is_of_the_interval() -> None:
    metrics = ServerMetrics(believed_for_s=3.0)
    metrics.add(scrape(generation_tokens_total=100, num_requests_running=2), 0.0)
    metrics.take(0.0)
    metrics.add(scrape(generation_tokens_total=130, num_requests_running=4), 1.0)
    metrics.add(scrape(generation_tokens_total=180, num_requests_running=8), 2.0)
    readings = metrics.take(3.0)
    assert readings.growth["generation_tokens"] == 80
    assert readings.gauges["num_requests_running"] == 8
    assert readings.mean_running == 6
    assert readings.age_s == 1.0
    assert metrics.totals["generation_tokens"] == 80


def test_frozen_gauges_after_a_mass_abort_are_stale() -> None:
    metrics = ServerMetrics(believed_for_s=3.0)
    busy = {"num_requests_running": 8, "kv_cache_usage_perc": 0.9}
    metrics.add(scrape(generation_tokens_total=10, **busy), 0.0)
    metrics.add(scrape(generation_tokens_total=50, **busy), 1.0)
    for second in range(2, 7):
        metrics.add(scrape(generation_tokens_total=50, **busy), float(second))
    readings = metrics.take(6.0)
    assert math.isnan(readings.gauges["kv_cache_usage"])
    assert math.isnan(readings.gauges["num_requests_running"])
    assert readings.gauges["num_requests_waiting"] == 0  # zero is believed
    assert readings.stale == ["num_requests_running", "kv_cache_usage"]
    # the engine steps again
    metrics.add(scrape(generation_tokens_total=51, num_requests_running=1), 7.0)
    readings = metrics.take(7.0)
    assert readings.stale == []
    assert readings.gauges["num_requests_running"] == 1


def test_an_old_page_is_not_used_again() -> None:
    metrics = ServerMetrics(believed_for_s=3.0)
    metrics.add(scrape(), 0.0)
    metrics.take(0.0)
    metrics.fail("/metrics: no answer within 2 s")
    readings = metrics.take(4.0)
    assert all(math.isnan(value) for value in readings.gauges.values())
    assert all(math.isnan(value) for value in readings.growth.values())
    assert math.isnan(readings.mean_running)
    assert readings.age_s == 4.0
    assert readings.problem == "/metrics: no answer within 2 s"


def test_a_restart_is_noticed_and_counts_from_zero() -> None:
    metrics = ServerMetrics(believed_for_s=3.0)
    metrics.add(scrape(generation_tokens_total=500, prompt_tokens_total=900), 0.0)
    metrics.add(scrape(generation_tokens_total=20, prompt_tokens_total=30), 1.0)
    readings = metrics.take(1.0)
    assert metrics.restarts == 1
    assert readings.growth["generation_tokens"] == 20
    assert readings.growth["prompt_tokens"] == 30


class NVML:
    """NVML's functions, some of which refuse."""

    def __init__(self, *refused: str) -> None:
        self._refused = refused
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=30, total=120),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetTotalEnergyConsumption": 7_000,
        }

        def call(*_: object) -> Any:
            self.calls.append(name)
            if name in self._refused:
                raise RuntimeError("Not Supported")
            return answers.get(name, "a handle")

        return call


def test_nvml_readings() -> None:
    reading = GPUMonitor(0, NVML()).read()
    assert (reading.memory_utilization, reading.utilization) == (0.25, 0.5)
    assert (reading.power_w, reading.energy_j) == (350.0, 7.0)


def test_each_refusal_is_unavailable_alone_and_asked_once() -> None:
    nvml = NVML("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTotalEnergyConsumption")
    monitor = GPUMonitor(0, nvml)
    for _ in range(3):
        reading = monitor.read()
    assert (reading.memory_utilization, reading.power_w) == (0.25, 350.0)
    assert math.isnan(reading.utilization)
    assert math.isnan(reading.energy_j)
    assert set(monitor.unavailable) == {"utilization", "energy_j"}
    assert nvml.calls.count("nvmlDeviceGetUtilizationRates") == 1
    assert nvml.calls.count("nvmlDeviceGetPowerUsage") == 3


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_no_gpu_at_all(refused: str) -> None:
    monitor = GPUMonitor(0, NVML(refused))
    assert math.isnan(monitor.read().memory_utilization)
    assert "Not Supported" in monitor.unavailable["power_w"]
    monitor.close()
