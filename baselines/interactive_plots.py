"""The figures of a benchmark's page, as plotly.js draws them: plain data and layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_tenant_tuning.baselines.decision_traces import DecisionTrace
from vllm_tenant_tuning.baselines.metrics import METRICS, TESTED
from vllm_tenant_tuning.baselines.plotly_parts import (
    Figure,
    axis,
    error_bars,
    layout_of,
    menu,
    name_axis,
    numbers,
    plain,
    points,
)
from vllm_tenant_tuning.baselines.statistics import FloatArray, Verdict
from vllm_tenant_tuning.baselines.suite_statistics import (
    AblationResult,
    ScenarioResult,
    SuiteScore,
)
from vllm_tenant_tuning.rendering_figure import COLOURS
from vllm_tenant_tuning.scenario import Scenario

MAX_BINS = 120
"""Points of a line of a decision trace."""

MAX_REASONS = 3
"""Moves of a tenant that one point of a decision trace explains."""

_VERDICT_COLOURS: dict[Verdict, str] = {
    "better": COLOURS[0],
    "worse": COLOURS[1],
    "mixed": COLOURS[3],
    "not significant": "#8A8A8A",
}
_DASHES = ("solid", "dash", "dot", "dashdot")
_TITLES = {metric.field: metric.title for metric in METRICS}


def profile_figure(scores: Sequence[SuiteScore], shown: Sequence[str]) -> Figure:
    """Performance profiles with their bands; policies not in `shown` wait in the legend."""
    data: list[Figure] = []
    for i, score in enumerate(scores):
        colour, profile = COLOURS[i % len(COLOURS)], score.profile
        visible = True if score.policy in shown else "legendonly"
        name = plain(score.policy)
        around = np.concatenate([profile.thresholds, profile.thresholds[::-1]])
        data.append(
            {
                "type": "scatter",
                "x": numbers(around),
                "y": numbers(np.concatenate([profile.high, profile.low[::-1]])),
                "fill": "toself",
                "fillcolor": colour,
                "opacity": 0.15,
                "line": {"width": 0},
                "mode": "lines",
                "hoverinfo": "skip",
                "legendgroup": name,
                "showlegend": False,
                "visible": visible,
            }
        )
        data.append(
            {
                "type": "scatter",
                "x": numbers(profile.thresholds),
                "y": numbers(profile.share),
                "mode": "lines",
                "name": name,
                "legendgroup": name,
                "line": {"color": colour, "dash": _DASHES[i // len(COLOURS) % len(_DASHES)]},
                "visible": visible,
                "hovertemplate": "%{y:.3f} above %{x:.3f}",
            }
        )
    layout = layout_of(
        520 + 10 * len(scores),
        xaxis=axis("normalised return (0: lowest mean, 1: highest mean of a scenario)"),
        yaxis=axis("share of episodes above", range=[0, 1.02]),
    )
    return {"data": data, "layout": layout}


def score_figure(scores: Sequence[SuiteScore]) -> Figure:
    """Interquartile means of the normalised returns with their intervals."""
    means = [score.iqm for score in scores]
    low, high = np.array([score.interval for score in scores]).T
    names = [plain(score.policy) for score in scores]
    data = [points(means, names, low, high, [COLOURS[0]] * len(scores))]
    layout = layout_of(
        130 + 24 * len(scores),
        xaxis=axis("normalised return, interquartile mean"),
        yaxis=name_axis(),
        showlegend=False,
    )
    return {"data": data, "layout": layout}


def verdict_figure(
    found: Mapping[str, Mapping[str, Mapping[str, Verdict]]], scenarios: Sequence[str]
) -> Figure:
    """Policies by scenarios, coloured by what the tests of one metric say; a menu of metrics."""
    order: tuple[Verdict, ...] = ("worse", "not significant", "mixed", "better")
    policies = list(found)
    colours = [
        [i / 4 + edge, _VERDICT_COLOURS[v]] for i, v in enumerate(order) for edge in (0, 0.25)
    ]
    data = []
    for metric in TESTED:
        said = [[found[p].get(name, {}).get(metric) for name in scenarios] for p in policies]
        data.append(
            {
                "type": "heatmap",
                "x": [plain(name) for name in scenarios],
                "y": [plain(policy) for policy in policies],
                "z": [[None if v is None else order.index(v) for v in row] for row in said],
                "text": [["not played" if v is None else v for v in row] for row in said],
                "hovertemplate": "%{y} in %{x}: %{text}<extra></extra>",
                "zmin": -0.5,
                "zmax": 3.5,
                "colorscale": colours,
                "xgap": 2,
                "ygap": 2,
                "showscale": False,
                "visible": metric == TESTED[0],
            }
        )
    layout = layout_of(
        250 + 24 * len(policies),
        xaxis={"tickangle": -45, "automargin": True, "type": "category"},
        yaxis=name_axis(),
        updatemenus=menu([_TITLES[metric] for metric in TESTED], 1),
    )
    return {"data": data, "layout": layout}


def difference_figure(result: ScenarioResult) -> Figure:
    """Paired differences to the best static caps with intervals; a menu of metrics."""
    summary = result.summary
    data = []
    for metric in TESTED:
        known = [d for d in summary.differences if d.metric == metric and d.mean is not None]
        means = [d.mean for d in known if d.mean is not None]
        ends = [d.interval or (d.mean, d.mean) for d in known]
        low, high = np.array(ends, float).reshape(-1, 2).T
        drawn = points(
            means,
            [plain(d.policy) for d in known],
            low,
            high,
            [_VERDICT_COLOURS[d.verdict] for d in known],
        )
        drawn["marker"]["symbol"] = ["circle" if d.significant else "circle-open" for d in known]
        drawn["text"] = [
            d.verdict + ("" if d.p_holm is None else f", p {d.p_holm:.2g} (Holm)") for d in known
        ]
        drawn["hovertemplate"] = "%{y}: %{x:.4g}<br>%{text}<extra></extra>"
        drawn["visible"] = metric == TESTED[0]
        data.append(drawn)
    layout = layout_of(
        190 + 24 * (len(summary.policies) - 1),
        xaxis=axis(f"difference to {plain(summary.reference)}", zeroline=True),
        yaxis=name_axis(),
        showlegend=False,
        updatemenus=menu([_TITLES[metric] for metric in TESTED], 1),
    )
    return {"data": data, "layout": layout}


def pareto_figure(result: ScenarioResult) -> Figure:
    """Goodput over p99 latency, held capacity as colour, the Pareto front as diamonds."""
    summary = result.summary
    members = summary.pareto.members if summary.pareto else ()
    fields = ("latency_p99_s", "goodput_rps", "cost")
    shown = [p for p in summary.policies if summary.estimate(p, "latency_p99_s").mean is not None]
    found = {field: [summary.estimate(p, field) for p in shown] for field in fields}
    x, y, cost = ([e.mean for e in found[field]] for field in fields)
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": numbers(x),
        "y": numbers(y),
        "text": [plain(p) if p in members else "" for p in shown],
        "textposition": "top center",
        "textfont": {"size": 10},
        "hovertext": [
            f"{plain(p)}{' (Pareto front)' if p in members else ''}<br>held capacity {c:.3g}"
            for p, c in zip(shown, cost, strict=True)
        ],
        "hovertemplate": "%{hovertext}<br>p99 %{x:.4g} s, goodput %{y:.4g}/s<extra></extra>",
        "error_x": error_bars(found["latency_p99_s"]),
        "error_y": error_bars(found["goodput_rps"]),
        "marker": {
            "symbol": ["diamond" if p in members else "circle" for p in shown],
            "size": 11,
            "color": numbers(cost),
            "colorscale": "Cividis",
            "reversescale": True,
            "line": {"color": "#333333", "width": 1},
            "colorbar": {
                "orientation": "h",
                "thickness": 12,
                "y": 1.02,
                "yanchor": "bottom",
                "title": {"text": "held capacity", "side": "top"},
            },
        },
        "cliponaxis": False,
    }
    layout = layout_of(
        480,
        xaxis=axis("p99 latency, s (left is better)"),
        yaxis=axis("goodput, req/s (up is better)"),
        showlegend=False,
    )
    return {"data": [trace], "layout": layout}


def trace_figure(traces: Mapping[str, DecisionTrace], scenario: Scenario) -> Figure:
    """Caps, queues and p99 latencies over time; a menu of policies, the reasons where one points.

    Long episodes are shown in bins: the last cap, the longest queue, the highest p99.
    """
    data: list[Figure] = []
    slo_s = np.array([tenant.slo_latency_p99_s for tenant in scenario.tenants])
    for policy, trace in traces.items():
        series = _binned(trace, slo_s)
        reasons = _reasons(trace, series["time_s"], scenario)
        for i, tenant in enumerate(scenario.tenant_names):
            for yaxis, field in (("y3", "caps"), ("y2", "queued"), ("y", "ratio")):
                line: Figure = {
                    "type": "scatter",
                    "mode": "lines",
                    "x": numbers(series["time_s"]),
                    "y": numbers(series[field][:, i]),
                    "yaxis": yaxis,
                    "name": plain(tenant),
                    "legendgroup": plain(tenant),
                    "showlegend": field == "caps",
                    "line": {"color": COLOURS[i % len(COLOURS)], "width": 1.5},
                    "visible": policy == next(iter(traces)),
                    "hovertemplate": "%{y:.3g} at %{x:.0f} s",
                }
                if field == "caps":
                    line["line"]["shape"] = "vh"
                    line["text"] = reasons[i]
                    line["hovertemplate"] = "%{y} at %{x:.0f} s%{text}"
                data.append(line)
    layout = layout_of(
        640,
        xaxis=axis("time, s", anchor="y", range=[0, scenario.control.episode_s]),
        yaxis=axis("p99 / SLO", domain=[0, 0.28], rangemode="tozero"),
        yaxis2=axis("queued", domain=[0.34, 0.62], rangemode="tozero"),
        yaxis3=axis("cap", domain=[0.68, 0.96], rangemode="tozero"),
        shapes=[
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "yref": "y",
                "y0": 1,
                "y1": 1,
                "line": {"color": "#333333", "width": 1, "dash": "dot"},
            }
        ],
        updatemenus=menu(list(traces), 3 * scenario.n_tenants),
    )
    return {"data": data, "layout": layout}


def ablation_figure(
    ablations: Sequence[AblationResult], results: Mapping[str, ScenarioResult]
) -> Figure:
    """Normalised returns of an ablation's cells, a line a scenario.

    Args:
        ablations: one ablation, scenario by scenario.
        results: by the scenario's name; they give the scale.
    """
    data = []
    for i, one in enumerate(ablations):
        low, high = results[one.scenario].scale if one.scenario in results else (0.0, 0.0)
        if high == low:
            continue
        found = [one.estimates[label, "return_"] for label in one.labels]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [plain(label) for label in one.labels],
                "y": numbers(
                    [None if e.mean is None else (e.mean - low) / (high - low) for e in found]
                ),
                "error_y": error_bars(found, 1 / (high - low)),
                "name": plain(one.scenario),
                "line": {
                    "color": COLOURS[i % len(COLOURS)],
                    "dash": _DASHES[i // len(COLOURS) % len(_DASHES)],
                },
                "hovertemplate": "%{x}: %{y:.3f}",
            }
        )
    layout = layout_of(
        500,
        xaxis={"type": "category", "automargin": True},
        yaxis=axis("normalised return, mean"),
    )
    return {"data": data, "layout": layout}


def _binned(trace: DecisionTrace, slo_s: FloatArray) -> dict[str, FloatArray]:
    time_s = np.array(trace.time_s)
    first = np.arange(0, time_s.size, -(-time_s.size // MAX_BINS))
    last = np.append(first[1:], time_s.size) - 1
    return {
        "time_s": time_s[last],
        "caps": np.array(trace.caps, float)[last],
        "queued": np.maximum.reduceat(np.array(trace.queued, float), first),
        "ratio": np.fmax.reduceat(np.array(trace.latency_p99_s, float), first) / slo_s,
    }


def _reasons(trace: DecisionTrace, ends_s: FloatArray, scenario: Scenario) -> list[list[str]]:
    """By tenant, for each bin what its moves were and why."""
    told: list[list[list[str]]] = [[[] for _ in ends_s] for _ in scenario.tenant_names]
    for move in trace.moves:
        tenant = scenario.tenant_names.index(move.tenant)
        k = int(np.searchsorted(ends_s, move.time_s, side="right"))
        told[tenant][k].append(f"<br>{move.change:+d} at {move.time_s:g} s: {plain(move.reason)}")
    return [
        [
            "".join(lines[:MAX_REASONS])
            + (f"<br>and {len(lines) - MAX_REASONS} more" if len(lines) > MAX_REASONS else "")
            for lines in tenant_lines
        ]
        for tenant_lines in told
    ]
