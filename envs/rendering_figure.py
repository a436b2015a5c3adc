"""The picture of an episode over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import DependencyNotInstalled

from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRAME_SHAPE = (640, 960, 3)
"""Height, width and channels of a picture."""
DPI = 100
"""Pixels per inch of a picture."""

_MAX_LINES = 8  # more tenants than this are shown as heat maps
_MAX_BINS = 500  # points of a line are thinned out from twice as many on
# Okabe and Ito's colours, safe for colour-blind readers, with grey for their yellow, which
# cannot be read on white.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
)
_HISTORY_FIELDS = ("cap", "queued", "latency_p99_s", "arrived", "completed", "dropped")


class EpisodeFigure:
    """Four panels over the time of an episode: caps, queues, p99 against SLO, throughput.

    Up to eight tenants have a line each, more are rows of a heat map. Axes are drawn when they
    change; a frame redraws only the data.

    Args:
        scenario: of the episodes.

    Attributes:
        figure: the matplotlib figure.

    Raises:
        DependencyNotInstalled: matplotlib is missing.
    """

    def __init__(self, scenario: Scenario) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise DependencyNotInstalled(
                "render_mode 'rgb_array' needs matplotlib: pip install 'vllm-tenant-tuning[report]'"
            ) from error
        self._scenario = scenario
        self._slo_s = np.array([tenant.slo_latency_p99_s for tenant in scenario.tenants])
        dtype = [(field, "f8") for field in _HISTORY_FIELDS]
        self._tenants = np.zeros((256, scenario.n_tenants), dtype)
        self._time_s = np.zeros(256)
        self._length = 0
        self._status = ""

        height, width = FRAME_SHAPE[0] / DPI, FRAME_SHAPE[1] / DPI
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
        self._canvas: Any = FigureCanvasAgg(self.figure)
        self._background: Any = None
        axes = self.figure.subplots(2, 2, sharex=True).ravel()
        many = scenario.n_tenants > _MAX_LINES
        panel = _HeatPanel if many else _LinePanel
        names = _labels(scenario.tenant_names, 12)
        self._cap = panel(axes[0], "cap (requests)", names, steps=True)
        self._queued = panel(axes[1], "queued at the gate (requests)", names)
        self._ratio = panel(axes[2], "p99 latency / SLO", names, ratio=True)
        self._rates = _LinePanel(
            axes[3],
            "requests/s",
            ("arrived", "completed", "dropped"),
            steps=True,
            colours=("#C8C8C8", "#222222", "#B2182B"),
        )
        axes[3].legend(
            loc="lower right",
            bbox_to_anchor=(1.02, 0.98),
            ncols=3,
            frameon=False,
            fontsize=8,
            handlelength=1.4,
            columnspacing=1.0,
        )
        for ax in axes:
            ax.set_xlim(0, scenario.control.episode_s)
        for ax in axes[2:]:
            ax.set_xlabel("time (s)", fontsize=9, color="#444444")
        if many:
            self.figure.subplots_adjust(0.1, 0.08, 0.935, 0.88, wspace=0.42, hspace=0.2)
        else:
            labels = [
                f"{name} (SLO {slo_s:g} s)" for name, slo_s in zip(names, self._slo_s, strict=True)
            ]
            self.figure.legend(
                axes[0].lines,
                labels,
                loc="upper left",
                bbox_to_anchor=(0.045, 0.955),
                ncols=4,
                frameon=False,
                fontsize=9,
                handlelength=1.6,
            )
            top = 0.87 if scenario.n_tenants <= 4 else 0.84
            self.figure.subplots_adjust(0.055, 0.08, 0.985, top, wspace=0.13, hspace=0.2)
        left, right = (0.1, 0.935) if many else (0.055, 0.985)
        self.figure.text(left, 0.962, scenario.name, fontsize=13, weight="bold")
        self._status_text = self.figure.text(
            right,
            0.962,
            "",
            fontsize=10,
            ha="right",
            color="#444444",
            animated=True,
        )

    def clear(self) -> None:
        """Forget the episode."""
        self._length = 0

    def add(self, telemetry: Telemetry) -> None:
        """Append one control interval.

        Args:
            telemetry: of one cluster; copied.
        """
        if self._length == len(self._time_s):
            self._tenants = np.concatenate((self._tenants, np.zeros_like(self._tenants)))
            self._time_s = np.concatenate((self._time_s, np.zeros_like(self._time_s)))
        cluster = telemetry.cluster
        for field in _HISTORY_FIELDS:
            self._tenants[field][self._length] = telemetry.tenants[field]
        self._time_s[self._length] = cluster["time_s"]
        self._length += 1
        self._status = (
            f"t = {cluster['time_s']:.10g} of {self._scenario.control.episode_s:.10g} s     "
            f"running {cluster['num_requests_running']:.0f} of "
            f"{self._scenario.max_num_seqs}     "
            f"KV cache {100 * cluster['kv_cache_usage']:.0f} %"
        )

    def frame(self) -> npt.NDArray[np.uint8]:
        """The picture of the episode so far, of `FRAME_SHAPE`; the caller's own copy."""
        time_s, tenants = self._time_s[: self._length], self._tenants[: self._length]
        # the first reading is at time 0, before any interval: it has no rate
        interval_s = np.diff(time_s, prepend=np.nan)
        rates = [
            tenants[field].sum(axis=1) / interval_s for field in ("arrived", "completed", "dropped")
        ]
        panels = (
            (self._cap, tenants["cap"]),
            (self._queued, tenants["queued"]),
            (self._ratio, tenants["latency_p99_s"] / self._slo_s),
            (self._rates, np.stack(rates, axis=1)),
        )
        # not any(...): every panel has to be updated
        rescaled = [panel.update(time_s, values) for panel, values in panels]
        if self._background is None or any(rescaled):
            self._canvas.draw()
            self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        self._canvas.restore_region(self._background)
        for panel, _ in panels:
            for artist in panel.artists:
                panel.ax.draw_artist(artist)
        self._status_text.set_text(self._status)
        self.figure.draw_artist(self._status_text)
        return np.asarray(self._canvas.buffer_rgba())[..., :3].copy()


class _Panel:
    """An axes whose artists follow the data; the limits follow from the data alone."""

    def __init__(self, ax: Axes, title: str, ratio: bool) -> None:
        self.ax = ax
        self.artists: list[Any] = []
        self._ratio = ratio
        self._limits: tuple[float, float] | None = None
        ax.set_title(title, loc="left", fontsize=10, color="#222222")
        ax.tick_params(labelsize=8, color="#BBBBBB", labelcolor="#444444")
        ax.spines[:].set_color("#BBBBBB")
        ax.spines[["top", "right"]].set_visible(False)

    def update(self, time_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> bool:
        """Show `values` (n, series); whether the axes have to be drawn anew."""
        limits = _limits(values, self._ratio)
        self._set_data(time_s, values)
        if limits == self._limits:
            return False
        self._limits = limits
        self._set_limits(*limits)
        return True

    def _set_data(self, time_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> None:
        raise NotImplementedError

    def _set_limits(self, low: float, high: float) -> None:
        raise NotImplementedError


class _LinePanel(_Panel):
    """A line per series."""

    def __init__(
        self,
        ax: Axes,
        title: str,
        names: list[str] | tuple[str, ...],
        steps: bool = False,
        ratio: bool = False,
        colours: tuple[str, ...] = COLOURS,
    ) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

        super().__init__(ax, title, ratio)
        if ratio:
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_locator(NullLocator())
            ax.axhspan(1, 1e12, color="#B2182B", alpha=0.06, linewidth=0)
            ax.axhline(1, color="#B2182B", linewidth=1, linestyle="--")
        else:
            ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        ax.grid(color="#EEEEEE", linewidth=0.8)
        ax.set_axisbelow(True)
        # where lines coincide, the wider ones below stay visible
        widths = np.linspace(2.2, 1.0, len(names)) if steps else np.full(len(names), 1.2)
        for name, colour, width in zip(names, colours, widths, strict=False):
            (line,) = ax.plot(
                [],
                [],
                color=colour,
                linewidth=width,
                label=name,
                # a reading belongs to the interval that ends with it
                drawstyle="steps-pre" if steps else "default",
                solid_joinstyle="round",
                animated=True,
            )
            self.artists.append(line)

    def _set_data(self, time_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> None:
        time_s, values = _envelope(time_s, values)
        for line, series in zip(self.artists, values.T, strict=True):
            line.set_data(time_s, series)

    def _set_limits(self, low: float, high: float) -> None:
        self.ax.set_ylim(low, high)


class _HeatPanel(_Panel):
    """A row per tenant, coloured by the value."""

    def __init__(
        self, ax: Axes, title: str, names: list[str], steps: bool = False, ratio: bool = False
    ) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.ticker import LogLocator, NullLocator

        super().__init__(ax, title, ratio)
        ax.set_facecolor("#F4F4F4")
        # the middle of the diverging colours is the SLO
        colours = colormaps["RdBu_r" if ratio else "viridis" if steps else "magma_r"]
        image = ax.imshow(
            np.zeros((len(names), 1)),
            cmap=colours.with_extremes(bad="#DDDDDD"),
            norm=LogNorm(0.1, 10) if ratio else Normalize(0, 1),
            aspect="auto",
            interpolation="nearest",
            animated=True,
        )
        self._n_rows = len(names)
        ax.set_ylim(self._n_rows, 0)
        every = math.ceil(self._n_rows / 16)
        ax.set_yticks(np.arange(0, self._n_rows, every) + 0.5, names[::every])
        ax.tick_params(axis="y", length=0)
        bar = ax.figure.colorbar(
            image,
            cax=ax.inset_axes((1.02, 0, 0.035, 1)),
            extend="min" if ratio else "neither",
            ticks=LogLocator(subs=(1, 2, 5)) if ratio else None,
            format="%g",
        )
        bar.minorlocator = NullLocator()
        bar.ax.tick_params(labelsize=8, color="#BBBBBB", labelcolor="#444444")
        self.artists.append(image)

    def _set_data(self, time_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> None:
        # columns are intervals, except before the first one
        columns = values[1:] if len(values) > 1 else values
        (image,) = self.artists
        image.set_data(columns.T)
        image.set_extent((0, time_s[-1], self._n_rows, 0))

    def _set_limits(self, low: float, high: float) -> None:
        # how far below its SLO a tenant is matters less than how far above
        self.artists[0].set_clim(1 / high if self._ratio else low, high)


def _limits(values: npt.NDArray[np.float64], ratio: bool) -> tuple[float, float]:
    """Round axis limits around all of `values`: from 0, or for ratios at least 0.2 to 2.

    Round limits seldom change, which is what makes a frame cheap.
    """
    finite = values[np.isfinite(values)]
    if ratio:
        positive = finite[finite > 0]
        below, above = 1 / positive.min(initial=0.2), positive.max(initial=2.0)
        return 1 / _round_up(below, (1, 2, 5, 10)), _round_up(above, (1, 2, 5, 10))
    largest = max(1.0, 1.05 * finite.max(initial=0.0))
    return 0.0, _round_up(largest, (1, 1.5, 2, 3, 4, 5, 6, 8, 10))


def _envelope(
    time_s: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Smallest and largest values of bins narrower than a pixel; short series as they are."""
    per_bin = len(time_s) // _MAX_BINS
    if per_bin < 2:
        return time_s, values
    first = np.arange(0, len(time_s), per_bin)
    extremes = np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)
    return np.repeat(time_s[first], 2), np.stack(extremes, axis=1).reshape(-1, values.shape[1])


def _round_up(value: float, steps: tuple[float, ...]) -> float:
    """The smallest of `steps` times a power of ten that is not below `value`."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * step for step in steps if unit * step >= value * (1 - 1e-9))


def _labels(names: tuple[str, ...], width: int) -> list[str]:
    """Names of at most `width` characters; parts that all share go first."""
    if len(names) > 1 and max(map(len, names)) > width:
        head = _shared(names)
        tail = _shared([name[head:][::-1] for name in names])
        names = tuple(name[head : len(name) - tail] for name in names)
    return [name if len(name) <= width else f"{name[: width - 5]}…{name[-4:]}" for name in names]


def _shared(names: Sequence[str]) -> int:
    """Length of what all names begin with, up to the last separator in it."""
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in same)
    return 1 + max(map(prefix.rfind, "-_."))
