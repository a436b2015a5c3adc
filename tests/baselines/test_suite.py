"""Suites: the packaged one can be played, and what cannot is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.agents.robust_config import REQUIREMENTS
from vllm_tenant_tuning.baselines.command_line import parse_seeds
from vllm_tenant_tuning.baselines.suite import MODEL, REFERENCE, SuiteError, load_suite, suite_names

CELLS = [{"label": "a", "policy": "naive"}, {"label": "b", "policy": "aimd"}]
ABLATION = {"name": "one", "question": "Which?", "compared": "first", "cells": CELLS}
SUITE: dict[str, Any] = {
    "name": "mine",
    "description": "",
    "scenarios": ["study", "reserved"],
    "policies": ["best_static", "naive"],
    "seeds": "0:4",
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "suite.yaml"
    file.write_text(yaml.safe_dump(SUITE | changes))
    return file


def test_the_packaged_suites_name_what_there_is() -> None:
    assert "default" in suite_names()
    for name in suite_names():
        suite = load_suite(name)
        for asked in suite.scenarios:
            scenario = load_scenario(asked)
            arrivals = {tenant.arrivals.process for tenant in scenario.tenants}
            assert "trace" not in arrivals, f"{asked} needs trace files"
            for text in set(suite.played(asked)) - {REFERENCE, MODEL}:
                make_policy(text).initial_caps(scenario)


def test_the_default_suite_plays_100_seeds_that_were_not_in_view() -> None:
    seeds = parse_seeds(load_suite("default").seeds)
    assert len(seeds) == 100
    assert set(seeds).isdisjoint(range(50))


def test_the_default_suite_adds_the_four_requirements_one_at_a_time() -> None:
    (steps,) = [a for a in load_suite("default").ablations if a.name == "requirements"]
    policies = [make_policy(cell.policy) for cell in steps.cells]
    met = [[getattr(policy.config, name) for name in REQUIREMENTS] for policy in policies]  # type: ignore[attr-defined]
    assert met == [[i < n for i in range(4)] for n in range(5)]
    names = [cell.policy for cell in steps.cells]
    assert steps.pairs() == list(zip(names[1:], names[:-1], strict=True))


def test_an_ablation_adds_its_policies_to_its_scenarios_alone(tmp_path: Path) -> None:
    suite = load_suite(write(tmp_path, ablations=[ABLATION | {"scenarios": ["study"]}]))
    assert suite.played("study") == ("best_static", "naive", "aimd")
    assert suite.played("reserved") == ("best_static", "naive")
    assert suite.n_seeds == 4
    assert suite.with_seeds("10:12").seeds == "10:12"
    assert suite.ablations[0].pairs() == [("aimd", "naive")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ["naive", "aimd"]}, "accepted are lists with best_static"),
        ({"policies": ["best_static", "naive", "naive"]}, "policies: got naive twice"),
        ({"scenarios": ["study", "study"]}, "scenarios: got study twice"),
        ({"scenarios": []}, "scenarios"),
        ({"seeds": "4:4"}, "yaml: seeds: got '4:4'; accepted is A:B"),
        ({"seeds": 64}, "yaml: seeds: got 64; accepted is A:B in quotation marks"),
        ({"traced": ["aimd"]}, "traced: got aimd; accepted are the suite's: best_static, naive"),
        ({"seed": 3}, "seed: unknown key; accepted are name, description"),
        ({"trace_seed": 1000}, "trace_seed: got 1000"),
        ({"ablations": [ABLATION, ABLATION]}, "ablations: got one twice"),
        ({"ablations": [ABLATION | {"cells": CELLS[:1]}]}, "ablations.0.cells"),
        ({"ablations": [ABLATION | {"cells": [CELLS[0], CELLS[0]]}]}, "cells: got naive twice"),
        ({"ablations": [ABLATION | {"compared": "last"}]}, "ablations.0.compared: got 'last'"),
        ({"ablations": [ABLATION | {"scenarios": ["azure"]}]}, "ablations: one: scenarios"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SuiteError) as refused:
        load_suite(write(tmp_path, **changes))
    assert message in str(refused.value)


def test_what_is_no_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="neither a packaged suite"):
        load_suite("none")
    file = tmp_path / "suite.yaml"
    for text, message in (
        ("- a", "a mapping is accepted"),
        ("a: [", "not YAML"),
        ("{}", "missing"),
    ):
        file.write_text(text)
        with pytest.raises(SuiteError, match=message):
            load_suite(file)
