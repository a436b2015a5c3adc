"""The simulated side of `validate`: an episode as the profile has it, and at another pace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
from scipy.optimize import brentq

import vllm_tenant_tuning  # noqa: F401  (registers the environment)
from vllm_tenant_tuning.backends import RequestOutcomes
from vllm_tenant_tuning.baselines.validation_measures import QUANTILES, Episode
from vllm_tenant_tuning.scenario import Scenario

PACES: Final = (0.25, 4.0)
"""Least and most factor on the step times that is looked for."""


def play_sim(scenario: Scenario, caps: Sequence[int], seed: int) -> Episode:
    """The episode in simulation, under constant caps."""
    control = scenario.control
    # one window over all: its histogram is the episode's
    whole = control.model_copy(update={"window_s": control.episode_s})
    env = gym.make("VLLMTenantTuning-v0", scenario=scenario.model_copy(update={"control": whole}))
    info = hold(env, scenario, caps, seed)
    inner: Any = env.unwrapped
    tenants = info["telemetry"].tenants
    itl_s = [{q: float(tenant[f"itl_{q}_s"]) for q in QUANTILES} for tenant in tenants]
    outcomes = inner.outcomes()
    env.close()
    nothing = dict.fromkeys(QUANTILES, math.nan)
    return Episode(outcomes, [*itl_s, nothing])


def find_pace(
    scenario: Scenario, caps: Sequence[int], seed: int, measured: RequestOutcomes
) -> tuple[float, Episode]:
    """How much slower than the profile a server was in an episode, and the episode at that pace.

    A shared machine changes its speed by more than a model should err. One factor on all step
    times, found so that the mean TPOT of the completed requests is the measured one, takes that
    out: what then still differs in TTFT and latency is not the machine's pace.

    Args:
        scenario: the task, on the profile.
        caps: constant, one for each tenant.
        seed: of the requests.
        measured: the live episode's outcomes.

    Returns:
        The factor, within `PACES`, and the simulated episode; 1 where nothing completed that has
        two tokens.
    """
    target_s = _mean_tpot_s(measured)

    def play(pace: float) -> Episode:
        return play_sim(_at_pace(scenario, pace), caps, seed)

    def error_s(log_pace: float) -> float:
        mean_s = _mean_tpot_s(play(math.exp(log_pace)).outcomes)
        return (math.inf if math.isnan(mean_s) else mean_s) - target_s

    low, high = map(math.log, PACES)
    if math.isnan(target_s) or error_s(low) > 0:
        pace = 1.0 if math.isnan(target_s) else PACES[0]
    elif error_s(high) < 0:
        pace = PACES[1]
    else:
        pace = math.exp(brentq(error_s, low, high, xtol=1e-3))
    return round(pace, 3), play(round(pace, 3))


def hold(env: gym.Env[Any, Any], scenario: Scenario, caps: Sequence[int], seed: int) -> Any:
    """Play an episode under constant caps; returns the last step's info."""
    hold = np.full(scenario.n_tenants, scenario.control.max_delta)
    env.reset(seed=seed, options={"caps": list(caps)})
    truncated = False
    while not truncated:
        _, _, _, truncated, info = env.step(hold)
    return info


def _at_pace(scenario: Scenario, factor: float) -> Scenario:
    content = scenario.model_dump()
    law = content["engine"]["profile"]["step_time"]
    content["engine"]["profile"]["step_time"] = {name: factor * law[name] for name in law}
    return Scenario.model_validate(content)


def _mean_tpot_s(outcomes: RequestOutcomes) -> float:
    tpot_s = outcomes.tpot_s
    known = tpot_s[~np.isnan(tpot_s)]
    return float(known.mean()) if known.size else math.nan
