"""What was measured on a real server, as the pages tell it, against the raw records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "baselines" / "results" / "cpu_server"
PAGES = {
    "live_result.md": ("first_live_result", range(10)),
    "live_trained.md": ("trained_live", range(10, 30)),
}
FIELDS = {
    "return": "return",
    "goodput, req/s": "goodput_rps",
    "throughput, req/s": "throughput_rps",
    "drops": "drops",
    "weighted drops": "weighted_drops",
    "p99 latency, s": "latency_p99_s",
    "p99 TTFT, s": "ttft_p99_s",
}
TESTED = ("return", "goodput, req/s", "weighted drops", "p99 latency, s")


def values(file: Path, policy: str, field: str, seeds: range) -> np.ndarray:
    """Of the last episode of each seed that counts."""
    found: dict[int, float] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        live = record.get("live") or {"invalid": [], "fault": ""}
        counts = record["truncation"] == "time_limit" and not live["invalid"] and not live["fault"]
        if record["policy"] == policy and counts:
            found[record["seed"]] = record[field]
    assert set(found) == set(seeds)
    return np.array([found[seed] for seed in seeds])


def rows(page: str, first: str) -> tuple[list[str], list[list[str]]]:
    """The policies of the table whose head begins so, and its rows."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = text[text.index(f"\n| {first}|") + 1 :].split("\n\n")[0].splitlines()
    head, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = {"static 8/3": "static:8/3", "PPO": "ppo"}
    return [names.get(name, name) for name in head[1:]], cells


def numbers(cell: str) -> list[float]:
    return [float(text) for text in re.findall(r"[+-]?\d[\d.]*(?:e-?\d+)?", cell)]


def rounded_alike(told: str, value: float) -> bool:
    digits = len(told.partition(".")[2])
    return abs(float(told) - value) <= 0.500001 * 10**-digits


@pytest.mark.parametrize("page", PAGES)
def test_means_and_intervals_are_those_of_the_records(page: str) -> None:
    folder, seeds = PAGES[page]
    policies, table = rows(page, "")
    label, checked = "", 0
    for name, *cells in table:
        is_live = name.endswith(", **measured**")
        label = name.removesuffix(", **measured**") if is_live else label
        file = RECORDS / folder / ("" if is_live else "simulated") / "episodes.jsonl"
        for policy, cell in zip(policies, cells, strict=True):
            found = values(file, policy, FIELDS[label], seeds)
            assert rounded_alike(cell.split()[0], found.mean()), (name, policy)
            if found.any():
                low, high = numbers(cell)[1:]
                assert low <= found.mean() <= high, (name, policy)
                normal = 2 * stats.t.ppf(0.975, len(found) - 1) * stats.sem(found)
                assert high - low == pytest.approx(normal, rel=0.4), (name, policy)
            checked += 1
    assert checked == 36


def test_the_tests_of_the_trained_policies_are_those_of_the_records() -> None:
    page = "live_trained.md"
    folder, seeds = PAGES[page]
    policies, table = rows(page, "minus static 8/3 ")
    assert [row[0] for row in table] == list(TESTED)
    file = RECORDS / folder / "episodes.jsonl"
    told, p_values = {}, {}
    for label, *cells in table:
        reference = values(file, "static:8/3", FIELDS[label], seeds)
        for policy, cell in zip(policies, cells, strict=True):
            difference = values(file, policy, FIELDS[label], seeds) - reference
            assert rounded_alike(re.split("[ ,]", cell)[0], difference.mean()), (label, policy)
            told[label, policy] = cell
            p_values[label, policy] = (
                stats.wilcoxon(difference, zero_method="pratt").pvalue if difference.any() else 1.0
            )
    highest = 0.0
    for i, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        highest = max(highest, min(1.0, (len(p_values) - i) * p_values[key]))
        said: Any = re.search(r"p = ([\d.e-]+)$", told[key])
        assert float(said[1]) == pytest.approx(highest, rel=0.06), key
