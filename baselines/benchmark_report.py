"""What a benchmark says, from raw records alone: its page and its Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

from vllm_tenant_tuning.baselines import interactive_plots as plots
from vllm_tenant_tuning.baselines.benchmark import read_suite_records
from vllm_tenant_tuning.baselines.benchmark_answer import answer_sentences, answer_table
from vllm_tenant_tuning.baselines.benchmark_tables import (
    Table,
    ablation_tables,
    fairness_table,
    front_table,
    mean_tables,
    reason_table,
    score_table,
    suite_fairness_table,
    verdict_table,
)
from vllm_tenant_tuning.baselines.comparison import progress_bar
from vllm_tenant_tuning.baselines.metrics import FAIRNESS, METRICS, TESTED, TOKEN_METRICS
from vllm_tenant_tuning.baselines.plotly_parts import Figure
from vllm_tenant_tuning.baselines.report import (
    caveats_of,
    markdown_lines,
    markdown_text,
    render_page,
)
from vllm_tenant_tuning.baselines.suite import REFERENCE, Suite
from vllm_tenant_tuning.baselines.suite_statistics import (
    AblationResult,
    ScenarioResult,
    ablation_results,
    scenario_results,
    suite_scores,
    verdicts,
)

PAGE_FILE = "benchmark.html"

MARKDOWN_FILE = "benchmark.md"


@dataclass(frozen=True)
class Drawing:
    """A figure of the page.

    Attributes:
        name: its id.
        caption: a sentence or two.
        figure: for plotly.js.
    """

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; figures are of the page alone."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    points: Sequence[str] = ()


def write_benchmark(
    out_dir: Path, markdown: Path | None = None, page_url: str | None = None
) -> list[Path]:
    """Write the page and the Markdown of what a folder's records say.

    The same records give the same bytes.

    Args:
        out_dir: of the records; `PAGE_FILE` goes there too.
        markdown: where the Markdown goes; None for `MARKDOWN_FILE` in `out_dir`.
        page_url: where the page is published, absolute or from the Markdown's page; None for no
            link to it.

    Returns:
        The files.

    Raises:
        ValueError: a folder without records of a scenario's best static caps, or files that
            cannot be read.
    """
    from plotly.offline import get_plotlyjs

    suite, recorded = read_suite_records(out_dir)
    with progress_bar("comparing scenarios") as on_progress:
        results, missing = scenario_results(suite, recorded, on_progress)
    if not results:
        raise ValueError(
            f"--out: {out_dir} has no episode of {REFERENCE}; accepted is the folder of a "
            "benchmark that has played some"
        )
    sections = [
        Section(
            "Answer",
            points=answer_sentences(suite, results),
            tables=[answer_table(suite, results)],
        ),
        *_over_all(suite, results),
        *_ablations(suite, ablation_results(suite, recorded), results),
        *(_scenario(suite, result) for result in results),
        _meaning(suite, results),
    ]
    title = f"Benchmark: {suite.name}"
    head = [
        *([suite.description.strip()] if suite.description.strip() else []),
        f"{len(results)} of {len(suite.scenarios)} scenarios, {len(suite.policies)} policies, "
        f"evaluation seeds {suite.seeds}, the same requests for every policy. Reference: the best "
        "static caps, chosen on training seeds. All of it is simulation.",
    ]
    drawings = [drawing for section in sections for drawing in section.drawings]
    figures = json.dumps(
        {drawing.name: drawing.figure for drawing in drawings}, separators=(",", ":")
    )
    page = render_page(
        "benchmark.html",
        title=title,
        head=head,
        missing=missing,
        sections=sections,
        # a script's text ends at the first "</script", whatever it means in JSON
        figures=Markup(figures.replace("<", "\\u003c")),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
    )
    files = [out_dir / PAGE_FILE, markdown or out_dir / MARKDOWN_FILE]
    files[1].parent.mkdir(parents=True, exist_ok=True)
    files[0].write_text(page, encoding="utf-8")
    text = _markdown(title, head, missing, sections, page_url)
    files[1].write_text(text, encoding="utf-8")
    return files


def _over_all(suite: Suite, results: Sequence[ScenarioResult]) -> list[Section]:
    found = verdicts(suite, results)
    scores = suite_scores(suite, results)
    names = [result.name for result in results]
    sections = [
        Section(
            "Against the best static caps",
            [
                "In each scenario all policies are tested against the best static caps, paired by "
                "seed: Wilcoxon's signed-rank test with Holm's correction over the scenario's "
                "policies and four metrics, 5 %."
            ],
            [verdict_table(found, names)],
            [
                Drawing(
                    "verdicts",
                    "What the tests say of the menu's metric: blue better, orange worse, pink "
                    "significant by ranks against the mean, grey not significant.",
                    plots.verdict_figure(found, names),
                )
            ],
        )
    ]
    if scores:
        sections.append(
            Section(
                "Over all scenarios",
                [
                    "Normalised returns: 0 is the lowest mean return of a policy in a scenario, 1 "
                    "the highest. Policies that lack a scenario are left out. Scores and profiles "
                    "after Agarwal et al. 2021 (arXiv 2108.13264), with stratified bootstrap "
                    "intervals. They depend on which policies take part."
                ],
                [score_table(scores)],
                [
                    Drawing(
                        "scores",
                        "Interquartile means over all episodes of all scenarios, 95 % intervals.",
                        plots.score_figure(scores),
                    ),
                    Drawing(
                        "profiles",
                        "Performance profiles: the share of a policy's episodes that score above a "
                        "threshold, with point-by-point 95 % bands; higher is better. Names in "
                        "the legend show and hide policies.",
                        plots.profile_figure(scores, suite.traced),
                    ),
                ],
            )
        )
    fronts = front_table(results)
    sections.append(
        Section(
            "Pareto fronts",
            ["Policies that no other dominates in goodput, p99 latency and held capacity."],
            [fronts],
        )
    )
    sections.append(Section("Fairness", [FAIRNESS.meaning], [suite_fairness_table(suite, results)]))
    return sections


def _ablations(
    suite: Suite, found: Sequence[AblationResult], results: Sequence[ScenarioResult]
) -> list[Section]:
    by_name = {result.name: result for result in results}
    sections: list[Section] = []
    for ablation in suite.ablations:
        mine = [one for one in found if one.ablation == ablation]
        if not mine:
            continue
        other = "the first" if ablation.compared == "first" else "the one before it"
        sections.append(
            Section(
                ablation.question,
                [
                    f"Ablation {ablation.name}: each cell is compared with {other}, paired by "
                    "seed; Holm's correction runs over the ablation's comparisons in a scenario."
                ],
                ablation_tables(mine),
                [
                    Drawing(
                        f"ablation-{len(sections)}",
                        "Mean normalised returns with 95 % intervals, a line a scenario.",
                        plots.ablation_figure(mine, by_name),
                    )
                ],
            )
        )
    return sections


def _scenario(suite: Suite, result: ScenarioResult) -> Section:
    scenario, traces = result.recorded.scenario, result.recorded.traces
    drawings = [
        Drawing(
            f"{result.name}-differences",
            "Paired differences to the best static caps, 95 % intervals of the mean. Filled points "
            "are significant (blue better, orange worse, pink mixed), hollow ones are not.",
            plots.difference_figure(result),
        ),
        Drawing(
            f"{result.name}-pareto",
            "Means with 95 % intervals; diamonds with names are on the Pareto front.",
            plots.pareto_figure(result),
        ),
    ]
    tables = [*mean_tables(result), fairness_table(result)]
    if traces:
        tables.append(reason_table(traces, suite.trace_seed))
        drawings.append(
            Drawing(
                f"{result.name}-trace",
                f"The episode of seed {suite.trace_seed} under the policy of the menu. Point at a "
                "cap to read when it was moved and why, where the policy tells.",
                plots.trace_figure(traces, scenario),
            )
        )
    paragraphs = [scenario.question, *caveats_of(result.episodes, result.summary)]
    return Section(result.name, paragraphs, tables, drawings)


def _meaning(suite: Suite, results: Sequence[ScenarioResult]) -> Section:
    shown = {metric.field for result in results for metric in result.summary.metrics}
    metrics = [metric for metric in METRICS + TOKEN_METRICS if metric.field in shown]
    tested = ", ".join(m.title.partition(",")[0] for m in METRICS if m.field in TESTED)
    return Section(
        "What the numbers mean",
        [
            *(f"{m.title} ({m.better} is better): {m.meaning}" for m in metrics),
            f"Tested are {tested}. Marks: + better, - worse, ~ significant by ranks while the mean "
            "points the other way, = not significant.",
            "Intervals are bootstrap intervals at 95 % (bias-corrected and accelerated; percentile "
            "where that is not defined). The interquartile mean leaves out the lowest and the "
            "highest quarter of the episodes.",
            *(note.strip() for note in suite.notes),
            "The raw records are episodes.jsonl and traces.jsonl (.gz where they are gzipped) of "
            f"each scenario, played by `vllm-tenant-tuning benchmark --suite {suite.name} --seeds "
            f"{suite.seeds} --out DIR`; `vllm-tenant-tuning benchmark --out DIR --report-only` "
            f"makes the tables and the page with the figures, {PAGE_FILE}, from them again.",
        ],
    )


def _markdown(
    title: str,
    head: Sequence[str],
    missing: Sequence[str],
    sections: Sequence[Section],
    page_url: str | None,
) -> str:
    parts = [f"# {markdown_text(title)}", *map(markdown_text, head)]
    if page_url is not None:  # as HTML: Sphinx looks for no file of its own behind it
        parts.append(f'<a href="{escape(page_url)}">The same with interactive figures</a>')
    if missing:
        parts.append("\n".join(f"- {markdown_text(line)}" for line in missing))
    for section in sections:
        parts.append(f"## {markdown_text(section.title)}")
        parts += map(markdown_text, section.paragraphs)
        if section.points:
            parts.append("\n".join(f"- {markdown_text(line)}" for line in section.points))
        for table in section.tables:
            parts.append(f"**{markdown_text(table.title)}**")
            parts.append(markdown_lines(table.header, table.rows))
    return "\n\n".join(parts) + "\n"
