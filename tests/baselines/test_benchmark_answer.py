"""The answer at the head of a benchmark against plain arithmetic on made-up episodes."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic import record

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.baselines.benchmark import PlayedPolicy, ScenarioRecords
from vllm_tenant_tuning.baselines.benchmark_answer import answer_sentences, answer_table
from vllm_tenant_tuning.baselines.records import EpisodeRecord, append_record, read_records
from vllm_tenant_tuning.baselines.suite import Suite
from vllm_tenant_tuning.baselines.suite_statistics import ScenarioResult, scenario_results

N = 20
LABELS = {"best_static": "best_static:4/4"}
SHIFTS = {  # return, goodput, p99 latency, moves of the caps
    "best_static": (-100.0, 1.0, 10.0, 0),
    "robust": (-89.5, 1.2, 10.0, 9),
    "aimd": (-109.5, 1.1, 10.0, 9),
    "static": (-100.0, 1.1, 10.0, 0),
    "naive": (-89.5, 1.5, 12.0, 9),
}
SUITE = Suite.model_validate(
    {
        "name": "s",
        "description": "",
        "scenarios": ["study", "reserved"],
        "policies": [*SHIFTS, "model"],
        "seeds": f"0:{N}",
    }
)


def recorded(asked: str, gains: bool) -> ScenarioRecords:
    """Where there are no gains all policies are alike but for the noise that seeds share."""
    noise = np.random.default_rng(0).normal(0, 0.01, N)
    episodes: list[EpisodeRecord] = []
    for policy, shift in SHIFTS.items():
        return_, goodput, p99, moves = shift if gains else SHIFTS["best_static"]
        for i in range(N):
            values = {"return": return_ + noise[i], "goodput_rps": goodput + noise[i]}
            more = {"latency_p99_s": p99 + noise[i], "cap_changes": moves, "scenario": asked}
            episodes.append(record(LABELS.get(policy, policy), i, **values, **more))
    played = tuple(
        PlayedPolicy(asked=p, label=LABELS.get(p, p), text=p, digest="0123") for p in SHIFTS
    )
    return ScenarioRecords(asked, load_scenario(asked), played, tuple(episodes), {})


@pytest.fixture(scope="module")
def results() -> list[ScenarioResult]:
    found, _ = scenario_results(SUITE, [recorded("study", True), recorded("reserved", False)])
    return found


def test_the_matrix_says_verdict_and_relative_difference(results: list[ScenarioResult]) -> None:
    table = answer_table(SUITE, results)
    assert list(table.header) == ["policy", "study", "reserved"]
    assert {row[0]: tuple(row[1:]) for row in table.rows} == {
        "robust": ("better +10.5 %", "no different 0 %"),  # of the size of a negative return
        "aimd": ("worse -9.50 %", "no different 0 %"),
        "static": ("no different 0 %", "no different 0 %"),
        "naive": ("better +10.5 %", "no different 0 %"),
        "model": ("not played", "not played"),
    }


def test_sentences_name_who_wins_where_and_at_what_price(results: list[ScenarioResult]) -> None:
    first, standing, won, none = answer_sentences(SUITE, results)
    assert "of 8 pairs" in first
    assert "2 are better than the best static caps, 1 worse, 0 mixed and 5 no different" in first
    assert standing.endswith(
        "in at least one scenario: robust (better in 1, worse in 0), "
        "naive (better in 1, worse in 0)."
    )
    assert won.startswith("study: better in goodput, req/s without a worse p99 latency: robust")
    assert "naive" not in won  # its p99 latency is worse
    assert re.search(r"robust \+0\.200 \[\+0\.200, \+0\.200\], \+20\.\d %;", won)
    assert re.search(r"aimd [^;]*\(return worse -9\.50 %\)", won)
    assert re.search(r"static [^;]*\(its caps never moved\)", won)
    assert none.endswith("without a worse p99 latency in reserved.")


def test_gzipped_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    plain = tmp_path / "episodes.jsonl"
    for i in range(3):
        append_record(plain, record("static", i))
    packed = tmp_path / "episodes.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_records(packed) == read_records(plain) != []
