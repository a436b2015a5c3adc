"""What an agent's decisions came to in one episode: counts, tokens, money, time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from vllm_tenant_tuning.agents.llm.answer import read_usage
from vllm_tenant_tuning.agents.llm.config import LLMConfig
from vllm_tenant_tuning.agents.llm.transcript import Decision


class Accounting:
    """Adds up the decisions of one episode.

    Args:
        config: gives the prices.
    """

    def __init__(self, config: LLMConfig) -> None:
        self._config = config
        self._latencies_s: list[float] = []
        self._failures: Counter[str] = Counter()
        self._answered = self._attempts = self._retries = 0
        self._prompt_tokens = self._completion_tokens = self._unreported = 0
        self.applied = 0

    def add(self, decision: Decision) -> None:
        """Count a decision and its attempts."""
        self._latencies_s.append(decision.latency_s)
        self._answered += decision.deltas is not None
        self._attempts += len(decision.attempts)
        self._retries += max(0, len(decision.attempts) - 1)
        self._failures.update(str(failure) for failure in decision.failures if failure is not None)
        for attempt in decision.attempts:
            usage = read_usage(attempt.body)
            if usage is None:
                self._unreported += 1
            else:
                self._prompt_tokens += usage.prompt_tokens
                self._completion_tokens += usage.completion_tokens

    def summary(self) -> dict[str, Any]:
        """The fields of a `DecisionRecord`; see there."""
        latencies = self._latencies_s
        values = np.percentile(latencies, [50, 95, 99, 100]) if latencies else [None] * 4
        names = ("latency_p50_s", "latency_p95_s", "latency_p99_s", "latency_max_s")
        return {
            "model": self._config.model,
            "decisions": len(latencies),
            "answered": self._answered,
            "held": len(latencies) - self._answered,
            "applied": self.applied,
            "attempts": self._attempts,
            "retries": self._retries,
            "failures": dict(sorted(self._failures.items())),
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "unreported": self._unreported,
            "cost_usd": self._cost_usd(),
            **{
                name: None if value is None else float(value)
                for name, value in zip(names, values, strict=True)
            },
        }

    def _cost_usd(self) -> float | None:
        prompt = self._config.price_per_million_prompt_tokens_usd
        completion = self._config.price_per_million_completion_tokens_usd
        if prompt is None or completion is None:
            return None
        return (prompt * self._prompt_tokens + completion * self._completion_tokens) / 1e6
