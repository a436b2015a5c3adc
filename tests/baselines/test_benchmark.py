"""The benchmark: what its tables, page and Markdown say is what the raw records say."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import yaml
from browser import look
from scipy import stats
from test_env import short
from test_report import Page

from vllm_tenant_tuning.baselines import evaluate as evaluate_module
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.metrics import METRICS, TESTED

HOSTILE = "</script><script>document.title='owned'</script>|<b>"
SCENARIOS = {"premium_burst": 120.0, "study": 120.0}
POLICIES = ("best_static", "naive", "differentiated")
N_SEEDS = 4
FILES = ("benchmark.html", "benchmark.md")


def write_suite(folder: Path, **changes: Any) -> Path:
    """A small suite of two short scenarios, as files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, episode_s in SCENARIOS.items():
        paths.append(folder / f"{name}.yaml")
        content = short(name, episode_s).model_dump(mode="json")
        paths[-1].write_text(yaml.safe_dump(content))
    cells = [
        {"label": HOSTILE, "policy": "naive"},
        {"label": "signal", "policy": "coupled_backlog"},
        {"label": "signal and scope", "policy": "differentiated"},
    ]
    suite = {
        "name": "small",
        "description": "Two short scenarios.",
        "scenarios": [str(path) for path in paths],
        "policies": [*POLICIES, "model"],
        "seeds": f"0:{N_SEEDS}",
        "traced": list(POLICIES),
        "ablations": [
            {"name": "steps", "question": "Which?", "compared": "previous", "cells": cells}
        ],
    }
    file = folder / "suite.yaml"
    file.write_text(yaml.safe_dump(suite | changes))
    return file


def benchmark(suite: Path, out_dir: Path, *further: str) -> int:
    arguments = ["--suite", str(suite), "--out", str(out_dir), "--workers", "1"]
    models = suite.parent / "models"
    models.mkdir(exist_ok=True)
    return main(["benchmark", *arguments, "--models", str(models), *further])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    assert benchmark(write_suite(folder / "suite"), folder / "out") == 0
    return folder / "out"


def raw(out_dir: Path, scenario: str) -> dict[str, list[dict[str, Any]]]:
    """By policy its episodes in the order of seeds, read without the project's code."""
    lines = (out_dir / scenario / "episodes.jsonl").read_text().splitlines()
    found: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(map(json.loads, lines), key=lambda record: record["seed"]):
        found.setdefault(record["policy"], []).append(record)
    return found


def values(records: list[dict[str, Any]], field: str) -> np.ndarray:
    return np.array([record[field.rstrip("_")] for record in records], float)


def tables(out_dir: Path) -> dict[tuple[str, str], list[list[str]]]:
    """The Markdown's tables by heading and title, their rows as cells."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    heading = title = ""
    for line in (out_dir / "benchmark.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("**"):
            title = line.strip("*")
        elif line.startswith("| "):
            cells = re.split(r"(?<!\\) ?\| ?", line)[1:-1]
            found.setdefault((heading, title), []).append(cells)
    return found


def table(out_dir: Path, heading: str, title: str) -> dict[str, list[str]]:
    """The one table under a heading whose title begins so: by first cell the others."""
    (rows,) = [
        t for (h, name), t in tables(out_dir).items() if h == heading and name.startswith(title)
    ]
    return {row[0]: row[1:] for row in rows[2:]}


def test_every_episode_is_played_once_with_common_seeds(played: Path) -> None:
    for scenario in SCENARIOS:
        found = raw(played, scenario)
        assert len(found) == len(POLICIES) + 1  # the ablation's coupled_backlog too
        for records in found.values():
            assert [record["seed"] for record in records] == list(range(N_SEEDS))
        arrived = {
            tuple(t["arrived"] for t in records[0]["tenants"].values())
            for records in found.values()
        }
        assert len(arrived) == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tables_show_the_numbers_of_the_records(played: Path, scenario: str) -> None:
    found = raw(played, scenario)
    (best,) = [policy for policy in found if policy.startswith("best_static:")]
    fields = [metric.field for metric in METRICS if metric.field in (*TESTED, "cost")]
    means = table(played, scenario, "Means")
    iqms = table(played, scenario, "Interquartile means")
    assert list(means) == list(iqms) == [best, "naive", "differentiated"]
    for policy in means:
        for field, mean, iqm in zip(fields, means[policy], iqms[policy], strict=True):
            ours = values(found[policy], field)
            assert float(mean.split()[0]) == pytest.approx(ours.mean(), rel=0.006, abs=5e-5)
            middle = np.sort(ours)[1:3]  # of four
            assert float(iqm.split()[0]) == pytest.approx(middle.mean(), rel=0.006, abs=5e-5)
            low, high = map(float, re.findall(r"-?[\d.]+", mean.split("[")[1]))
            assert ours.min() - 6e-3 * abs(ours.min()) <= low <= high
            assert high <= ours.max() + 6e-3 * abs(ours.max())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tests_are_wilcoxons_with_holms_correction(played: Path, scenario: str) -> None:
    found = raw(played, scenario)
    (best,) = [policy for policy in found if policy.startswith("best_static:")]
    shown = table(played, scenario, "Paired differences")
    raw_p = {}
    for policy, cells in shown.items():
        for field, cell in zip(TESTED, cells, strict=True):
            ours = values(found[policy], field) - values(found[best], field)
            assert float(cell.split()[0]) == pytest.approx(ours.mean(), rel=0.006, abs=5e-5)
            p = stats.wilcoxon(ours, zero_method="pratt").pvalue if ours.any() else 1.0
            if len(set(np.abs(ours))) == N_SEEDS and ours.all():
                assert p == pytest.approx(signed_rank_p(ours))
            raw_p[policy, field] = p
    corrected = holm(raw_p)
    for policy, cells in shown.items():
        for field, cell in zip(TESTED, cells, strict=True):
            said = float(re.search(r" p ([\d.e-]+)$", cell)[1])  # type: ignore[index]
            assert said == pytest.approx(corrected[policy, field], rel=0.06)


def signed_rank_p(differences: np.ndarray) -> float:
    """Two-sided and exact, by trying all signs; without ties and zeros."""
    ranks = stats.rankdata(np.abs(differences))
    seen = ranks[differences > 0].sum()
    sums = [
        sum(rank for rank, up in zip(ranks, signs, strict=True) if up)
        for signs in itertools.product((False, True), repeat=len(ranks))
    ]
    tail = min(np.mean([s <= seen for s in sums]), np.mean([s >= seen for s in sums]))
    return float(min(1.0, 2 * tail))


def holm(p_values: dict[Any, float]) -> dict[Any, float]:
    corrected, highest = {}, 0.0
    for i, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p_values) - i) * p))
        corrected[key] = highest
    return corrected


def test_scores_are_normalised_returns(played: Path) -> None:
    scores: dict[str, list[float]] = {}
    for scenario in SCENARIOS:
        found = raw(played, scenario)
        returns = {
            policy.partition(":")[0]: values(records, "return_")
            for policy, records in found.items()
            if policy != "coupled_backlog"  # of the ablation alone
        }
        low, high = (end(r.mean() for r in returns.values()) for end in (min, max))
        for policy, ours in returns.items():
            scores.setdefault(policy, []).extend((ours - low) / (high - low))
    shown = table(played, "Over all scenarios", "Interquartile means")
    expected = {policy: np.sort(ours)[2:6].mean() for policy, ours in scores.items()}
    assert list(shown) == sorted(expected, key=lambda policy: -expected[policy])
    for policy, (cell,) in shown.items():
        assert float(cell.split()[0]) == pytest.approx(expected[policy], abs=6e-4)


def test_fairness_is_that_of_the_records(played: Path) -> None:
    found = raw(played, "premium_burst")
    shown = table(played, "premium_burst", "Fairness")
    for policy, cells in shown.items():
        jain = []
        good = []
        for record in found[policy]:
            tenants = record["tenants"].values()
            share = np.array([t["completed"] / t["arrived"] for t in tenants])
            jain.append(share.sum() ** 2 / (share.size * (share**2).sum()))
            good.append([t["good"] / t["arrived"] for t in tenants])
        assert float(cells[0].split()[0]) == pytest.approx(np.mean(jain), abs=6e-4)
        assert [float(c) for c in cells[1:]] == pytest.approx(np.mean(good, axis=0), abs=6e-4)


def test_an_ablation_compares_each_cell_with_the_one_before(played: Path) -> None:
    ((_, rows),) = [
        (key, rows)
        for key, rows in tables(played).items()
        if key[0] == "Which?" and key[1].startswith("Paired differences")
    ]
    for scenario, _, against, *cells in rows[2:]:
        found = raw(played, scenario)
        pair = (
            ("coupled_backlog", "naive")
            if against != "signal"
            else ("differentiated", "coupled_backlog")
        )
        ours, theirs = (values(found[policy], "return_") for policy in pair)
        assert float(cells[0].split()[0]) == pytest.approx((ours - theirs).mean(), rel=6e-3)
    assert len(rows) - 2 == 2 * len(SCENARIOS)


def test_traces_tell_why_the_caps_moved(played: Path) -> None:
    """The differentiated rule's reasons, from the queues and caps of the trace itself."""
    lines = (played / "premium_burst" / "traces.jsonl").read_text().splitlines()
    traces = {trace["policy"]: trace for trace in map(json.loads, lines)}
    trace = traces["differentiated"]
    names = [tenant.name for tenant in short("premium_burst").tenants]
    assert trace["moves"]
    for move in trace["moves"]:
        k = trace["time_s"].index(move["time_s"]) if move["time_s"] else None
        i = names.index(move["tenant"])
        if k is None:  # the first decision sees an empty cluster
            assert (move["change"], move["reason"][:15]) == (-1, "backlog at most")
            continue
        assert trace["caps"][k + 1][i] - trace["caps"][k][i] == move["change"]
        backlog = trace["queued"][k][i] / trace["caps"][k][i]
        assert (backlog > 1.5) == (move["change"] > 0) == move["reason"].startswith("backlog above")
        assert (backlog <= 0.5) == (move["change"] < 0)
    (best,) = [trace for policy, trace in traces.items() if policy.startswith("best_static")]
    assert best["moves"] == []
    shown = tables(played)["premium_burst", "Why the caps moved, seed 0"]
    counted = {(row[1], row[2]): int(row[3]) for row in shown if row[0] == "differentiated"}
    assert sum(counted.values()) == len(trace["moves"])


def test_report_only_gives_the_same_bytes(played: Path, tmp_path: Path) -> None:
    before = {name: (played / name).read_bytes() for name in FILES}
    elsewhere = tmp_path / "docs" / "table.md"
    raw_before = (played / "study" / "episodes.jsonl").read_bytes()
    arguments = ["benchmark", "--out", str(played), "--report-only"]
    assert main([*arguments, "--markdown", str(elsewhere)]) == 0
    assert elsewhere.read_bytes() == before["benchmark.md"]
    for name in FILES:
        (played / name).unlink()
    assert main(arguments) == 0
    assert {name: (played / name).read_bytes() for name in FILES} == before
    assert (played / "study" / "episodes.jsonl").read_bytes() == raw_before


def test_published_records_may_be_gzipped(played: Path, tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_bytes((played / "benchmark.json").read_bytes())
    for file in played.glob("*/*.jsonl"):
        packed = tmp_path / file.parent.name / f"{file.name}.gz"
        packed.parent.mkdir(exist_ok=True)
        packed.write_bytes(gzip.compress(file.read_bytes()))
    assert main(["benchmark", "--out", str(tmp_path), "--report-only"]) == 0
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (played / name).read_bytes()


def test_the_markdown_links_to_the_published_page(played: Path, tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    arguments = ["--report-only", "--markdown", str(file), "--page-url", '../a"b.html']
    assert main(["benchmark", "--out", str(played), *arguments]) == 0
    lines = file.read_text().splitlines()
    (link,) = [line for line in lines if line.startswith("<a ")]
    assert link.startswith('<a href="../a&#34;b.html">')
    lines.remove(link)
    plain = (played / "benchmark.md").read_text().splitlines()
    assert [line for line in lines if line] == [line for line in plain if line]


def test_the_answer_stands_first(played: Path) -> None:
    text = (played / "benchmark.md").read_text()
    assert re.findall(r"^## (.*)$", text, re.M)[0] == "Answer"
    page = (played / "benchmark.html").read_text()
    assert page.index(">Answer</h2>") < page.index(">Against the best static caps</h2>")
    found = raw(played, "premium_burst")
    (best,) = [policy for policy in found if policy.startswith("best_static:")]
    cell = table(played, "Answer", "Return")["naive"][0]
    ours, theirs = (values(found[policy], "return_").mean() for policy in ("naive", best))
    said = float(re.search(r"([+-][\d.]+) %$", cell)[1])  # type: ignore[index]
    assert said == pytest.approx(100 * (ours - theirs) / abs(theirs), rel=6e-3)


def test_an_interruption_keeps_everything(
    played: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite = write_suite(tmp_path / "suite")
    original = evaluate_module.append_record
    kept = []

    def interrupted(path: Path, record: Any) -> None:
        if len(kept) == 6:
            raise KeyboardInterrupt
        original(path, record)
        kept.append(record)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "append_record", interrupted)
        assert benchmark(suite, tmp_path) == 130
    file = tmp_path / "premium_burst" / "episodes.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 6

    # what there is can be reported, and the report says what is missing
    assert main(["benchmark", "--out", str(tmp_path), "--report-only"]) == 0
    text = (tmp_path / "benchmark.md").read_text()
    assert "study.yaml: not played." in text
    assert "naive has 2 of 4 seeds." in text

    with file.open("a") as torn:
        torn.write('{"scenario": "premi')
    capsys.readouterr()
    assert benchmark(suite, tmp_path) == 0
    said = capsys.readouterr().out
    assert "premium_burst (1 of 2): episodes: 16 of 16" in said
    assert "best static caps" not in said.partition("study")[0]  # found before the interruption
    assert file.read_text().splitlines()[:6] == lines
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (played / name).read_bytes()


def test_the_page_needs_nothing_else(played: Path) -> None:
    text = (played / "benchmark.html").read_text()
    body, _, scripts = text.partition('<script type="application/json"')
    page = Page(body)
    assert "script" not in {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert "default-src 'none'" in body
    figures = json.loads(re.search(r">(.*?)</script>", scripts, re.S)[1])  # type: ignore[index]
    assert len(figures) == 4 + 3 * len(SCENARIOS)
    for name, figure in figures.items():
        assert f'id="{name}"' in body
        go.Figure(figure)  # refuses what plotly.js does not know


def test_figures_draw_the_numbers(played: Path) -> None:
    text = (played / "benchmark.html").read_text()
    start = text.index('id="figures">') + len('id="figures">')
    figures = json.loads(text[start : text.index("</script>", start)])
    found = raw(played, "study")
    points = figures["study-pareto"]["data"][0]
    assert points["x"] == pytest.approx(
        [values(found[p], "latency_p99_s").mean() for p in table(played, "study", "Means")],
        rel=1e-5,
    )
    lines = (played / "study" / "traces.jsonl").read_text().splitlines()
    trace = next(t for t in map(json.loads, lines) if t["policy"] == "differentiated")
    drawn = figures["study-trace"]["data"][2 * 2 * 3]  # third policy, first tenant: caps
    assert drawn["y"] == [caps[0] for caps in trace["caps"]]
    told = [text for text in drawn["text"] if text]
    assert sum(text.count("<br>") for text in told) == sum(
        move["tenant"] == short("study").tenant_names[0] for move in trace["moves"]
    )


@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser_every_plot_is_drawn_and_nothing_overflows(
    played: Path, tmp_path: Path, width: int
) -> None:
    seen = look(
        played / "benchmark.html",
        tmp_path,
        width,
        """
        while (!page.body.dataset.drawn) await new Promise((resume) => setTimeout(resume, 50));
        const plots = [...page.querySelectorAll(".plot")];
        const box = (plot) => plot.querySelector(".main-svg").getBoundingClientRect();
        return {
          plots: plots.length,
          drawn: plots.filter((plot) => box(plot).height > 100 && box(plot).width > 300
            && plot.querySelector(".points path, .lines path, .heatmaplayer image, .hm")).length,
          wide: plots.filter((plot) => box(plot).right > page.documentElement.clientWidth).length,
        };
        """,
        budget_ms=120_000,
    )
    assert seen["title"] == "Benchmark: small"
    assert seen["plots"] == seen["drawn"] == 4 + 3 * len(SCENARIOS)
    assert seen["wide"] == 0
    assert seen["overflow"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policies": ["best_static", "static:2/2", "static:02/2"], "traced": []},
            "policies: got static:2/2, static:02/2, which are the same in premium_burst",
        ),
        ({"scenarios": ["study", "azure"]}, "trace AzureLLMInferenceTrace_conv.csv: not found"),
    ],
)
def test_a_suite_that_cannot_be_played_whole_is_not_begun(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("VLLM_TENANT_TRACE_DIR", str(tmp_path))
    suite = write_suite(tmp_path / "suite", ablations=[], **changes)
    assert benchmark(suite, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report-only", "--seeds", "0:2"], "--seeds: accepted when something is played"),
        (["--report-only"], "holds no benchmark.json"),
        (["--seeds", "5:2"], "seeds: got '5:2'"),
        (["--suite", "none"], "suite: 'none' is neither a packaged suite (default) nor a file"),
        (["--workers", "0"], "--workers: got 0"),
        (["--models", "nowhere"], "--models: got 'nowhere'; accepted is a folder"),
    ],
)
def test_what_is_refused_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["benchmark", "--out", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "benchmark.json: Invalid JSON"), (b"\xff{}", "benchmark.json: ")],
)
def test_a_plan_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, reason: str
) -> None:
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    (out_dir / "benchmark.json").write_bytes(content)
    assert benchmark(write_suite(tmp_path / "suite"), out_dir) == 2
    assert reason in capsys.readouterr().err
    assert (out_dir / "benchmark.json").read_bytes() == content
