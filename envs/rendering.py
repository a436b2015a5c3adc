"""An episode on the screen: as text, as pictures over time, or live."""

from __future__ import annotations

import math
import time
import weakref
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.error import DependencyNotInstalled, ResetNeeded

from vllm_tenant_tuning.rendering_figure import DPI, FRAME_SHAPE, EpisodeFigure
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.telemetry import Telemetry

RENDER_MODES = ("ansi", "rgb_array", "human")
HUMAN_FRAMES_PER_S = 10
"""How fast `human` shows an episode at most; a slower environment is not held up."""

_BAR_CELLS = 12
_COUNTS = ("arrived", "completed", "dropped")


class EpisodeView:
    """What `render()` shows of an episode.

    Args:
        scenario: gives the names, the SLOs and the length of the episode.
        render_mode: one of `RENDER_MODES`. `rgb_array` needs matplotlib. `human` is a window
            where matplotlib finds a display, else a view in the terminal, which needs rich.

    Raises:
        DependencyNotInstalled: a library of the extra `report` is missing.
    """

    def __init__(self, scenario: Scenario, render_mode: str) -> None:
        self._scenario = scenario
        self._latest: Telemetry | None = None
        self._figure: EpisodeFigure | None = None
        self._screen: _Screen | None = None
        if render_mode == "rgb_array":
            self._figure = EpisodeFigure(scenario)
        elif render_mode == "human":
            self._screen = _Window.open(scenario.name) or _Terminal()
            if isinstance(self._screen, _Window):
                self._figure = EpisodeFigure(scenario)

    def start(self, telemetry: Telemetry) -> None:
        """Begin a new episode; the one before is forgotten.

        Args:
            telemetry: of one cluster, at time 0.
        """
        if self._figure is not None:
            self._figure.clear()
        self.add(telemetry)

    def add(self, telemetry: Telemetry) -> None:
        """Go on by one control interval.

        Args:
            telemetry: of one cluster; kept until the next one comes.
        """
        self._latest = telemetry
        if self._figure is not None:
            self._figure.add(telemetry)

    def render(self) -> str | npt.NDArray[np.uint8] | None:
        """Show the episode so far.

        Returns:
            Text for `ansi`, (height, width, 3) uint8 of `FRAME_SHAPE` for `rgb_array`, None for
            `human`.

        Raises:
            ResetNeeded: no episode has begun.
        """
        if self._latest is None:
            raise ResetNeeded("render() needs an episode: call reset() first")
        shown = (
            episode_text(self._scenario, self._latest)
            if self._figure is None
            else self._figure.frame()
        )
        if self._screen is None:
            return shown
        self._screen.show(shown)
        return None

    def close(self) -> None:
        """Close the window or leave the terminal's live view; may be called twice."""
        if self._screen is not None:
            self._screen.close()


# --- text ---------------------------------------------------------------------------------


def episode_text(scenario: Scenario, telemetry: Telemetry) -> str:
    """The state of an episode as plain text, one row per tenant, of constant width.

    Args:
        scenario: of the episode.
        telemetry: of one cluster.
    """
    control = scenario.control
    tenants: Any = telemetry.tenants
    cluster: Any = telemetry.cluster
    name_width = max(6, *map(len, scenario.tenant_names))
    cells = max(3, min(control.cap_max, _BAR_CELLS))
    lines = [
        f"{scenario.name}  t = {cluster['time_s']:.10g} of {control.episode_s:.10g} s",
        f"{'':<{name_width + cells + 38}}  {'in the interval':>17}  {'since the start':>20}",
        f"{'tenant':<{name_width}} {'cap':>5} {'':<{cells}} {'flight':>6} {'queued':>6} "
        f"{'p99 s':>7}  {'SLO s':>7}   {'arriv':>5} {'compl':>5} {'drop':>5}  "
        f"{'arriv':>6} {'compl':>6} {'drop':>6}",
    ]
    for tenant, row in zip(scenario.tenants, tenants, strict=True):
        p99_s, slo_s = row["latency_p99_s"], tenant.slo_latency_p99_s
        lines.append(
            f"{tenant.name:<{name_width}} {_number(row['cap'], 5)} "
            f"{_cap_bar(row['cap'], row['in_flight'], control.cap_max, cells)} "
            f"{_number(row['in_flight'], 6)} {_number(row['queued'], 6)} "
            f"{_number(p99_s, 7, 2)}{'!' if p99_s > slo_s else ' '} {_number(slo_s, 7, 2)}   "
            + " ".join(_number(row[field], 5) for field in _COUNTS)
            + "  "
            + " ".join(_number(row[f"{field}_total"], 6) for field in _COUNTS)
        )
    lines += [
        f"cluster: running {_number(cluster['num_requests_running'], 5)} of "
        f"{scenario.max_num_seqs}, waiting {_number(cluster['num_requests_waiting'], 5)}, "
        f"KV {_number(100 * cluster['kv_cache_usage'], 3)} %, "
        f"GPU memory {_number(100 * cluster['gpu_memory_utilization'], 3)} %, "
        f"p99 {_number(cluster['latency_p99_s'], 7, 2)} s, "
        f"preempted {_number(cluster['preemptions'], 5)}, "
        f"failed {_number(tenants['failed_total'].sum(), 6)}",
        f"bar up to cap {control.cap_max}: # in flight, - free, + above the cap; ! above the SLO",
    ]
    width = max(map(len, lines))
    return "\n".join(line.ljust(width) for line in lines)


def _cap_bar(cap: float, in_flight: float, cap_max: int, cells: int) -> str:
    """A cap's share of `cap_max` in cells, filled by what is in flight."""

    def cell(value: float) -> int:
        return min(cells, math.ceil(value * cells / cap_max))

    used, allowed = cell(in_flight), cell(cap)
    bar = "#" * min(used, allowed) + ("-" * (allowed - used) or "+" * (used - allowed))
    return bar.ljust(cells, ".")


def _number(value: float, width: int, decimals: int = 0) -> str:
    """Right-aligned, in exactly `width` characters; `-` where there is no reading."""
    if math.isnan(value):
        return "-".rjust(width)
    text = f"{value:.{decimals}f}"
    return (text if len(text) <= width else f"{value:.0e}").rjust(width)


# --- live ---------------------------------------------------------------------------------


class _Screen(Protocol):
    """Where `human` shows an episode."""

    def show(self, shown: Any) -> None: ...

    def close(self) -> None: ...


class _Window:
    """A window of matplotlib's interactive backend; stays shut once the user has closed it."""

    def __init__(self, figure: Any) -> None:
        from matplotlib import pyplot

        self._pyplot = pyplot
        self._figure = figure
        self._image: Any = None
        self._pace = _Pace()

    @classmethod
    def open(cls, title: str) -> _Window | None:
        """A window, or None without matplotlib, a display or an interactive backend."""
        try:
            import matplotlib
            from matplotlib import pyplot

            with matplotlib.rc_context({"toolbar": "None"}):
                figure = pyplot.figure(
                    figsize=(FRAME_SHAPE[1] / DPI, FRAME_SHAPE[0] / DPI), dpi=DPI
                )
        except ImportError:  # also what a backend raises that finds no display
            return None
        if figure.canvas.required_interactive_framework is None:
            pyplot.close(figure)
            return None
        if figure.canvas.manager is not None:
            figure.canvas.manager.set_window_title(title)
        return cls(figure)

    def show(self, shown: Any) -> None:
        if not self._pyplot.fignum_exists(self._figure.number):
            return
        if self._image is None:
            axes = self._figure.add_axes((0, 0, 1, 1))
            axes.set_axis_off()
            self._image = axes.imshow(shown, interpolation="antialiased")
            self._figure.show()
        self._image.set_data(shown)
        self._figure.canvas.draw()
        # handles the window's events for the rest of the frame
        self._figure.canvas.start_event_loop(max(1e-3, self._pace.remaining_s()))
        self._pace.mark()

    def close(self) -> None:
        self._pyplot.close(self._figure)


class _Terminal:
    """A live view in the terminal; where output is no terminal, the last state is printed."""

    def __init__(self) -> None:
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise DependencyNotInstalled(
                "render_mode 'human' needs rich, or matplotlib and a display: "
                "pip install 'vllm-tenant-tuning[report]'"
            ) from error
        console = Console(highlight=False)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last: Any = None
        self._pace = _Pace()
        if self._live is not None:
            # the cursor comes back even when nobody calls close()
            weakref.finalize(self, self._live.stop)

    def show(self, shown: Any) -> None:
        from rich.text import Text

        self._last = shown
        if self._live is not None:
            time.sleep(self._pace.remaining_s())
            self._pace.mark()
            self._live.start()
            self._live.update(Text(shown, no_wrap=True, overflow="crop"), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._last is not None:
            print(self._last)
            self._last = None


class _Pace:
    """Holds frames to `HUMAN_FRAMES_PER_S`."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def mark(self) -> None:
        self._last_s = time.monotonic()

    def remaining_s(self) -> float:
        return max(0.0, self._last_s + 1 / HUMAN_FRAMES_PER_S - time.monotonic())
