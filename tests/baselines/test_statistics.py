"""Statistics against closed forms, textbook cases and simulated data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from synthetic import record

from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.statistics import (
    METRICS,
    TESTED,
    estimate,
    paired_differences,
    pareto_front,
    summarize,
)


def many(policy: str, values: Any, field: str = "drops", first: int = 0) -> list[EpisodeRecord]:
    return [
        record(policy, first + i, **{field: None if value is None else float(value)})
        for i, value in enumerate(values)
    ]


def test_estimates_are_the_definitions() -> None:
    values = np.array([5.0, 1.0, 2.0, 3.0, 400.0, 4.0, 6.0, 7.0])
    found = estimate(many("p", values), "p", "drops")
    assert found.n == 8
    assert found.mean == values.mean()
    assert found.sd == pytest.approx(math.sqrt(((values - values.mean()) ** 2).sum() / 7))
    assert found.iqm == np.mean([3.0, 4.0, 5.0, 6.0])  # without the lowest and highest quarter
    assert found.mean_interval is not None
    assert found.iqm_interval is not None
    assert found.mean_interval[0] < values.mean() < found.mean_interval[1]
    assert found.iqm_interval[1] < 400


def test_the_interval_of_the_mean_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(150):
        found = estimate(many("p", rng.exponential(10.0, 40)), "p", "drops")
        assert found.mean_interval is not None
        covered += found.mean_interval[0] <= 10.0 <= found.mean_interval[1]
    # A bootstrap interval of 40 skewed values covers a little less than 95 %.
    assert stats.binomtest(covered, 150, 0.95).pvalue > 0.001
    assert covered < 150


def test_missing_values_single_seeds_and_constants() -> None:
    found = estimate(many("p", [3.0, None, 4.0], "latency_p99_s"), "p", "latency_p99_s")
    assert (found.n, found.mean) == (2, 3.5)
    single = estimate(many("p", [3.0]), "p", "drops")
    assert (single.mean, single.sd, single.mean_interval) == (3.0, None, None)
    constant = estimate(many("p", [3.0] * 5), "p", "drops")
    assert constant.mean_interval == (3.0, 3.0)
    empty = estimate(many("p", [None], "latency_p99_s"), "p", "latency_p99_s")
    assert (empty.n, empty.mean, empty.iqm) == (0, None, None)


def test_differences_are_paired_by_seed() -> None:
    ours = many("new", [1, 2, 3, 4, 50], first=2)  # seeds 2 to 6
    theirs = many("old", [100, 100, 2, 4, 6, 8])  # seeds 0 to 5
    (found,) = paired_differences(theirs + ours, "old", ["drops"])
    differences = np.array([1 - 2, 2 - 4, 3 - 6, 4 - 8])
    assert found.n == 4
    assert found.mean == differences.mean()
    assert found.p_value == pytest.approx(stats.wilcoxon(differences).pvalue)
    assert not found.significant  # four seeds can never be: the smallest p is 1/8
    assert found.verdict == "not significant"


def test_holm_on_a_case_worked_by_hand() -> None:
    """Six common seeds of one sign give p = 2/64 = 0.03125, the smallest there is.

    With two comparisons of p 0.03125 and p 1: Holm multiplies the smaller by 2 (0.0625), so
    what a single test would call significant is not.
    """
    reference = many("old", [10.0] * 6)
    all_lower = many("new", 10.0 - np.arange(1, 7))
    equal = many("same", [10.0] * 6)
    alone = paired_differences(reference + all_lower, "old", ["drops"])
    assert alone[0].p_holm == pytest.approx(2 / 64)
    assert alone[0].verdict == "better"
    both = {
        d.policy: d for d in paired_differences(reference + all_lower + equal, "old", ["drops"])
    }
    assert both["new"].p_holm == pytest.approx(4 / 64)
    assert not both["new"].significant
    assert both["same"].p_value == 1.0
    assert both["same"].interval == (0.0, 0.0)


@pytest.mark.parametrize(
    ("field", "shift", "verdict"),
    [
        ("drops", -5.0, "better"),
        ("drops", 5.0, "worse"),
        ("goodput_rps", 0.1, "better"),
        ("latency_p99_s", 1.0, "worse"),
    ],
)
def test_better_depends_on_the_metric(field: str, shift: float, verdict: str) -> None:
    base = np.linspace(10, 20, 12)
    records = many("old", base, field) + many("new", base + shift + base / 1000, field)
    assert paired_differences(records, "old", [field])[0].verdict == verdict


def test_a_mean_against_the_ranks_is_mixed() -> None:
    """Twenty seeds with a drop or two more and one with 200 fewer: no policy to call better."""
    old = many("old", np.zeros(21))
    new = many("new", [*np.linspace(1, 2, 20), -200.0])
    (found,) = paired_differences(old + new, "old", ["drops"])
    assert found.mean is not None
    assert found.mean < 0
    assert found.significant
    assert found.verdict == "mixed"


def front(rows: dict[str, tuple[float, float, float]]) -> Any:
    return pareto_front(
        [
            record(policy, goodput_rps=goodput, latency_p99_s=p99_s, cost=cost)
            for policy, (goodput, p99_s, cost) in rows.items()
        ]
    )


def test_pareto_front_and_hypervolume_by_hand() -> None:
    found = front({"a": (1.0, 10.0, 0.5), "b": (0.5, 5.0, 0.5), "c": (0.5, 10.0, 0.5)})
    assert found.members == ("a", "b")  # c is worse than a and b, better than neither
    assert found.reference_point == pytest.approx((0.45, 10.5, 0.5))
    # Scaled by the box from the best values to the reference point, a loses (0, 5/5.5) and
    # b (0.5/0.55, 0); the cost is the same for all and decides nothing. Each covers 1/11 of
    # the square, and 1/121 of that is covered by both.
    assert found.hypervolume == pytest.approx(2 / 11 - 1 / 121)


def test_pareto_front_of_one_policy_and_of_equals() -> None:
    assert front({"a": (1.0, 10.0, 0.5)}).members == ("a",)
    assert set(front({"a": (1.0, 10.0, 0.5), "b": (1.0, 10.0, 0.5)}).members) == {"a", "b"}
    best = front({"a": (1.0, 5.0, 0.1), "b": (0.5, 10.0, 0.5), "c": (0.6, 9.0, 0.4)})
    assert best.members == ("a",)
    assert best.hypervolume == pytest.approx(1.0)
    assert pareto_front(many("a", [None], "latency_p99_s")) is None
    silent = many("b", [None], "latency_p99_s")
    assert pareto_front([record("a"), *silent]) == pareto_front([record("a")])


def test_a_summary_holds_all_policies_and_metrics() -> None:
    rng = np.random.default_rng(0)
    records = [r for p in ("x", "y", "z") for r in many(p, rng.poisson(20, 10))]
    summary = summarize(records, "y")
    assert summary.policies == ("x", "y", "z")
    assert len(summary.estimates) == 3 * len(METRICS)
    assert len(summary.differences) == 2 * len(TESTED)
    assert summary.difference("y", "drops") is None
    assert summary.estimate("z", "drops").mean == np.mean([r.drops for r in records[20:]])
    assert summary.to_dict()["reference"] == "y"


@pytest.mark.parametrize(
    ("records", "reference", "message"),
    [
        ([], "a", "records: got none"),
        ([record("a")], "b", "reference: got 'b'; accepted are a"),
        ([record("a"), record("a", scenario="other")], "a", "records of one"),
        ([record("a"), record("a", 1, scenario_digest="f")], "a", "digests 0123 and f"),
        ([record("a"), record("a")], "a", "seed 0 twice"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    records: list[EpisodeRecord], reference: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        summarize(records, reference)
