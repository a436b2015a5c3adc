"""The published answer against its raw records, by the plainest arithmetic there is."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "baselines" / "results" / "benchmark"
PAGE = ROOT / "docs" / "benchmark.md"
SCENARIOS = sorted(folder.name for folder in RECORDS.iterdir() if folder.is_dir())


def matrix() -> dict[str, dict[str, tuple[str, float]]]:
    """Of the answer's table: scenario, policy, verdict and percent."""
    table = PAGE.read_text(encoding="utf-8").split("**Return against the best static caps")[1]
    table = table.split("\n\n")[1]
    head, _, *cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    found: dict[str, dict[str, tuple[str, float]]] = {name: {} for name in head[1:]}
    for row in cells:
        for scenario, cell in zip(head[1:], row[1:], strict=True):
            verdict, percent = re.fullmatch(r"(\D+) ([+-]?[\d.]+) %", cell).groups()  # type: ignore[union-attr]
            found[scenario][row[0]] = (verdict, float(percent))
    return found


def returns(scenario: str) -> dict[str, dict[int, float]]:
    """By policy as the suite asks for it and seed."""
    plan = json.loads((RECORDS / "benchmark.json").read_text(encoding="utf-8"))
    played = next(one for one in plan["scenarios"] if one["scenario"]["name"] == scenario)
    asked = {one["label"]: one["asked"] for one in played["policies"]}
    found: dict[str, dict[int, float]] = {}
    with gzip.open(RECORDS / scenario / "episodes.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            found.setdefault(asked[record["policy"]], {})[record["seed"]] = record["return"]
    return found


def test_all_scenarios_of_the_suite_are_published() -> None:
    assert len(SCENARIOS) == 12
    assert set(matrix()) == set(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_matrix_is_what_the_records_say(scenario: str) -> None:
    found = returns(scenario)
    reference = np.array([found["best_static"][seed] for seed in range(100, 200)])
    told = matrix()[scenario]
    assert len(told) == 18
    for policy, (verdict, percent) in told.items():
        values = np.array([found[policy][seed] for seed in range(100, 200)])
        difference = values - reference
        mean = 100 * difference.mean() / abs(reference.mean())
        assert mean == pytest.approx(percent, rel=0.006, abs=1e-3), policy
        # a significant mean has its sign, and an interval (by the normal law) without 0
        error = 100 * difference.std(ddof=1) / 10 / abs(reference.mean())
        if verdict in ("better", "worse") and abs(mean) > 4 * error:
            assert (mean > 0) == (verdict == "better"), policy
        if verdict == "no different":
            assert abs(mean) < 4 * error or error == 0, policy


def test_the_readme_tells_what_the_page_tells() -> None:
    readme = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("| scenario | robust controller")[1]
    )
    rows = [line.strip("| ").split(" | ") for line in readme.split("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 12
    for name, *cells in rows:
        told = matrix()[name.strip("`")]
        for policy, cell in zip(("robust", "model"), cells, strict=True):
            verdict, percent = re.fullmatch(r"(\D+) ([+-][\d.]+) %", cell).groups()  # type: ignore[union-attr]
            assert told[policy] == (verdict, float(percent)), (name, policy)
