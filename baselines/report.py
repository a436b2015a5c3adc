"""The report of a comparison: tables and figures as files, and one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup
from rich.markup import escape
from rich.table import Table

from vllm_tenant_tuning.baselines import plots
from vllm_tenant_tuning.baselines.episode import Trajectory
from vllm_tenant_tuning.baselines.metrics import METRICS, TESTED
from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.statistics import (
    SIGNIFICANCE,
    Difference,
    Estimate,
    Summary,
    Verdict,
    summarize,
)
from vllm_tenant_tuning.reward import REWARD_TERMS
from vllm_tenant_tuning.scenario import Scenario

MARKS: dict[Verdict, str] = {"better": "+", "worse": "-", "mixed": "~", "not significant": "="}
"""How tables mark a tested difference to the reference."""

TENANT_COLUMNS = ("arrived", "completed", "good", "dropped", "latency_p99_s", "mean_cap")


def write_report(
    out_dir: Path,
    scenario: Scenario,
    records: Sequence[EpisodeRecord],
    reference: str,
    trajectories: Mapping[str, Trajectory],
    *,
    title: str,
    learning_curve: Sequence[tuple[int, float, float, float]] | None = None,
    left_out: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Summary:
    """Write `summary.json`, `table.md`, figures as PNG and SVG, and `report.html` with all of it.

    Args:
        out_dir: where to.
        scenario: what was played.
        records: all episodes.
        reference: the label of the policy that the others are compared with.
        trajectories: of one episode, by policy; none for no such figure.
        title: of the page.
        learning_curve: timesteps, mean return and its interval.
        left_out: a sentence on each episode that is not among the records, and why.
        notes: paragraphs at the end.

    Returns:
        The summary that the report shows.

    Raises:
        ValueError: records that cannot be compared (see `summarize`).
    """
    summary = summarize(records, reference)
    figures = {
        "pareto": plots.pareto_plot(summary),
        "differences": plots.difference_plot(summary),
    }
    if trajectories:
        figures["trajectory"] = plots.trajectory_plot(trajectories, scenario)
    if learning_curve:
        figures["learning_curve"] = plots.learning_curve_plot(learning_curve)
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn = {name: plots.save_plot(figure, out_dir, name) for name, figure in figures.items()}
    caveats = [*left_out, *caveats_of(records, summary)]
    content = summary.to_dict() | {
        "scenario": scenario.name,
        "seeds": sorted({record.seed for record in records}),
        "metrics": [asdict(metric) for metric in summary.metrics],
        "caveats": caveats,
    }
    (out_dir / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    table = markdown_table(summary) + "".join(f"\n{markdown_text(line)}\n" for line in left_out)
    (out_dir / "table.md").write_text(table, encoding="utf-8")

    page = render_page(
        "report.html",
        title=title,
        scenario=scenario,
        summary=summary,
        metrics=summary.metrics,
        header=_header(summary),
        rows=_rows(summary),
        tenant_columns=TENANT_COLUMNS,
        tenant_rows=_tenant_rows(records, summary, scenario),
        n_seeds=len({record.seed for record in records}),
        findings=_findings(summary),
        caveats=caveats,
        reward_terms=REWARD_TERMS,
        reward_rows=_reward_rows(records, summary),
        figures={name: Markup(svg) for name, svg in drawn.items()},
        notes=notes,
    )
    (out_dir / "report.html").write_text(page, encoding="utf-8")
    return summary


def markdown_table(summary: Summary) -> str:
    """The results as a Markdown table."""
    table = markdown_lines(_header(summary), _rows(summary))
    return f"{table}\n\n{markdown_text(legend(summary))}\n"


def markdown_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, without a line's end after it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(markdown_text, line)) + " |" for line in lines)


def render_page(template: str, **content: object) -> str:
    """A page of `templates/`, what it shows escaped."""
    folder = resources.files("vllm_tenant_tuning.baselines") / "templates"
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
    )
    return environment.get_template(template).render(content)


def rich_table(summary: Summary) -> Table:
    """The tested metrics and the cost as a table for the terminal."""
    shown = [metric for metric in METRICS if metric.field in (*TESTED, "cost")]
    table = Table(caption=escape(legend(summary)), show_lines=True)
    table.add_column("policy", overflow="fold")
    for metric in shown:
        table.add_column(metric.title, justify="right")
    for policy in summary.policies:
        cells = []
        for metric in shown:
            found = summary.estimate(policy, metric.field)
            cells.append(cell(found, summary.difference(policy, metric.field), separator="\n"))
        table.add_row(escape(policy), *map(escape, cells))
    return table


def _header(summary: Summary) -> list[str]:
    return ["policy", *(metric.title for metric in summary.metrics)]


def _rows(summary: Summary) -> list[list[str]]:
    return [
        [
            policy,
            *(
                cell(
                    summary.estimate(policy, metric.field),
                    summary.difference(policy, metric.field),
                )
                for metric in summary.metrics
            ),
        ]
        for policy in summary.policies
    ]


def cell(estimate: Estimate, difference: Difference | None, separator: str = " ") -> str:
    """A mean with its interval, and the mark of its tested difference to the reference."""
    if estimate.mean is None:
        return "none"
    text = number(estimate.mean)
    if difference is not None:
        text += f" {MARKS[difference.verdict]}" if difference.p_value is not None else ""
    if estimate.mean_interval is not None:
        low, high = map(number, estimate.mean_interval)
        text += f"{separator}[{low}, {high}]"
    return text


def difference_cell(found: Difference | None) -> str:
    """A paired difference with its interval, mark and corrected p."""
    if found is None or found.mean is None:
        return "none"
    text = signed(found.mean)
    if found.interval is not None:
        text += f" [{signed(found.interval[0])}, {signed(found.interval[1])}]"
    if found.p_holm is not None:
        text += f" {MARKS[found.verdict]} p {found.p_holm:.2g}"
    return text


def legend(summary: Summary) -> str:
    """What cells and their marks mean."""
    return (
        "Mean, [95 % interval]. Against "
        f"{summary.reference}, paired by seed (Wilcoxon signed-rank, Holm over all comparisons, "
        "5 %): + better, - worse, ~ significant by ranks while the mean points the other way, "
        "= not significant; unmarked: not tested."
    )


def number(value: float) -> str:
    """A number to three digits, at most four of them after the point."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{min(digits, 4)}f}"


def signed(value: float) -> str:
    """A number with its sign."""
    return f"{'+' if value > 0 else ''}{number(value)}"


def _tenant_rows(
    records: Sequence[EpisodeRecord], summary: Summary, scenario: Scenario
) -> list[list[str]]:
    rows = []
    for policy in summary.policies:
        mine = [record for record in records if record.policy == policy]
        for tenant in scenario.tenant_names:
            row = [policy, tenant]
            for column in TENANT_COLUMNS:
                values = [getattr(record.tenants[tenant], column) for record in mine]
                known = [value for value in values if value is not None]
                row.append(number(float(np.mean(known))) if known else "none")
            rows.append(row)
    return rows


def _reward_rows(records: Sequence[EpisodeRecord], summary: Summary) -> list[list[str]]:
    """Means of the terms of the return, and of the return."""
    rows = []
    for policy in summary.policies:
        mine = [record for record in records if record.policy == policy]
        sums = [[getattr(r.reward_terms, term) for r in mine] for term in REWARD_TERMS]
        means = [float(np.mean(values)) for values in (*sums, [r.return_ for r in mine])]
        rows.append([policy, *map(number, means)])
    return rows


def _findings(summary: Summary) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each policy what the tests say: (verdict, metrics) pairs."""
    titles = {metric.field: metric.title.partition(",")[0] for metric in METRICS}
    result = []
    for policy in summary.policies:
        said: dict[str, list[str]] = {}
        for difference in summary.differences:
            if difference.policy == policy:
                verdict = difference.verdict if difference.p_value is not None else "not tested"
                said.setdefault(verdict, []).append(titles[difference.metric])
        if said:
            result.append(
                (policy, [(verdict, ", ".join(names)) for verdict, names in said.items()])
            )
    return result


def caveats_of(records: Sequence[EpisodeRecord], summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    seeds = {record.seed for record in records}
    found = []
    if len(seeds) == 1:
        found.append("One seed gives no interval and no test.")
    pairs = [d.n for d in summary.differences if d.p_value is not None]
    if pairs and (least := 2.0 ** (1 - max(pairs)) * len(pairs)) >= SIGNIFICANCE:
        found.append(
            f"With {max(pairs)} common seeds and {len(pairs)} comparisons the smallest exact p is "
            f"{min(1.0, least):.2g} after Holm's correction: too few seeds to find a difference "
            "significant."
        )
    for policy in summary.policies:
        mine = [record for record in records if record.policy == policy]
        if len(mine) < len(seeds):
            found.append(
                f"{policy}: {len(mine)} of {len(seeds)} seeds; differences are over the seeds it "
                "has in common with the reference."
            )
        if silent := sum(record.latency_p99_s is None for record in mine):
            found.append(f"{policy}: {silent} episodes without a completion have no latency.")
        if failed := sum(record.failed for record in mine):
            found.append(f"{policy}: {failed:g} requests failed, in neither goodput nor drops.")
    if faults := sorted({record.truncation for record in records} - {"time_limit"}):
        found.append(f"Some episodes were cut short: {', '.join(faults)}.")
    return found


def markdown_text(text: str) -> str:
    """Text that stays one cell and is no markup."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return text.replace("|", "\\|")
