"""What the robust controller makes of continuous batching: who harms whom, and by how much."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.agents.caps import Floats, Integers
from vllm_tenant_tuning.agents.demand_forecast import DemandForecast
from vllm_tenant_tuning.agents.robust_config import RobustConfig
from vllm_tenant_tuning.agents.signals import reading, slo_ratio
from vllm_tenant_tuning.engine import ContinuousBatchingEngine
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry


class DeadlineJudge:
    """Caps for an engine in which a long prompt holds up all that come after it.

    A tenant's deadline is the shortest of its patience and its promises of TTFT and latency. Who
    has a later deadline can wait at the gate, and must, where it harms one of an earlier:

    - **Harm** is what the earlier tenants lose by the reward's weights while a 99th percentile is
      beyond its SLO, or prompts waiting inside the engine that take a large share of the shortest
      promised TTFT. The later tenant's cap is cut to a part of what it has in flight, less deeply
      the smaller its share of the prompts' work and the more it loses itself; where its own SLO is
      missed by more, weighted, it is not cut but grows.
    - **Headroom** is what the earlier tenants' percentiles leave up to their SLOs: as much prompt
      work may be added in an interval.
    - **Quiet** is when the earlier tenants have far less queued and in flight than on average over
      the long window, as between bursts: what their window still shows is past, does no harm, and
      the cap grows faster.
    - **Room** bounds a cap, and a share of it is its floor: what the earlier tenants' rates, as
      forecast, leave of the GPU's time, by the profile's step-time law (`backends.sim.step_time`)
      and Little's law, and of the KV cache, there at their peak rates, since a cap takes nothing
      back.

    A tenant that has none before it gets `cap_max`. Without context nothing is known of deadlines,
    weights and forecasts: everyone is harmed by everyone, and there is no room to reckon.

    Args:
        config: of the controller.
        scenario: of the engine fidelity.
        demand: rates and service times, learned by whoever owns it.

    Attributes:
        harm: (n_tenants,) bool, whether those before it are harmed.
        headroom: (n_tenants,) bool, whether they leave headroom.
        caps: (n_tenants,) what is wanted.
    """

    def __init__(self, config: RobustConfig, scenario: Scenario, demand: DemandForecast) -> None:
        assert isinstance(scenario.engine, ContinuousBatchingEngine)
        n = scenario.n_tenants
        self._config, self._demand, self._scenario = config, demand, scenario
        self._keep = math.exp(-scenario.control.control_interval_s / config.window_s)
        self._law = scenario.engine.profile.step_time
        self._kv_tokens = (
            scenario.engine.num_gpu_blocks * scenario.engine.profile.kv_cache.block_size
        )
        self._first_token_s = np.array(
            [
                # where no TTFT is promised, a quarter of the latency stands for it
                min(tenant.slo_ttft_p99_s or math.inf, tenant.slo_latency_p99_s / 4)
                for tenant in scenario.tenants
            ]
        )
        tenants, reward = scenario.tenants, scenario.reward
        self._slo_weight = reward.w_slo * np.array([tenant.slo_weight for tenant in tenants])
        self._drop_weight = reward.w_drop * np.array([tenant.drop_weight for tenant in tenants])
        deadline_s = np.array(
            [
                min(
                    tenant.patience_s or math.inf,
                    tenant.slo_latency_p99_s,
                    tenant.slo_ttft_p99_s or math.inf,
                )
                for tenant in tenants
            ]
        )
        # (n, n): whether the second is to be protected from the first
        self._before = config.deadline_separation * deadline_s[None, :] < deadline_s[:, None]
        if not config.context:
            self._slo_weight, self._drop_weight = np.ones(n), np.ones(n)
            self._before = ~np.eye(n, dtype=np.bool_)
        self._tokens = np.zeros((4, n))  # admitted, their prompt's; completed, their output's
        self._lost, self._arrived = np.zeros(n), np.zeros(n)
        self._wait_s = np.zeros(n)
        self._mean_backlog = np.zeros(n)
        self.harm, self.headroom = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self.caps: Floats = np.zeros(0)

    def learn(self, telemetry: Telemetry, caps: Integers) -> None:
        """Take an interval in and judge.

        Args:
            telemetry: of the interval.
            caps: (n_tenants,) in force at first; later those wanted last are gone on from.
        """
        config, control, tenants = self._config, self._scenario.control, telemetry.tenants
        if not self.caps.size:
            self.caps = caps.astype(np.float64)
        in_flight = reading(tenants["in_flight"])
        backlog = in_flight + reading(tenants["queued"])
        prompt_s, kv_tokens = self._learn_requests(tenants)
        ratio = np.nan_to_num(slo_ratio(tenants, self._scenario))
        seen = reading(tenants["window_completions"])
        beyond = self._slo_weight * np.clip(ratio - 1, 0, 1)
        loss = beyond * seen / (seen + config.trusted_completions)
        own = beyond + self._drop_weight * self._lost / np.maximum(self._arrived, 1)
        work_s = prompt_s * in_flight
        share = work_s / max(float(work_s.sum()), 1e-9)
        waiting = float(reading(telemetry.cluster["num_requests_waiting"]))
        waiting_s = waiting * float(work_s.sum()) / max(float(in_flight.sum()), 1.0)
        room = self._room(prompt_s, kv_tokens)
        self._mean_backlog += (backlog - self._mean_backlog) * (1 - self._keep)
        self._wait_s -= control.control_interval_s

        for i, before in enumerate(self._before):
            if not before.any():
                self.caps[i] = control.cap_max
                continue
            usual = float(self._mean_backlog[before].sum())
            quiet = float(backlog[before].sum()) < config.quiet_share * usual
            theirs = 0.0 if quiet else float(loss[before].sum())
            first_token_s = float(self._first_token_s[before].min())
            queueing = waiting_s > config.waiting_share * first_token_s
            spare = config.headroom_ratio - float(ratio[before].max())
            worse = float(beyond[i]) > theirs
            self.harm[i] = (theirs > 0 and not worse) or queueing
            self.headroom[i] = not self.harm[i] and (spare > 0 or worse or quiet)
            cap = float(self.caps[i])
            if self.harm[i] and self._wait_s[i] <= 0:
                blame = float(share[i]) * (1.0 if queueing else theirs / (theirs + float(own[i])))
                cap = min(cap, max(float(in_flight[i]), 1.0)) * config.backoff**blame
                # the sliding window still shows what was before
                self._wait_s[i] = control.window_s / 2
            elif self.headroom[i] and backlog[i] >= cap:
                work = 0.5 * max(spare, 0.0) * first_token_s / max(float(prompt_s[i]), 1e-6)
                pace = config.expansion_per_s * (config.quiet_expansion if quiet else 1.0)
                cap += max(pace * control.control_interval_s, work)
            if math.isfinite(room[i]):
                cap = min(max(cap, config.least_room * float(room[i])), float(room[i]))
            self.caps[i] = min(max(cap, control.cap_min), control.cap_max)

    def _learn_requests(self, tenants: npt.NDArray[np.void]) -> tuple[Floats, Floats]:
        """Seconds of GPU that a tenant's mean prompt takes, and KV tokens that a request holds."""
        fields = ("admitted", "prompt_tokens", "completed", "output_tokens")
        self._tokens += [reading(tenants[field]) for field in fields]
        admitted, prompt_tokens, completed, output_tokens = self._tokens
        lost = reading(tenants["dropped"]) + reading(tenants["failed"])
        self._lost = self._lost * self._keep + lost
        self._arrived = self._arrived * self._keep + reading(tenants["arrived"])
        prompt = prompt_tokens / np.maximum(admitted, 1)
        output = output_tokens / np.maximum(completed, 1)
        return self._law.prompt_ms(prompt) / 1000, prompt + output / 2

    def _room(self, prompt_s: Floats, kv_tokens: Floats) -> Floats:
        """(n_tenants,) requests beside which those before them keep their share; inf: unknown."""
        config = self._config
        service_s, rate_per_s = self._demand.service_s, self._demand.rate_per_s
        room = np.full(service_s.size, math.inf)
        if not config.context:
            return room
        known = (self._tokens[2] > 0) & (service_s > 0) & (prompt_s > 0)
        gpu = self._before @ (rate_per_s * prompt_s)
        kv = self._before @ (self._demand.peak_per_s * service_s * kv_tokens)
        requests = np.maximum(config.gpu_share - gpu, 0) * service_s / np.where(known, prompt_s, 1)
        held = np.maximum(config.kv_share * self._kv_tokens - kv, 0) / np.maximum(kv_tokens, 1)
        room[known] = np.minimum(requests, held)[known]
        return room
