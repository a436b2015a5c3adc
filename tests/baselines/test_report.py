"""The report shows the records' numbers, on its own, to everybody, in a real browser."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import WIDTHS, look
from matplotlib.collections import PathCollection
from rich.console import Console
from synthetic import record

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.agents.llm import Failure
from vllm_tenant_tuning.baselines.comparison import decision_warnings, decisions_table
from vllm_tenant_tuning.baselines.metrics import TESTED
from vllm_tenant_tuning.baselines.plots import (
    difference_plot,
    learning_curve_plot,
    pareto_plot,
    trajectory_plot,
)
from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.report import rich_table, write_report
from vllm_tenant_tuning.baselines.statistics import Summary, summarize

HOSTILE = "<script>document.title='owned'</script>|[bold]"
POLICIES = ("old", "new", HOSTILE)
STUDY = load_scenario("study")


def records(n: int = 12) -> list[EpisodeRecord]:
    rng = np.random.default_rng(0)
    made = []
    for policy in POLICIES:
        for seed in range(n):
            gain = 1.0 if policy == "new" else 0.0
            made.append(
                record(
                    policy,
                    seed,
                    **{"return": 100 + 5 * gain + rng.normal()},
                    goodput_rps=0.6 + 0.1 * gain + 0.01 * rng.normal(),
                    weighted_drops=float(rng.poisson(30)),
                    latency_p99_s=11 + rng.normal(),
                    cost=0.2 + 0.1 * gain,
                )
            )
    return made


def trajectory() -> dict[str, Any]:
    steps = np.arange(1, 21)
    two = np.stack([steps, 21 - steps], axis=1).astype(float)
    p99_s = two.copy()
    p99_s[:5] = np.nan
    return {
        "time_s": steps * 3.0,
        "caps": two % 8,
        "queued": two,
        "latency_p99_s": p99_s,
        "completed": two,
        "dropped": two / 2,
    }


def write(folder: Path, made: list[EpisodeRecord]) -> Summary:
    shown = {policy: trajectory() for policy in POLICIES}
    curve = [(1000 * i, 10.0 * i, 10.0 * i - 5, 10.0 * i + 5) for i in range(1, 9)]
    return write_report(
        folder, STUDY, made, "old", shown, title=HOSTILE, learning_curve=curve, notes=["Said so."]
    )


class Page(HTMLParser):
    """All tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_files_show_the_means_of_the_records(tmp_path: Path) -> None:
    made = records()
    summary = write(tmp_path, made)
    assert summary == summarize(made, "old")
    page = Page((tmp_path / "report.html").read_text())
    table = (tmp_path / "table.md").read_text()
    for policy in ("old", "new"):
        mean = np.mean([r.goodput_rps for r in made if r.policy == policy])
        assert f"{mean:.3f}" in table
        assert f"{mean:.3f}" in page.text
    assert json.loads((tmp_path / "summary.json").read_text())["reference"] == "old"
    row = next(line for line in table.splitlines() if line.startswith("| new"))
    cells = [cell.strip() for cell in row.split("|")]
    assert re.search(r"\d \+ \[", cells[2])  # return: significantly better
    assert re.search(r"\d = \[", cells[6])  # weighted drops: not significant
    assert STUDY.question in page.text
    assert "12 seeds" in page.text
    assert "Said so." in page.text


def test_the_page_needs_nothing_else_and_trusts_no_name(tmp_path: Path) -> None:
    write(tmp_path, records())
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "&lt;script&gt;" in text
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "data", "action"):
            inside = ("#", "data:image/png;base64,")
            assert (attributes.get(name) or "#").startswith(inside), attributes
    assert not re.search(r"url\((?!#|'#|\"#)", text)
    assert "@import" not in text


def test_figures_do_not_share_ids(tmp_path: Path) -> None:
    """Clip paths of one figure must not cut another."""
    write(tmp_path, records())
    clips = [
        set(re.findall(r'<clipPath id="([^"]+)"', (tmp_path / f"{name}.svg").read_text()))
        for name in ("pareto", "differences", "trajectory", "learning_curve")
    ]
    assert all(clips)
    assert sum(map(len, clips)) == len(set.union(*clips))


def test_one_seed_is_said_to_give_no_interval(tmp_path: Path) -> None:
    write(tmp_path, records(1))
    page = Page((tmp_path / "report.html").read_text())
    assert "One seed gives no interval and no test." in page.text
    assert "[" not in (tmp_path / "table.md").read_text().splitlines()[2]


def test_an_episode_that_was_cut_short_is_said(tmp_path: Path) -> None:
    made = records()
    made[3] = made[3].model_copy(update={"truncation": "server_died"})
    write(tmp_path, made)
    assert "cut short: server_died" in Page((tmp_path / "report.html").read_text()).text


def test_figures_draw_the_numbers() -> None:
    made = records()
    summary = summarize(made, "old")
    axes = pareto_plot(summary).axes[0]
    drawn = {
        (round(float(x), 9), round(float(y), 9))
        for points in axes.collections
        if isinstance(points, PathCollection)
        for x, y in points.get_offsets()
    }
    assert drawn == {
        tuple(
            round(float(np.mean([getattr(r, field) for r in made if r.policy == policy])), 9)
            for field in ("latency_p99_s", "goodput_rps")
        )
        for policy in POLICIES
    }

    panels = difference_plot(summary).axes
    for axes, field in zip(panels, TESTED, strict=True):
        points = [line for line in axes.lines if line.get_marker() in {"o", "s", "D"}]
        for point, policy in zip(points, POLICIES[1:], strict=True):
            found = summary.difference(policy, field)
            assert found is not None
            assert point.get_xdata()[0] == pytest.approx(found.mean)
            assert (point.get_markerfacecolor() == "white") == (not found.significant)

    seen = trajectory()
    figure = trajectory_plot({str(i): seen for i in range(12)}, STUDY)
    assert len(figure.axes) == 12 * 4
    caps, _, ratio, rates = figure.axes[:4]
    np.testing.assert_array_equal(caps.lines[1].get_ydata(), seen["caps"][:, 1])
    slo_s = STUDY.tenants[0].slo_latency_p99_s
    np.testing.assert_allclose(ratio.lines[0].get_ydata(), seen["latency_p99_s"][:, 0] / slo_s)
    np.testing.assert_allclose(rates.lines[3].get_ydata(), seen["dropped"][:, 1] / 3.0)

    (axes,) = learning_curve_plot([(1, 2.0, 1.0, 3.0), (2, 4.0, 3.0, 5.0)]).axes
    assert axes.lines[0].get_ydata().tolist() == [2.0, 4.0]


def test_long_trajectories_keep_extremes_and_totals() -> None:
    """600 intervals become 120 bins of five: a short peak stays, no drop is lost."""
    steps = np.arange(1, 601)
    seen = {name: np.zeros((600, 2)) for name in ("caps", "queued", "completed", "dropped")}
    seen |= {"time_s": steps * 3.0, "latency_p99_s": np.full((600, 2), np.nan)}
    seen["queued"][333, 0] = 17.0
    seen["dropped"][100:103, 1] = 4.0
    _, queued, _, rates = trajectory_plot({"p": seen}, STUDY).axes
    assert max(queued.lines[0].get_ydata()) == 17.0
    assert len(queued.lines[0].get_ydata()) == 120
    assert sum(rates.lines[3].get_ydata()) * 15.0 == pytest.approx(12.0)


def test_names_are_no_mathematics(tmp_path: Path) -> None:
    """Matplotlib would read dollars as a formula and stop at a broken one."""
    made = [record(policy, seed) for policy in ("old", r"$\frac$") for seed in range(3)]
    shown = {r"$\frac$": trajectory()}
    write_report(tmp_path, STUDY, made, "old", shown, title="t")
    assert "frac" in (tmp_path / "pareto.svg").read_text()


def test_caveats_are_said(tmp_path: Path) -> None:
    made = records(6)[1:]
    made[-1] = made[-1].model_copy(update={"latency_p99_s": None, "failed": 3.0})
    write(tmp_path, made)
    text = " ".join(Page((tmp_path / "report.html").read_text()).text.split())
    assert "old: 5 of 6 seeds" in text
    assert "1 episodes without a completion" in text
    assert "3 requests failed" in text
    # Five pairs: the smallest two-sided p is 2/32; of eight comparisons Holm takes it eightfold.
    assert "smallest exact p is 0.5 after" in text
    caveats = json.loads((tmp_path / "summary.json").read_text())["caveats"]
    assert any("5 of 6 seeds" in caveat for caveat in caveats)


def test_without_trajectories_there_is_no_such_figure(tmp_path: Path) -> None:
    write_report(tmp_path, STUDY, records(3), "old", {}, title="t")
    assert not (tmp_path / "trajectory.svg").exists()
    assert (tmp_path / "pareto.png").stat().st_size > 10_000


def test_the_terminal_table_names_the_reference() -> None:
    summary = summarize(records(), "old")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_table(summary))
    text = " ".join(console.export_text().split())
    assert rich_table(summary).row_count == 3
    assert "Against old" in text
    assert "[bold]" in text  # a name, not a style
    for policy in POLICIES:
        mean = summary.estimate(policy, "goodput_rps").mean
        assert f"{mean:.3f}" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_in_a_browser_nothing_overflows_and_nothing_runs(tmp_path: Path, width: int) -> None:
    write(tmp_path, records())
    seen = look(
        tmp_path / "report.html",
        tmp_path,
        width,
        """
        const svgs = [...page.querySelectorAll("figure svg")];
        return {figures: svgs.filter((svg) => svg.getBoundingClientRect().height > 100).length};
        """,
    )
    assert seen["title"] == HOSTILE
    assert seen["overflow"] == 0
    assert seen["figures"] == 4


def asked(policy: str, seed: int, held: int, failures: dict[str, int]) -> EpisodeRecord:
    """An LLM's episode of 40 decisions."""
    decisions = {
        "model": "m",
        "decisions": 40,
        "answered": 40 - held,
        "held": held,
        "applied": 40 - held,
        "attempts": 40 + sum(failures.values()),
        "retries": sum(failures.values()),
        "failures": failures,
        "prompt_tokens": 1_234_567,
        "completion_tokens": 12_345,
        "unreported": 0,
        "cost_usd": None,
        "latency_p50_s": 0.5,
        "latency_p95_s": 0.6,
        "latency_p99_s": 0.7,
        "latency_max_s": 0.8,
    }
    return record(policy, seed, decisions=decisions)


def test_every_kind_of_failure_is_read_in_a_terminal_of_80_columns() -> None:
    kinds = {str(kind): 10 + i for i, kind in enumerate(Failure)}
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(decisions_table([asked("llm:some-org/some-model-[8b]", 0, 7, kinds)]))
    shown = " ".join(console.export_text().replace("│", " ").split())
    assert "…" not in shown
    assert "7 of 40" in shown
    assert "0.500" in shown
    assert "0.800" in shown
    assert "longest" in shown
    for kind in kinds:
        assert kind in shown


def test_an_llm_that_mostly_held_is_named_below_the_table() -> None:
    made = [record("static", 0)]
    made += [asked("llm:fine", seed, 3, {"timeout": 3}) for seed in (0, 1)]  # 6 of 80
    made += [asked("llm:tenth", 0, 8, {"timeout": 8}), asked("llm:tenth", 1, 0, {})]
    made += [asked("llm:mute", 0, 40, {"connection": 60, "timeout": 10})]
    lines = decision_warnings(made)
    assert [line.split(" decisions")[0] for line in lines] == [
        "llm:tenth: 8 of 80",
        "llm:mute: 40 of 40",
    ]
    assert "(connection 60, timeout 10)" in lines[1]
