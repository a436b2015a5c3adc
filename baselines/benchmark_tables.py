"""The tables of a benchmark, as texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tenant_tuning.baselines.decision_traces import DecisionTrace
from vllm_tenant_tuning.baselines.metrics import FAIRNESS, METRICS, TESTED, TOKEN_METRICS
from vllm_tenant_tuning.baselines.report import MARKS, cell, difference_cell, number
from vllm_tenant_tuning.baselines.statistics import Verdict, estimate
from vllm_tenant_tuning.baselines.suite import Suite
from vllm_tenant_tuning.baselines.suite_statistics import (
    AblationResult,
    ScenarioResult,
    SuiteScore,
    as_iqm,
    count_verdicts,
)

SHOWN = tuple(
    metric
    for metric in METRICS + TOKEN_METRICS
    if metric.field in (*TESTED, "cost", "usd_per_1000_good")
)
"""What the tables of a scenario show, where the records have it."""

_TITLES = {metric.field: metric.title for metric in METRICS}


@dataclass(frozen=True)
class Table:
    """Cells as texts, the first column names the rows."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def verdict_table(
    found: Mapping[str, Mapping[str, Mapping[str, Verdict]]], scenarios: Sequence[str]
) -> Table:
    """Policies by scenarios: four marks each, and how often the return is better and worse."""
    rows = []
    for policy, by_scenario in found.items():
        marks = [
            " ".join(MARKS[said[m]] if m in said else "?" for m in TESTED)
            if (said := by_scenario.get(name))
            else "none"
            for name in scenarios
        ]
        counts = [count_verdicts(by_scenario, metric) for metric in TESTED]
        totals = [
            f"{c['better']} / {c['not significant'] + c['mixed']} / {c['worse']}" for c in counts
        ]
        rows.append([policy, *marks, *totals])
    short = [_TITLES[metric].partition(",")[0] for metric in TESTED]
    return Table(
        f"Marks in the order {', '.join(short)}; then in how many scenarios each is better / "
        "neither / worse. none: not played",
        ["policy", *scenarios, *short],
        rows,
    )


def score_table(scores: Sequence[SuiteScore]) -> Table:
    """Interquartile means of the normalised returns."""
    rows = [[s.policy, f"{s.iqm:.3f} [{s.interval[0]:.3f}, {s.interval[1]:.3f}]"] for s in scores]
    header = ["policy", "normalised return, IQM [95 % interval]"]
    return Table("Interquartile means over all episodes of all scenarios", header, rows)


def front_table(results: Sequence[ScenarioResult]) -> Table:
    """The Pareto front of each scenario with its hypervolume."""
    rows = []
    for result in results:
        front = result.summary.pareto
        if front is None:
            rows.append([result.name, "no completions", "none", "none"])
            continue
        point = ", ".join(map(number, front.reference_point))
        rows.append([result.name, ", ".join(front.members), f"{front.hypervolume:.3f}", point])
    return Table(
        "Hypervolumes are shares of the box between the best values and the reference point",
        ["scenario", "front", "hypervolume", "reference point (goodput, p99, held capacity)"],
        rows,
    )


def suite_fairness_table(suite: Suite, results: Sequence[ScenarioResult]) -> Table:
    """Mean Jain's index of each policy in each scenario."""
    rows = []
    for text in suite.policies:
        cells = []
        for result in results:
            label = result.recorded.label(text)
            found = estimate(result.episodes, label, FAIRNESS.field) if label else None
            cells.append("none" if found is None or found.mean is None else f"{found.mean:.3f}")
        rows.append([text, *cells])
    return Table("Mean Jain's index", ["policy", *(result.name for result in results)], rows)


def mean_tables(result: ScenarioResult) -> list[Table]:
    """Means with marks, interquartile means, and paired differences."""
    summary = result.summary
    shown = [metric for metric in SHOWN if metric in summary.metrics]
    header = ["policy", *(metric.title for metric in shown)]
    means, iqms, differences = [], [], []
    for policy in summary.policies:
        found = {metric.field: summary.estimate(policy, metric.field) for metric in shown}
        to_reference = {field: summary.difference(policy, field) for field in found}
        means.append([policy, *(cell(found[field], to_reference[field]) for field in found)])
        iqms.append([policy, *(cell(as_iqm(one), None) for one in found.values())])
        if policy != summary.reference:
            tested = [summary.difference(policy, metric) for metric in TESTED]
            differences.append([policy, *map(difference_cell, tested)])
    return [
        Table("Means [95 % intervals], marked against the best static caps", header, means),
        Table("Interquartile means [95 % intervals]", header, iqms),
        Table(
            f"Paired differences to {summary.reference} [95 % intervals], p after Holm",
            ["policy", *(_TITLES[metric] for metric in TESTED)],
            differences,
        ),
    ]


def fairness_table(result: ScenarioResult) -> Table:
    """Jain's index, and the share of each tenant's requests that kept all promises."""
    rows = []
    tenants = result.recorded.scenario.tenant_names
    for policy in result.summary.policies:
        mine = [episode for episode in result.episodes if episode.policy == policy]
        shares = []
        for tenant in tenants:
            ours = [episode.tenants[tenant] for episode in mine]
            values = [one.good / one.arrived for one in ours if one.arrived]
            shares.append(f"{np.mean(values):.3f}" if values else "none")
        rows.append([policy, cell(estimate(mine, policy, FAIRNESS.field), None), *shares])
    header = ["policy", FAIRNESS.title, *(f"good, {tenant}" for tenant in tenants)]
    return Table(
        "Fairness: Jain's index, and the good share of each tenant's requests", header, rows
    )


def reason_table(traces: Mapping[str, DecisionTrace], seed: int) -> Table:
    """Why the caps moved in one episode: how often, by policy, direction and reason."""
    rows = []
    for policy, trace in traces.items():
        counts = Counter(("raised" if m.change > 0 else "lowered", m.reason) for m in trace.moves)
        order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        rows += [[policy, way, reason, str(times)] for (way, reason), times in order]
        if not counts:
            rows.append([policy, "held", "", "0"])
    return Table(f"Why the caps moved, seed {seed}", ["policy", "caps", "reason", "times"], rows)


def ablation_tables(found: Sequence[AblationResult]) -> list[Table]:
    """Means of all cells in all scenarios, and their differences."""
    values, differences = [], []
    for one in found:
        for label in one.labels:
            cells = [
                cell(one.estimates[label, metric], one.differences.get((label, metric)))
                for metric in TESTED
            ]
            values.append([one.scenario, label, *cells])
        for label in one.labels[1:]:
            said = [one.differences[label, metric] for metric in TESTED]
            differences.append(
                [one.scenario, label, said[0].reference, *map(difference_cell, said)]
            )
    titles = [_TITLES[metric] for metric in TESTED]
    return [
        Table("Means [95 % intervals]", ["scenario", "cell", *titles], values),
        Table(
            "Paired differences [95 % intervals], p after Holm",
            ["scenario", "cell", "against", *titles],
            differences,
        ),
    ]
