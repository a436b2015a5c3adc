"""Evaluate, summarize, report and print: what `train.py` and `evaluate` end with."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from vllm_tenant_tuning.baselines.distributed import RayCluster
from vllm_tenant_tuning.baselines.episode import Trajectory
from vllm_tenant_tuning.baselines.evaluate import Contender, evaluate, resolve, trajectories
from vllm_tenant_tuning.baselines.live import RAW_FOLDER, recorded_trajectories, split_results
from vllm_tenant_tuning.baselines.records import DecisionRecord, EpisodeRecord
from vllm_tenant_tuning.baselines.report import cell, difference_cell, rich_table, write_report
from vllm_tenant_tuning.baselines.statistics import Summary
from vllm_tenant_tuning.baselines.study import ABLATION, METRICS, PUBLISHED
from vllm_tenant_tuning.scenario import Scenario

WARN_HELD_SHARE: Final = 0.1
"""Of an LLM's decisions, from which on the comparison says so below the table."""


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar as an `on_progress` callback; where no terminal shows it, lines."""
    if not Console().is_terminal:
        yield _ProgressLines(what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _ProgressLines:
    """A line at every tenth of the way, for logs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began_s = time.monotonic()
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            seconds = time.monotonic() - self._began_s
            print(f"{self._what}: {done} of {total} in {seconds:.0f} s", flush=True)


def compare(
    policies: Sequence[str | Contender],
    scenario: Scenario,
    seeds: range,
    out_dir: Path,
    *,
    backend: str = "sim",
    backend_options: Mapping[str, Any] | None = None,
    reference: str | None = None,
    trace_dir: str | Path | None = None,
    workers: int | None = None,
    cluster: RayCluster | None = None,
    learning_curve: Sequence[tuple[int, float, float, float]] | None = None,
) -> Summary:
    """Play the policies, write the report and print the table.

    Of a live server, episodes that a fault truncated and those whose load was not delivered are
    left out, and said to be.

    Args:
        policies: as `evaluate` takes them.
        scenario: the task.
        seeds: the same for all.
        out_dir: for records and report.
        backend: the backend's name.
        backend_options: its keyword arguments; live records go to `out_dir`.
        reference: a policy's text or label; by default the best static, or else the first.
        trace_dir: the folder of the trace files.
        workers: processes.
        cluster: evaluates in place of processes of this machine.
        learning_curve: of the trained policy among them: timesteps, mean, low, high.

    Raises:
        ValueError: a policy, reference, trace or option that is refused, before anything is
            played; or no live episode that counts.
        BackendError: a live server on which no episode can begin.
    """
    with progress_bar("choosing") if "best_static" in policies else nullcontext() as on_choice:
        contenders = [resolve(policy, scenario, trace_dir, on_choice) for policy in policies]
    chosen = reference_label(reference, policies, contenders)
    options = dict(backend_options or {})
    if backend == "live":
        options["out_dir"] = out_dir / RAW_FOLDER
    with progress_bar("evaluating") as on_progress:
        records = evaluate(
            contenders,
            scenario,
            seeds,
            out_dir,
            backend=backend,
            backend_options=options,
            trace_dir=trace_dir,
            workers=workers,
            cluster=cluster,
            on_progress=on_progress,
        )
    shown = (
        trajectories(contenders, scenario, seeds[0], trace_dir, out_dir)
        if backend == "sim"
        else None
    )
    return conclude(records, scenario, chosen, out_dir, shown, learning_curve=learning_curve)


def reference_label(
    reference: str | None,
    policies: Sequence[str | Contender],
    contenders: Sequence[Contender],
) -> str:
    """The label of the policy that the others are compared with.

    Args:
        reference: a policy's text or label; None for the best static, or else the first.
        policies: as they were asked for.
        contenders: what they are, in the same order.

    Raises:
        ValueError: none of them.
    """
    labels = [contender.label for contender in contenders]
    named: dict[str | Contender, str] = {
        **dict(zip(policies, labels, strict=True)),
        **dict(zip(labels, labels, strict=True)),
    }
    chosen = reference or ("best_static" if "best_static" in policies else policies[0])
    if chosen not in named:
        accepted = [name for name in named if isinstance(name, str)]
        raise ValueError(f"reference: got '{chosen}'; accepted are {', '.join(accepted)}")
    return named[chosen]


def conclude(
    records: Sequence[EpisodeRecord],
    scenario: Scenario,
    reference: str,
    out_dir: Path,
    shown: Mapping[str, Trajectory] | None,
    *,
    learning_curve: Sequence[tuple[int, float, float, float]] | None = None,
    notes: Sequence[str] = (),
) -> Summary:
    """Write the report and print the table of the episodes that count.

    Args:
        records: all of them, `out_dir`'s.
        scenario: the task.
        reference: the label of the policy that the others are compared with.
        out_dir: for the report.
        shown: of one episode, by policy; None for those of the raw live records.
        learning_curve: of the trained policy among them: timesteps, mean, low, high.
        notes: paragraphs at the end of the report.

    Raises:
        ValueError: no episode counts, or none of the reference.
    """
    console = Console()
    results, left_out = split_results(records)
    for line in left_out:
        console.print(line, markup=False, highlight=False)
    if not results:
        raise ValueError(f"records: none of {len(records)} episodes counts, so there is no table")
    if all(record.policy != reference for record in results):
        raise ValueError(
            f"reference: no episode of '{reference}' counts; accepted is another policy, or a run "
            "in which some do"
        )
    policies, seeds = ({getattr(r, name) for r in records} for name in ("policy", "seed"))
    summary = write_report(
        out_dir,
        scenario,
        results,
        reference,
        recorded_trajectories(results, out_dir) if shown is None else shown,
        title=f"{scenario.name}: {len(policies)} policies, {len(seeds)} seeds",
        learning_curve=learning_curve,
        left_out=left_out,
        notes=notes,
    )
    console.print(rich_table(summary))
    if any(record.decisions for record in results):
        console.print(decisions_table(results))
        for line in decision_warnings(results):
            console.print(line, markup=False, highlight=False)
    console.print(f"report: {out_dir / 'report.html'}")
    return summary


def print_members(summaries: Mapping[str, Summary]) -> None:
    """Print the returns of all policies at each member of a family, against the member's reference.

    Args:
        summaries: by member.
    """
    table = Table(title="Return at each member of the family, 95 % intervals")
    for column in ("member", "policy", "return", "against the reference", "verdict"):
        table.add_column(column, justify="right" if column == "return" else "left")
    for member, summary in summaries.items():
        for policy in summary.policies:
            difference = summary.difference(policy, "return_")
            cells = (
                policy,
                cell(summary.estimate(policy, "return_"), None),
                f"({summary.reference})" if difference is None else difference_cell(difference),
            )
            verdict = "" if difference is None else difference.verdict
            table.add_row(member, *map(escape, cells), verdict)
        table.add_section()
    Console().print(table)


def decisions_table(records: Sequence[EpisodeRecord]) -> Table:
    """What the decisions of each LLM among the policies came to, over all of its episodes.

    Seconds are of a decision: the median over episodes of their medians, and the longest.
    """
    table = Table(title="Decisions of the LLMs, all episodes together")
    table.add_column("policy", overflow="fold")
    table.add_column("held", justify="right")
    table.add_column("failures", no_wrap=True)  # the others give way to it in a narrow terminal
    for column in ("tokens in + out", "USD", "s, median / longest"):
        table.add_column(column, justify="right")
    for policy, decisions in _decisions(records).items():
        failures = _failures(decisions)
        costs = [one.cost_usd for one in decisions if one.cost_usd is not None]
        medians_s = [one.latency_p50_s for one in decisions if one.latency_p50_s is not None]
        longest_s = [one.latency_max_s for one in decisions if one.latency_max_s is not None]
        table.add_row(
            escape(policy),
            f"{sum(one.held for one in decisions)} of {sum(one.decisions for one in decisions)}",
            "\n".join(f"{kind} {count}" for kind, count in failures.most_common()) or "none",
            f"{sum(one.prompt_tokens for one in decisions):,} + "
            f"{sum(one.completion_tokens for one in decisions):,}",
            f"{sum(costs):.4f}" if costs else "-",
            f"{median(medians_s):.3f} / {max(longest_s):.3f}" if medians_s and longest_s else "-",
        )
    return table


def decision_warnings(records: Sequence[EpisodeRecord]) -> list[str]:
    """A sentence for each LLM of whose decisions a tenth or more held for want of an answer."""
    lines = []
    for policy, decisions in _decisions(records).items():
        asked, held = (
            sum(getattr(one, name) for one in decisions) for name in ("decisions", "held")
        )
        if held >= WARN_HELD_SHARE * asked > 0:
            kinds = ", ".join(f"{kind} {n}" for kind, n in _failures(decisions).most_common())
            lines.append(
                f"{policy}: {held} of {asked} decisions held all caps for want of a valid answer "
                f"({kinds}); its results say as much of the endpoint or the form of its answers as "
                "of its judgement"
            )
    return lines


def _decisions(records: Sequence[EpisodeRecord]) -> dict[str, list[DecisionRecord]]:
    """By policy, of its episodes."""
    found: dict[str, list[DecisionRecord]] = {}
    for record in records:
        if record.decisions is not None:
            found.setdefault(record.policy, []).append(record.decisions)
    return found


def _failures(decisions: Sequence[DecisionRecord]) -> Counter[str]:
    return sum((Counter(one.failures) for one in decisions), Counter[str]())


def study_tables(result: dict[str, Any]) -> None:
    """Print what `run_study` found beside the published figures."""
    console = Console()
    table = Table(
        title=f"The study over {result['seeds']} seeds: ours ± standard error (published)"
    )
    table.add_column("policy")
    for name, unit in zip(METRICS, ("req/s", "requests", "s"), strict=True):
        table.add_column(f"{name}, {unit}", justify="right")
    digits = {"throughput": 3, "drops": 1, "p99_latency": 2}
    for policy, published in PUBLISHED.items():
        cells = []
        for name, places in digits.items():
            ours, error = result[policy][name], result["standard_error"][policy][name]
            cells.append(f"{ours:.{places}f} ± {error:.{places}f} ({published[name]:.{places}f})")
        table.add_row(policy, *cells)
    console.print(table)

    table = Table(title="What separates naive from differentiated: drops a run ± standard error")
    for column in ("scope", "window p99", "backlog"):
        table.add_column(column, justify="left" if column == "scope" else "right")
    cells_of = {
        cell: f"{result['ablation'][cell]['drops']:.1f} ± "
        f"{result['ablation'][cell]['standard_error']:.1f}"
        for cell in ABLATION
    }
    for scope in ("coupled", "per_tenant"):
        table.add_row(scope, cells_of[f"{scope}_window_p99"], cells_of[f"{scope}_backlog"])
    console.print(table)

    table = Table(title="Paired differences of drops (Wilcoxon, Holm)")
    for column in ("policy", "against", "difference, 95 % interval", "p", "verdict"):
        table.add_column(column)
    for differences in result["tests"].values():
        for d in differences:
            low, high = d["interval"]
            table.add_row(
                d["policy"],
                d["reference"],
                f"{d['mean']:+.1f} [{low:+.1f}, {high:+.1f}]",
                f"{d['p_holm']:.2g}",
                d["verdict"],
            )
    console.print(table)
