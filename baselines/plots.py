"""The figures of a comparison: Pareto front, paired differences, trajectories, learning curve.

Every function returns a matplotlib `Figure` that belongs to no global state; `save_plot` writes
it. They are drawn for a width of 800 pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from vllm_tenant_tuning.baselines.metrics import METRICS, TESTED, Metric
from vllm_tenant_tuning.baselines.statistics import Difference, Summary, Verdict
from vllm_tenant_tuning.rendering_figure import COLOURS
from vllm_tenant_tuning.scenario import Scenario

FloatArray = npt.NDArray[np.float64]

WIDTH_IN = 8.0
_VERDICTS: dict[Verdict, tuple[str, str, str]] = {
    "better": (COLOURS[0], "o", "better"),
    "worse": (COLOURS[1], "s", "worse"),
    "mixed": (COLOURS[3], "D", "mixed: mean against ranks"),
    "not significant": ("#8A8A8A", "o", "not significant"),
}
_INK, _SOFT, _LINE = "#222222", "#555555", "#BBBBBB"
_MAX_BINS = 120  # points of a trajectory's line: its panel is hardly wider in pixels
_METRIC = {metric.field: metric for metric in METRICS}


def pareto_plot(summary: Summary) -> Figure:
    """Goodput over p99 latency, cost as colour, the Pareto front marked.

    Points are means, bars their bootstrap intervals. Policies without a completion have no
    latency and are named below the axes.
    """
    figure = Figure(figsize=(WIDTH_IN, 5.2))
    ax = figure.add_axes((0.09, 0.115, 0.59, 0.76))
    _style(ax)
    shown = [p for p in summary.policies if summary.estimate(p, "latency_p99_s").mean is not None]
    members = summary.pareto.members if summary.pareto else ()
    fields = ("latency_p99_s", "goodput_rps", "cost")
    estimates = {field: [summary.estimate(p, field) for p in shown] for field in fields}
    x, y, cost = (np.array([e.mean for e in estimates[field]], float) for field in fields)
    for i in range(len(shown)):
        ax.errorbar(
            x[i],
            y[i],
            xerr=_bars(x[i], estimates["latency_p99_s"][i].mean_interval),
            yerr=_bars(y[i], estimates["goodput_rps"][i].mean_interval),
            color=_LINE,
            linewidth=1.2,
            zorder=2,
        )
    low, high = cost.min(initial=1.0), cost.max(initial=0.0)
    if high - low < 1e-9:  # one colour needs a scale too
        low, high = low - 0.01, low + 0.01
    for on_front, marker, size, edge in ((False, "o", 60, "#888888"), (True, "D", 75, "#000000")):
        chosen = np.array([(p in members) == on_front for p in shown], bool)
        points = ax.scatter(
            x[chosen],
            y[chosen],
            c=cost[chosen],
            s=size,
            marker=marker,
            cmap="cividis_r",
            vmin=low,
            vmax=high,
            edgecolors=edge,
            linewidths=1.5 if on_front else 0.8,
            zorder=3,
        )
    bar = figure.colorbar(
        points,
        cax=figure.add_axes((0.74, 0.935, 0.22, 0.022)),
        orientation="horizontal",
        format="%.3g",
    )
    bar.locator = MaxNLocator(3)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, color=_LINE, labelcolor=_SOFT)
    figure.text(0.725, 0.946, "held capacity", ha="right", va="center", fontsize=8.5, color=_SOFT)
    ax.set_xlabel("p99 latency, s (left is better)", fontsize=10, color=_INK)
    ax.set_ylabel("goodput, req/s (up is better)", fontsize=10, color=_INK)
    ax.margins(0.07)
    _name_points(ax, shown, x, y, members, summary.reference)
    handles = [
        Line2D([], [], marker="D", color="none", markeredgecolor="#000000", markeredgewidth=1.5),
        Line2D([], [], marker="o", color="none", markeredgecolor="#888888"),
        Line2D([], [], color=_LINE, linewidth=1.2),
    ]
    figure.legend(
        handles,
        ["on the Pareto front", "dominated", "95 % interval"],
        loc="upper left",
        bbox_to_anchor=(0.08, 0.975),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        labelcolor=_SOFT,
        columnspacing=1.2,
        handletextpad=0.4,
        handlelength=1.2,
    )
    absent = [p for p in summary.policies if p not in shown]
    if absent:
        text = "without a completion: " + ", ".join(map(_short, absent))
        figure.text(0.985, 0.02, text, ha="right", fontsize=8, color=_SOFT)
    return figure


def difference_plot(summary: Summary) -> Figure:
    """A forest plot per tested metric: each policy minus the reference, with 95 % intervals."""
    policies = [p for p in summary.policies if p != summary.reference]
    panel_in = 0.26 * max(len(policies), 2) + 0.25
    rows = math.ceil(len(TESTED) / 2)
    height_in = rows * (panel_in + 0.65) + 0.55
    figure = Figure(figsize=(WIDTH_IN, height_in))
    for i, field in enumerate(TESTED):
        row, column = divmod(i, 2)
        bottom_in = height_in - 0.85 - (row + 1) * panel_in - row * 0.65
        ax = figure.add_axes(
            (0.235 + 0.39 * column, bottom_in / height_in, 0.35, panel_in / height_in)
        )
        found = [summary.difference(p, field) for p in policies]
        _forest(ax, _METRIC[field], found)
        ax.set_yticks(range(len(policies)), [_short(p) if column == 0 else "" for p in policies])
    handles = [
        Line2D([], [], color=colour, marker=marker, markerfacecolor=_fill(verdict))
        for verdict, (colour, marker, _) in _VERDICTS.items()
    ]
    figure.legend(
        handles,
        [label for _, _, label in _VERDICTS.values()],
        loc="upper left",
        bbox_to_anchor=(0.01, 1 - 0.24 / height_in),
        ncols=4,
        frameon=False,
        fontsize=8.5,
        labelcolor=_SOFT,
        columnspacing=1.4,
    )
    title = f"Paired differences to {_short(summary.reference, 40)}, 95 % intervals of the mean"
    figure.text(0.015, 1 - 0.22 / height_in, title, fontsize=10, color=_INK)
    return figure


def trajectory_plot(
    trajectories: Mapping[str, Mapping[str, FloatArray]], scenario: Scenario
) -> Figure:
    """One episode under several policies: a row per policy, a column per quantity.

    Long episodes are shown in bins: the mean cap, the longest queue, the highest p99 latency,
    and the rates of completions and drops. Up to eight tenants have a line each; of more, the
    median and the range are shown.

    Args:
        trajectories: by policy: `time_s` (K,), and (K, n_tenants) each `caps`, `queued`
            (requests), `latency_p99_s` (seconds, NaN before the first completion), `completed`
            and `dropped` (requests in the interval).
        scenario: of the episodes.

    Raises:
        ValueError: no trajectories.
    """
    if not trajectories:
        raise ValueError("trajectories: got none; at least one is needed")
    many = scenario.n_tenants > len(COLOURS)
    row_in = 1.35 if len(trajectories) <= 4 else 1.1
    top_in, bottom_in = 0.85 + 0.17 * (not many and scenario.n_tenants > 4), 0.45
    height_in = top_in + bottom_in + row_in * len(trajectories)
    figure = Figure(figsize=(WIDTH_IN, height_in))
    axes = figure.subplots(len(trajectories), 4, sharex=True, sharey="col", squeeze=False)
    figure.subplots_adjust(
        left=0.045,
        right=0.97,
        top=1 - (top_in - 0.06) / height_in,
        bottom=bottom_in / height_in,
        wspace=0.2,
        hspace=0.32 if len(trajectories) <= 4 else 0.42,
    )
    slo_s = np.array([tenant.slo_latency_p99_s for tenant in scenario.tenants])
    titles = (
        "cap, requests",
        "queued, requests",
        "p99 latency / SLO",
        "completed, dropped (- -), /s",
    )
    for row, (policy, trajectory) in zip(axes, trajectories.items(), strict=True):
        series = _binned(trajectory, slo_s)
        for ax, name in zip(row, ("caps", "queued", "ratio", "completed"), strict=True):
            _style(ax, size=7.5)
            _lines(ax, series["time_s"], series[name], many, steps=name == "caps")
        _lines(row[3], series["time_s"], series["dropped"], many, dashed=True)
        row[0].set_title(
            _short(policy, 60), loc="left", fontsize=8.5, weight="bold", color=_INK, pad=4
        )
    for ax, title in zip(axes[0], titles, strict=True):
        ax.text(0, 1 + 0.32 / row_in, title, transform=ax.transAxes, fontsize=8.5, color=_INK)
    for ax in axes[:, 2]:
        ax.axhline(1, color="#000000", linewidth=1.2, linestyle=":", zorder=5)
    _log_scale(axes[0, 2])
    for i in (0, 1, 3):
        axes[0, i].set_ylim(bottom=0)
        axes[0, i].yaxis.set_major_locator(MaxNLocator(4, integer=i < 2))
    axes[0, 0].set_xlim(0, scenario.control.episode_s)
    axes[0, 0].xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 3, 5, 6, 9, 10]))
    for ax in axes[-1]:
        ax.set_xlabel("time, s", fontsize=8.5, color=_SOFT)
    if many:
        label = f"median and range of {scenario.n_tenants} tenants"
        figure.text(0.045, 1 - 0.2 / height_in, label, fontsize=9, color=_SOFT)
    else:
        figure.legend(
            [
                Line2D([], [], color=colour, linewidth=2)
                for colour, _ in zip(COLOURS, slo_s, strict=False)
            ],
            [
                f"{_short(name, 16)} (SLO {limit_s:g} s)"
                for name, limit_s in zip(scenario.tenant_names, slo_s, strict=True)
            ],
            loc="upper left",
            bbox_to_anchor=(0.035, 1 - 0.02 / height_in),
            ncols=4,
            frameon=False,
            fontsize=8.5,
            labelcolor=_SOFT,
            handlelength=1.4,
        )
    return figure


def learning_curve_plot(curve: Sequence[tuple[int, float, float, float]]) -> Figure:
    """Return of training episodes over timesteps: mean line and interval band.

    Args:
        curve: (timesteps, mean, low, high) each.

    Raises:
        ValueError: an empty curve.
    """
    if not curve:
        raise ValueError("curve: got none; at least one point is needed")
    figure = Figure(figsize=(WIDTH_IN, 3.4))
    ax = figure.add_axes((0.105, 0.16, 0.87, 0.78))
    _style(ax)
    timesteps, mean, low, high = np.array(curve, float).T
    ax.fill_between(timesteps, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    marker = "o" if len(curve) < 40 else ""
    ax.plot(timesteps, mean, color=COLOURS[0], linewidth=1.6, marker=marker, markersize=3)
    ax.set_xlabel("training timesteps", fontsize=10, color=_INK)
    ax.set_ylabel("return of an episode", fontsize=10, color=_INK)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.xaxis.set_major_locator(MaxNLocator(6))
    return figure


def save_plot(figure: Figure, folder: Path, name: str) -> str:
    """Write `name.png` and `name.svg`, the same bytes for the same figure.

    Returns:
        The `<svg>` element, ready to stand in a page: its ids begin with `name`, its text is
        text, and it refers to nothing outside itself.
    """
    figure.savefig(folder / f"{name}.png", dpi=200, metadata={"Software": None})
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata=nothing)
    text = (folder / f"{name}.svg").read_text(encoding="utf-8")
    return _inline(text[text.index("<svg") :], name)


def _inline(svg: str, name: str) -> str:
    """Ids and what refers to them, inside tags alone, made the figure's own."""
    return re.sub(
        r"<[^>]+>",
        lambda tag: re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", tag[0]),
        svg,
    )


def _forest(ax: Axes, metric: Metric, found: Sequence[Difference | None]) -> None:
    _style(ax)
    ax.axvline(0, color=_INK, linewidth=1)
    for y, difference in enumerate(found):
        if difference is None or difference.mean is None:
            ax.annotate(
                "no common seed",
                (0, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=_SOFT,
            )
            continue
        colour, marker, _ = _VERDICTS[difference.verdict]
        ax.errorbar(
            difference.mean,
            y,
            xerr=_bars(difference.mean, difference.interval),
            color=colour,
            marker=marker,
            markersize=5.5,
            markerfacecolor=_fill(difference.verdict),
            linewidth=1.8,
        )
    better = "right" if metric.better == "higher" else "left"
    ax.set_title(f"{metric.title} ({better} is better)", loc="left", fontsize=9, color=_INK)
    ax.set_ylim(max(len(found), 2) - 0.5, -0.5)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(visible=False, axis="y")


def _fill(verdict: Verdict) -> str:
    return "white" if verdict == "not significant" else _VERDICTS[verdict][0]


def _bars(mean: float, interval: tuple[float, float] | None) -> Any:
    """Lengths (2, 1) for `errorbar`; a BCa interval can lie beside its own mean."""
    if interval is None:
        return None
    return [[max(0.0, mean - interval[0])], [max(0.0, interval[1] - mean)]]


def _name_points(
    ax: Axes,
    names: Sequence[str],
    x: FloatArray,
    y: FloatArray,
    members: Sequence[str],
    reference: str,
) -> None:
    """Names beside the axes at the height of their points, apart enough to be read."""
    ax.autoscale_view()
    low, high = ax.get_ylim()
    order = np.argsort(y, kind="stable")
    gap = min(0.058, 1 / max(len(names), 1))
    places = (y[order] - low) / (high - low)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    if len(places):
        places[-1] = min(places[-1], 0.99)
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - gap)
    for place, i in zip(places, order, strict=True):
        ax.annotate(
            _short(names[i]) + (" (ref.)" if names[i] == reference else ""),
            (x[i], y[i]),
            (1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=_INK,
            weight="bold" if names[i] in members else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": "#D0D0D0",
                "linewidth": 0.8,
                "shrinkB": 5,
                "relpos": (0, 0.5),
            },
            zorder=1,
        )


def _binned(trajectory: Mapping[str, FloatArray], slo_s: FloatArray) -> dict[str, FloatArray]:
    """What the panels show, in at most `_MAX_BINS` bins of equal length."""
    time_s = trajectory["time_s"]
    first = np.arange(0, len(time_s), math.ceil(len(time_s) / _MAX_BINS))
    last = np.append(first[1:], len(time_s)) - 1
    steps = np.diff(np.append(first, len(time_s)))[:, None]
    span_s = np.diff(time_s[last], prepend=0.0)[:, None]
    ratio = np.fmax.reduceat(trajectory["latency_p99_s"], first) / slo_s
    return {
        "time_s": time_s[last],
        "caps": np.add.reduceat(trajectory["caps"], first) / steps,
        "queued": np.maximum.reduceat(trajectory["queued"], first),
        "ratio": np.where(ratio > 0, ratio, np.nan),
        "completed": np.add.reduceat(trajectory["completed"], first) / span_s,
        "dropped": np.add.reduceat(trajectory["dropped"], first) / span_s,
    }


def _lines(
    ax: Axes,
    time_s: FloatArray,
    values: FloatArray,
    many: bool,
    steps: bool = False,
    dashed: bool = False,
) -> None:
    style: dict[str, Any] = {
        "linestyle": (0, (2.5, 1.2)) if dashed else "-",
        "drawstyle": "steps-pre" if steps else "default",
    }
    if many:
        known = np.where(np.isnan(values).all(axis=1, keepdims=True), -1.0, values)
        low, middle, high = np.nanpercentile(known, [0, 50, 100], axis=1)
        shown = middle >= 0
        colour = COLOURS[1] if dashed else COLOURS[0]
        ax.fill_between(time_s, low, high, where=shown, color=colour, alpha=0.2, linewidth=0)
        ax.plot(time_s[shown], middle[shown], color=colour, linewidth=1, **style)
        return
    # where lines coincide, the wider ones below stay visible
    widths = np.linspace(1.8, 0.9, values.shape[1])
    for series, colour, width in zip(values.T, COLOURS, widths, strict=False):
        ax.plot(time_s, series, color=colour, linewidth=width, **style)


def _log_scale(ax: Axes) -> None:
    low, high = ax.get_ylim()
    ax.set_yscale("log")
    ax.set_ylim(max(min(low, 0.5), 0.05), max(high, 2.0))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=6))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def _style(ax: Axes, size: float = 8.5) -> None:
    ax.tick_params(labelsize=size, color=_LINE, labelcolor=_SOFT)
    ax.spines[:].set_color(_LINE)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color="#EEEEEE", linewidth=0.8)
    ax.set_axisbelow(True)


def _short(name: str, width: int = 24) -> str:
    """A name on one line of at most `width` characters; dollars are no mathematics."""
    name = " ".join(name.split())
    if len(name) > width:
        name = f"{name[: width - width // 2 - 1]}…{name[-(width // 2) :]}"
    return name.replace("$", r"\$")
