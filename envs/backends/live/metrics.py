"""What vLLM's `/metrics` page says, and how far it can be believed.

The page has no tenant in it, and its gauges move only when the engine steps: after a mass abort
they can stay at 90 % for ever. A gauge is believed only while a token counter moves, or when it
reads zero; a page that could not be read is never replaced by the one before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

GAUGES = {
    "num_requests_running": ("vllm:num_requests_running",),
    "num_requests_waiting": ("vllm:num_requests_waiting",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
"""Readings of a moment, each with vLLM's name for it today and those of older versions."""

COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "queue_time_s": ("vllm:request_queue_time_seconds_sum",),
    "queue_time_requests": ("vllm:request_queue_time_seconds_count",),
    "prefill_time_s": ("vllm:request_prefill_time_seconds_sum",),
    "prefill_time_requests": ("vllm:request_prefill_time_seconds_count",),
    "ttft_s": ("vllm:time_to_first_token_seconds_sum",),
    "api_cpu_s": ("process_cpu_seconds_total",),
}
"""Readings that only grow while the server lives, likewise; `api_cpu_s` is the API server's."""

CACHE_CONFIG = "vllm:cache_config_info"

_NAMES = {
    name: (reading, age)
    for table in (GAUGES, COUNTERS)
    for reading, names in table.items()
    for age, name in enumerate(names)
}
# Parsing all of a page's histograms would hold up the event loop for ten milliseconds.
_PREFIXES = tuple(f"{name}{follows}" for name in (*_NAMES, CACHE_CONFIG) for follows in "{ ")


class MetricsError(ValueError):
    """A `/metrics` page that cannot be read, or that is not vLLM's."""


@dataclass(frozen=True)
class Scrape:
    """One page.

    Attributes:
        values: by the names of `GAUGES` and `COUNTERS`, summed over the server's engines
            (`kv_cache_usage`: their mean); what the page lacks is left out.
        num_gpu_blocks: blocks of the KV cache over all engines; None where the page does not say.
        block_size: tokens in a block; likewise.
    """

    values: dict[str, float]
    num_gpu_blocks: int | None = None
    block_size: int | None = None


def parse_metrics(page: str) -> Scrape:
    """Read a page.

    Raises:
        MetricsError: not the Prometheus text format, or without vLLM's running and waiting.
    """
    lines = [line for line in page.splitlines() if line.startswith(_PREFIXES)]
    found: dict[str, dict[int, list[float]]] = {}
    blocks: list[int] = []
    block_size = None
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name == CACHE_CONFIG:
                    blocks.append(int(sample.labels["num_gpu_blocks"]))
                    block_size = int(sample.labels["block_size"])
                elif sample.name in _NAMES:
                    reading, age = _NAMES[sample.name]
                    found.setdefault(reading, {}).setdefault(age, []).append(sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"/metrics: not readable: {error}") from error
    values = {}
    for reading, by_age in found.items():
        engines = by_age[min(by_age)]
        values[reading] = sum(engines)
        if reading == "kv_cache_usage":
            values[reading] /= len(engines)
    if "num_requests_running" not in values or "num_requests_waiting" not in values:
        raise MetricsError(
            "/metrics: no vllm:num_requests_running and vllm:num_requests_waiting in it"
        )
    if any(math.isnan(value) for value in values.values()):
        raise MetricsError("/metrics: a reading is NaN")
    return Scrape(values, sum(blocks) or None, block_size)


@dataclass
class Readings:
    """What the pages of one control interval showed; NaN where they cannot be believed.

    Attributes:
        gauges: by the names of `GAUGES`.
        growth: by the names of `COUNTERS`, during the interval.
        mean_running: mean of `num_requests_running` over the interval's pages.
        age_s: time since the last page that could be read; inf without one.
        stale: the gauges that were read and not believed.
        problem: why the last page could not be read; empty if it could.
    """

    gauges: dict[str, float]
    growth: dict[str, float]
    mean_running: float
    age_s: float
    stale: list[str]
    problem: str


@dataclass
class ServerMetrics:
    """Follows a server's pages through an episode.

    Attributes:
        believed_for_s: how long a page, and a gauge after the last token, is believed.
        restarts: how often a counter went back.
        moved_s: when a token counter last moved.
        latest: the last page that could be read, believed or not.
        latest_s: when it was read.
        problem: why the page after it could not be read; empty if there is none.
        totals: growth of the counters since the start of the episode.
    """

    believed_for_s: float
    restarts: int = 0
    moved_s: float = -math.inf
    latest: Scrape | None = None
    latest_s: float = -math.inf
    problem: str = ""
    totals: dict[str, float] = field(default_factory=dict)
    _growth: dict[str, float] = field(default_factory=dict)
    _running: list[float] = field(default_factory=list)

    def add(self, scrape: Scrape, now_s: float) -> None:
        """Take a page that was read at `now_s`."""
        before = self.latest.values if self.latest else None
        after = scrape.values
        if before is not None:
            counters = [name for name in COUNTERS if name in before and name in after]
            restarted = any(after[name] < before[name] for name in counters)
            self.restarts += restarted
            for name in counters:
                growth = after[name] - (0.0 if restarted else before[name])
                self._growth[name] = self._growth.get(name, 0.0) + growth
                self.totals[name] = self.totals.get(name, 0.0) + growth
                if growth > 0 and name in ("prompt_tokens", "generation_tokens"):
                    self.moved_s = now_s
        self.latest, self.latest_s, self.problem = scrape, now_s, ""
        if self._believed("num_requests_running", now_s):
            self._running.append(after["num_requests_running"])

    def fail(self, problem: str) -> None:
        """Note that a page could not be read, and why."""
        self.problem = problem

    def take(self, now_s: float) -> Readings:
        """The readings of the interval that ends at `now_s`; the next one begins."""
        gauges = dict.fromkeys(GAUGES, math.nan)
        stale = []
        for name in GAUGES:
            if self._believed(name, now_s):
                assert self.latest is not None
                gauges[name] = self.latest.values[name]
            elif self.latest is not None and name in self.latest.values:
                stale.append(name)
        readings = Readings(
            gauges=gauges,
            growth={name: self._growth.get(name, math.nan) for name in COUNTERS},
            mean_running=sum(self._running) / len(self._running) if self._running else math.nan,
            age_s=now_s - self.latest_s,
            stale=stale,
            problem=self.problem,
        )
        self._growth = {}
        self._running = []
        return readings

    def _believed(self, gauge: str, now_s: float) -> bool:
        if self.latest is None or now_s - self.latest_s > self.believed_for_s:
            return False
        value = self.latest.values.get(gauge)
        if value is None:
            return False
        return value == 0 or now_s - self.moved_s <= self.believed_for_s
