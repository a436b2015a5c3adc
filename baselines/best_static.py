"""The best static caps of a scenario, chosen on training seeds: what control has to beat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.vector import VLLMTenantTuningVectorEnv

TRAINING_SEEDS = range(10_000, 10_020)
"""Seeds of the choice, away from the evaluation's."""

MAX_GRID = 1024
"""Up to this many combinations of caps the whole grid is tried. Beyond it caps are first taken
from 1, 2, 3, 4, 6, 8, 12, 16, ..., and then, tenant by tenant, between the neighbours of the best;
where even these are too many combinations, one tenant's cap is changed after another, from equal
caps, until no change of one cap improves the mean return."""

REFINED = 7
"""Caps that are tried between two of the coarse ones."""

CLUSTERS_AT_ONCE = 512


@dataclass(frozen=True)
class BestStatic:
    """What the search found.

    Attributes:
        caps: the caps of the highest mean return; of equals, the smallest sum.
        mean_return: over the training seeds.
        tried: mean return of every combination that was tried.
    """

    caps: tuple[int, ...]
    mean_return: float
    tried: dict[tuple[int, ...], float]


def find_best_static(
    scenario: Scenario,
    seeds: Sequence[int] = TRAINING_SEEDS,
    trace_dir: str | Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> BestStatic:
    """Search the caps that, never changed, give the highest mean return.

    Args:
        scenario: the task.
        seeds: the same for every combination.
        trace_dir: the folder of the trace files.
        on_progress: called with (combinations tried, combinations known to be tried); what is
            tried next may depend on them.
    """
    control = scenario.control
    every = list(range(control.cap_min, control.cap_max + 1))
    levels = every if len(every) ** scenario.n_tenants <= MAX_GRID else _levels(every)
    tried: dict[tuple[int, ...], float] = {}

    def try_all(candidates: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        candidates = [caps for caps in candidates if sum(caps) <= scenario.total_cap]
        new = [caps for caps in dict.fromkeys(candidates) if caps not in tried]
        n_before = len(tried)

        def on_episodes(played: int) -> None:
            if on_progress is not None:
                on_progress(n_before + played // len(seeds), n_before + len(new))

        means = _mean_returns(scenario, new, seeds, trace_dir, on_episodes)
        tried.update(zip(new, means, strict=True))
        return max(candidates, key=lambda caps: (tried[caps], -sum(caps)))

    def try_one(best: tuple[int, ...], tenant: int, caps: Sequence[int]) -> tuple[int, ...]:
        return try_all([best, *((*best[:tenant], cap, *best[tenant + 1 :]) for cap in caps)])

    if len(levels) ** scenario.n_tenants <= MAX_GRID:
        best = try_all(list(itertools.product(levels, repeat=scenario.n_tenants)))
    else:
        best = try_all([(cap,) * scenario.n_tenants for cap in levels])
        before = None
        while best != before:
            before = best
            for tenant in range(scenario.n_tenants):
                best = try_one(best, tenant, levels)
    if levels != every:
        for tenant in range(scenario.n_tenants):
            best = try_one(best, tenant, _between(levels, best[tenant]))
    return BestStatic(best, tried[best], tried)


def _levels(every: list[int]) -> list[int]:
    """Of these consecutive caps the first, the last, powers of two and half-way between them."""
    coarse = {every[0], every[-1], *(1 << i for i in range(13)), *(3 << i for i in range(12))}
    return [cap for cap in every if cap in coarse]


def _between(levels: list[int], cap: int) -> list[int]:
    """Caps spread between the neighbours of one of the levels."""
    i = levels.index(cap)
    low, high = levels[max(i - 1, 0)], levels[min(i + 1, len(levels) - 1)]
    spread = np.rint(np.linspace(low, high, REFINED + 2)).astype(int).tolist()
    return [each for each in spread if low < each < high]


def _mean_returns(
    scenario: Scenario,
    candidates: Sequence[tuple[int, ...]],
    seeds: Sequence[int],
    trace_dir: str | Path | None,
    on_episodes: Callable[[int], None],
) -> list[float]:
    """Mean return of each combination of caps over the seeds; `on_episodes` hears how many ran."""
    episodes = [(caps, seed) for caps in candidates for seed in seeds]
    returns: list[npt.NDArray[np.float64]] = []
    for batch in _batches(episodes, CLUSTERS_AT_ONCE):
        env = VLLMTenantTuningVectorEnv(len(batch), scenario, trace_dir=trace_dir)
        env.reset(
            seed=[seed for _, seed in batch],
            options={"caps": np.array([caps for caps, _ in batch])},
        )
        hold = np.full(env.action_space.shape or (), scenario.control.max_delta)
        total = np.zeros(len(batch))
        for _ in range(scenario.control.n_steps):
            total += env.step(hold)[1]
        env.close()
        returns.append(total)
        on_episodes(sum(map(len, returns)))
    if not returns:
        return []
    means: list[float] = (
        np.concatenate(returns).reshape(len(candidates), len(seeds)).mean(axis=1).tolist()
    )
    return means


def _batches(
    episodes: list[tuple[tuple[int, ...], int]], size: int
) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    for i in range(0, len(episodes), size):
        yield episodes[i : i + size]
