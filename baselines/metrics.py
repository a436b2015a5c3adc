"""What tables show of episodes, and what is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A number of an episode's record.

    Attributes:
        field: its name in `EpisodeRecord`.
        title: how tables call it, unit included.
        better: which way is better.
        meaning: its definition, in a sentence.
    """

    field: str
    title: str
    better: Literal["higher", "lower"]
    meaning: str


METRICS = (
    Metric("return_", "return", "higher", "Sum of the rewards of an episode."),
    Metric(
        "goodput_rps",
        "goodput, req/s",
        "higher",
        "Requests completed within all of their tenant's SLOs, per second.",
    ),
    Metric("throughput_rps", "throughput, req/s", "higher", "Requests completed, per second."),
    Metric(
        "drops",
        "drops, requests",
        "lower",
        "Requests dropped at the gate in an episode: their patience was over, or the bounded "
        "queue was full.",
    ),
    Metric(
        "weighted_drops",
        "weighted drops",
        "lower",
        "Drops, each times its tenant's drop weight.",
    ),
    Metric(
        "latency_p99_s",
        "p99 latency, s",
        "lower",
        "99th percentile over all completions of an episode (numpy.percentile), from the arrival "
        "at the gate to the last token.",
    ),
    Metric(
        "cost",
        "held capacity",
        "lower",
        "Time average of the requests in flight over max_num_seqs.",
    ),
)
"""What tables show, in order."""

TOKEN_METRICS = (
    Metric(
        "ttft_p99_s",
        "p99 TTFT, s",
        "lower",
        "99th percentile over all first tokens of an episode, from the arrival at the gate.",
    ),
    Metric(
        "tpot_p99_s",
        "p99 TPOT, s",
        "lower",
        "99th percentile over all completions of a request's mean inter-token latency.",
    ),
    Metric("preemptions", "preemptions", "lower", "Of running requests, in an episode."),
    Metric(
        "usd_per_1000_good",
        "USD per 1000 good requests",
        "lower",
        "The GPU's assumed price over the episode, for a thousand requests that met their SLOs.",
    ),
    Metric(
        "usd_per_million_tokens",
        "USD per million tokens",
        "lower",
        "The same for a million output tokens.",
    ),
    Metric("energy_j", "energy, J", "lower", "Drawn by the GPU in an episode."),
)
"""What tables show after these where the records have it: the engine has tokens, the scenario
assumes a price, the profile knows the power."""

FAIRNESS = Metric(
    "jain_fairness",
    "Jain's index",
    "higher",
    "Jain's index of the shares of their requests that the tenants had completed; 1 is even.",
)

TESTED = ("return_", "goodput_rps", "weighted_drops", "latency_p99_s")
"""What is tested against the reference; Holm's correction runs over all of these."""
