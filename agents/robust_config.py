"""Parameters of the robust controller, and which of the four requirements it meets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vllm_tenant_tuning.agents.threshold import WindowP99Thresholds

REQUIREMENTS = ("signal", "scope", "asymmetry", "context")
"""The study's four, in the order in which an ablation adds them."""


@dataclass(frozen=True)
class RobustConfig:
    """Parameters of `RobustPolicy`; those marked tuned were chosen on training seeds."""

    signal: bool = True
    """Requirement 1: congestion as a confidence bound over long windows, against what the engine
    does unloaded; of continuous batching, harm to SLOs and prompts waiting inside. Off: the naive
    rule's p99 of the sliding window against 6 s, and occupancy."""

    scope: bool = True
    """Requirement 2: each tenant by itself. Off: all caps move together."""

    asymmetry: bool = True
    """Requirement 3: expand on need, take only what others need or what congestion demands. Off:
    one up below the lower threshold, one down above the upper one."""

    context: bool = True
    """Requirement 4: SLA weights, bursts and the forecast of arrivals. Off: the present backlog,
    all tenants alike."""

    window_s: float = 60.0
    """The longest window of congestion, violations, rates and service times."""

    confidence: float = 2.0
    """Standard errors by which an estimate must be past its threshold."""

    slowdown_tolerance: float = 1.1
    """How many times slower than unloaded a token may come before concurrency is in question."""

    allowed_violations: float = 0.01
    """Share of requests beyond their SLOs that a promised 99th percentile allows."""

    queue_depth_threshold: float = 5.0
    """Requests waiting inside the engine, on average, that show a full KV cache (llm-d's)."""

    backoff_exponent: float = 0.3
    """The budget after congestion: what ran, over the slowdown to this power (tuned)."""

    growth: float = 0.05
    """Share by which an exhausted budget grows in an interval, at least one request."""

    probe_s: float = 6.0
    """For so long the budget stays below the level that was last congested (tuned)."""

    burst_window_s: float = 15.0
    """Longest of the recent windows in which a change of the arrival rate is looked for."""

    burst_deviations: float = 2.5
    """Standard deviations, of a likelihood ratio test, that make a change (tuned)."""

    peak_memory_s: float = 600.0
    """Time constant with which a tenant's peak rate is forgotten."""

    horizon: float = 2.0
    """Intervals ahead for which a tenant's bursts are expected (tuned)."""

    urgency: float = 3.0
    """Worth of a slot to a request that waits now, in requests of the next interval (tuned)."""

    deadline_separation: float = 1.5
    """Continuous batching: so many times later is the deadline of who can wait for another."""

    backoff: float = 0.4
    """What a cap is multiplied with when all harm is its tenant's and it loses nothing (tuned)."""

    headroom_ratio: float = 0.7
    """Caps grow while percentiles of those before are below this share of their SLOs (tuned)."""

    expansion_per_s: float = 0.4
    """Requests in a second by which a cap grows at least while there is headroom (tuned)."""

    quiet_share: float = 0.4
    """Below this share of their mean backlog those before are quiet (tuned)."""

    quiet_expansion: float = 2.0
    """So many times faster a cap grows at least while they are (tuned)."""

    waiting_share: float = 0.5
    """Prompts waiting in the engine for this share of the shortest promised TTFT are harm."""

    trusted_completions: float = 3.0
    """Completions of the sliding window at which its 99th percentile is trusted by half."""

    gpu_share: float = 0.9
    """Share of the GPU's time that prompts may take together."""

    kv_share: float = 0.95
    """Share of the KV cache that may be taken."""

    least_room: float = 0.12
    """Share of the room left that a cap keeps whatever the harm (tuned)."""

    thresholds: WindowP99Thresholds = field(default_factory=WindowP99Thresholds)
    """The naive rule's, in place of the first and third requirement where they are off."""


def parse_requirements(text: str) -> RobustConfig:
    """The configuration without the requirements that `-NAME-NAME...` names.

    Raises:
        ValueError: not of that form, or an unknown requirement.
    """
    first, *names = text.split("-")
    if first or not names or not set(names) <= set(REQUIREMENTS) or len(set(names)) < len(names):
        raise ValueError(
            f"policy 'robust:{text}': accepted are the requirements to leave out, each once after "
            f"a minus, such as robust:-signal-context; they are {', '.join(REQUIREMENTS)}"
        )
    without: dict[str, Any] = dict.fromkeys(names, False)
    return replace(RobustConfig(), **without)
