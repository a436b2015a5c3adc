"""Parts of plotly.js figures: points with intervals, axes, menus, plain texts and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_tenant_tuning.baselines.statistics import Estimate, FloatArray

Figure = dict[str, Any]
"""`data`, traces, and `layout`: the arguments of `Plotly.newPlot`; or a part of them."""

_GRID = "#E6E6E6"


def points(
    x: Sequence[float], y: Sequence[str], low: FloatArray, high: FloatArray, colours: Sequence[str]
) -> Figure:
    """Points with horizontal intervals, each of its own colour.

    Args:
        x: values.
        y: categories.
        low: lower ends of the intervals.
        high: upper ends.
        colours: of the points.
    """
    values = np.array(x, float)
    return {
        "type": "scatter",
        "mode": "markers",
        "x": numbers(values),
        "y": list(y),
        # a BCa interval can lie beside its own mean
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": numbers(np.maximum(high - values, 0)),
            "arrayminus": numbers(np.maximum(values - low, 0)),
            "color": "#8A8A8A",
            "thickness": 1.5,
        },
        "marker": {"color": list(colours), "size": 9, "line": {"width": 1.5}},
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }


def error_bars(found: Sequence[Estimate], factor: float = 1.0) -> Figure:
    """Intervals around means as the lengths of error bars, times a factor."""
    ends = [(0.0 if e.mean is None else e.mean, e.mean_interval) for e in found]
    return {
        "type": "data",
        "symmetric": False,
        "array": numbers([max(0.0, i[1] - m) * factor if i else 0.0 for m, i in ends]),
        "arrayminus": numbers([max(0.0, m - i[0]) * factor if i else 0.0 for m, i in ends]),
        "color": "#8A8A8A",
        "thickness": 1,
    }


def layout_of(height: int, **further: Any) -> Figure:
    """A layout that takes the width it is given, and is so many pixels high."""
    return {
        "height": height,
        "margin": {"l": 55, "r": 15, "t": 70, "b": 50},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#222222"},
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": -0.18, "yanchor": "top"},
    } | further


def axis(title: str, **further: Any) -> Figure:
    """An axis of numbers."""
    return {
        "title": {"text": title},
        "gridcolor": _GRID,
        "zerolinecolor": "#999999",
        "automargin": True,
    } | further


def name_axis() -> Figure:
    """The axis of policies, the first on top."""
    return {
        "type": "category",
        "autorange": "reversed",
        "automargin": True,
        "tickfont": {"size": 10},
    }


def menu(labels: Sequence[str], traces_each: int) -> list[Figure]:
    """A menu of which one choice at a time is seen."""
    n = len(labels) * traces_each
    return [
        {
            "type": "dropdown",
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
            "pad": {"b": 32},
            "buttons": [
                {
                    "label": plain(label),
                    "method": "restyle",
                    "args": ["visible", [j // traces_each == i for j in range(n)]],
                }
                for i, label in enumerate(labels)
            ],
        }
    ]


def plain(text: str) -> str:
    """Text on one line in which plotly.js finds no markup."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")


def numbers(values: Any) -> list[float | None]:
    """JSON's numbers, to six digits; None where there is none."""
    return [
        None if value is None or not np.isfinite(value) else float(f"{value:.6g}")
        for value in (values.tolist() if isinstance(values, np.ndarray) else values)
    ]
