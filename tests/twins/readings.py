"""What all twins share: how readings are taken, and how they are held against a backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.backends.sim.clusters import SimulatedClusters
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import RequestStream

NAN = float("nan")

Choose = Callable[[Sequence[Any]], Any]


class Twin(Protocol):
    """One cluster in plain Python."""

    OUTCOME_FIELDS: tuple[str, ...]

    def reset(self, stream: RequestStream, caps: Sequence[int]) -> dict[str, Any]: ...

    def advance(self, caps: Sequence[int]) -> dict[str, Any]: ...

    def outcomes(self) -> list[tuple[float, ...]]: ...


@dataclass(frozen=True)
class Case:
    """A scenario and what to do with its clusters: `(cluster, stream, caps)` resets one,
    `(caps, active)` advances all that are active."""

    scenario: Scenario
    n_clusters: int
    script: list[tuple[Any, ...]]


def seeded(seed: int) -> Choose:
    rng = np.random.default_rng(seed)
    return lambda options: options[int(rng.integers(len(options)))]


def step(backend: SimulatedClusters, event: tuple[Any, ...]) -> None:
    if len(event) == 3:
        cluster, stream, caps = event
        backend.reset(cluster, stream, np.asarray(caps, dtype=np.int64))
    else:
        caps, active = event
        backend.advance(np.asarray(caps, dtype=np.int64), np.asarray(active))


def check_against_twin(
    case: Case, backend: SimulatedClusters, make_twin: Callable[[Scenario], Twin]
) -> None:
    """Play a case on both; every reading and every request's fate must agree."""
    twins = [make_twin(case.scenario) for _ in range(case.n_clusters)]
    seen: list[dict[str, Any]] = [{} for _ in twins]
    for number, event in enumerate(case.script):
        step(backend, event)
        if len(event) == 3:
            cluster, stream, caps = event
            seen[cluster] = twins[cluster].reset(stream, caps)
        else:
            for cluster, (caps, active) in enumerate(zip(*event, strict=True)):
                if active:
                    seen[cluster] = twins[cluster].advance(caps)
        for cluster, twin in enumerate(twins):
            if not seen[cluster]:
                continue
            where = f"event {number}, cluster {cluster}"
            ours = backend.outcomes(cluster)
            columns = np.column_stack([getattr(ours, name) for name in twin.OUTCOME_FIELDS])
            theirs = np.array(twin.outcomes(), dtype=float).reshape(columns.shape)
            np.testing.assert_array_equal(columns, theirs, err_msg=where)
            for i, expected in enumerate(seen[cluster]["tenants"]):
                assert_same(backend.telemetry_tenants[cluster, i], expected, f"{where}, t{i}")
            assert_same(backend.telemetry_cluster[cluster], seen[cluster]["cluster"], where)
    backend.close()


def assert_same(ours: npt.NDArray[np.void], expected: dict[str, float], where: str) -> None:
    names = ours.dtype.names or ()
    for name, ours_value in zip(names, ours.tolist(), strict=True):
        value = expected[name]
        both_missing = math.isnan(value) and math.isnan(ours_value)
        same = both_missing or math.isclose(ours_value, value, rel_tol=1e-12, abs_tol=1e-15)
        assert same, f"{where}: {name} is {ours_value}, the twin has {value}"


def percentiles(values: list[float], kept: list[float]) -> list[float]:
    """p50, p95 and p99 of the values, or the ones kept from before when there are none."""
    if not values:
        return kept
    ordered, n = sorted(values), len(values)
    return [ordered[min(int(q * n), n - 1)] for q in (0.50, 0.95, 0.99)]


def named(reading: str, values: list[float]) -> dict[str, float]:
    names = (f"{reading}_p50_s", f"{reading}_p95_s", f"{reading}_p99_s")
    return dict(zip(names, values, strict=True))
