"""The engine against its plain twin: every reading, and every request's times, equal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins.engine import EngineTwin
from twins.engine_cases import random_case
from twins.readings import Case, check_against_twin, seeded

from vllm_tenant_tuning.backends.sim.engine import EngineBackend

CASES_PER_BLOCK = 1500


@st.composite
def cases(draw: st.DrawFn) -> Case:
    return random_case(lambda options: draw(st.sampled_from(options)))


def check(case: Case) -> None:
    backend = EngineBackend(case.scenario, case.n_clusters, n_threads=1)
    check_against_twin(case, backend, EngineTwin)


@pytest.mark.parametrize("block", range(4))
def test_equals_the_twin_step_by_step(block: int) -> None:
    for seed in range(CASES_PER_BLOCK * block, CASES_PER_BLOCK * (block + 1)):
        try:
            check(random_case(seeded(seed)))
        except AssertionError as error:
            raise AssertionError(f"case {seed}: {error}") from error


@settings(max_examples=150)
@given(cases())
def test_equals_the_twin_wherever_hypothesis_looks(case: Case) -> None:
    check(case)
