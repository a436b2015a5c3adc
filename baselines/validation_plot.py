"""The figure of a validation: latency in simulation over latency measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from vllm_tenant_tuning.baselines.plots import WIDTH_IN
from vllm_tenant_tuning.rendering_figure import COLOURS

Floats = npt.NDArray[np.float64]

POINTS: Final = 60
"""Of a line: more would only make the file larger."""
_INK, _SOFT = "#222222", "#555555"


def validation_plot(
    cells: Sequence[tuple[str, str, Mapping[str, tuple[Floats, Floats]]]],
) -> Figure:
    """Shares of requests completed within a latency, a panel for each episode.

    Args:
        cells: row's title, column's title, and by tenant the latencies in seconds of the
            requests that were completed in simulation and live. Titles repeat.

    Raises:
        ValueError: no cells.
    """
    if not cells:
        raise ValueError("cells: got none; at least one is needed")
    rows = list(dict.fromkeys(row for row, _, _ in cells))
    columns = list(dict.fromkeys(column for _, column, _ in cells))
    height_in = 0.9 + 1.55 * len(rows)
    figure = Figure(figsize=(WIDTH_IN, height_in))
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    figure.subplots_adjust(
        left=0.075,
        right=0.985,
        top=1 - 0.6 / height_in,
        bottom=0.45 / height_in,
        wspace=0.08,
        hspace=0.45,
    )
    for ax in axes.flat:
        ax.set_visible(False)
    tenants = list(dict.fromkeys(name for _, _, found in cells for name in found))
    for row, column, found in cells:
        ax = axes[rows.index(row), columns.index(column)]
        ax.set_visible(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        ax.tick_params(labelsize=7.5, colors=_SOFT)
        ax.set_title(f"{row}, {column}", fontsize=8, color=_INK, loc="left", pad=3)
        for name, sides in found.items():
            colour = COLOURS[tenants.index(name) % len(COLOURS)]
            for latency_s, style in zip(sides, ((0, (2.2, 1.2)), "-"), strict=True):
                x, y = _shares(latency_s)
                ax.plot(x, y, color=colour, linestyle=style, linewidth=1.3)
        ax.set_xlim(left=0)
        ax.set_ylim(0, 1.02)
        ax.xaxis.set_major_locator(MaxNLocator(5))
    for ax in axes[-1]:
        ax.set_xlabel("latency, s", fontsize=8.5, color=_SOFT)
    for ax in axes[:, 0]:
        ax.set_ylabel("share of requests", fontsize=8, color=_SOFT)
    figure.legend(
        [
            *(
                Line2D([], [], color=COLOURS[i % len(COLOURS)], linewidth=2)
                for i in range(len(tenants))
            ),
            Line2D([], [], color=_SOFT, linestyle="-"),
            Line2D([], [], color=_SOFT, linestyle=(0, (2.2, 1.2))),
        ],
        [*tenants, "measured", "simulated"],
        loc="upper left",
        bbox_to_anchor=(0.06, 1.0),
        ncols=len(tenants) + 2,
        frameon=False,
        fontsize=8.5,
        labelcolor=_SOFT,
    )
    return figure


def _shares(latency_s: Floats) -> tuple[Floats, Floats]:
    """Points of the empirical distribution."""
    if latency_s.size == 0:
        return np.empty(0), np.empty(0)
    shares = np.linspace(0, 1, min(POINTS, latency_s.size + 1))
    return np.quantile(latency_s, shares), shares
