"""A token bucket: a sustained share for each tenant, and credit for bursts.

Source: the token bucket of traffic shaping (Turner, New directions in communications, 1986; RFC
2697), with the credit scheme of burstable cloud instances (AWS EC2 CPU credits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import CapPolicy, Integers
from vllm_tenant_tuning.agents.quotas import QuotaConfig, QuotaPolicy
from vllm_tenant_tuning.agents.signals import reading
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


@dataclass(frozen=True)
class TokenBucketConfig:
    """Parameters of `TokenBucketPolicy` (our choice; no source names them for LLM serving)."""

    burst_s: float = 60.0
    """Size of the bucket: so many seconds of the tenant's sustained rate."""


class TokenBucketPolicy(CapPolicy):
    """A tenant with credit may use any cap, without credit its sustained share.

    A token is one request in flight for one second; every tenant earns its nominal quota of them
    (`QuotaPolicy`) each second and pays for what it has in flight. A bucket starts full. A rate in
    requests or tokens per second would need a number that no scenario promises; a share of the
    pool needs none. Assumes that bursts are short against `burst_s`, and looks at no server.
    """

    def __init__(self, config: TokenBucketConfig | None = None) -> None:
        self.config = config or TokenBucketConfig()
        self.name = "token_bucket"

    def start(self, scenario: Scenario, rng: np.random.Generator) -> None:
        """Fill the buckets."""
        quotas = QuotaPolicy(QuotaConfig())
        quotas.start(scenario, rng)
        self._rate = quotas.nominal.astype(np.float64)
        self._size = self._rate * self.config.burst_s
        self._credit = self._size.copy()

    def wanted_caps(self, telemetry: Telemetry, caps: Integers) -> npt.ArrayLike:
        """Earn, pay, and look whether anything is left."""
        control = self._scenario.control
        used = reading(telemetry.tenants["mean_in_flight"])
        earned = (self._rate - used) * control.control_interval_s
        self._credit = np.clip(self._credit + earned, 0.0, self._size)
        return np.where(self._credit > 0, control.cap_max, self._rate)
