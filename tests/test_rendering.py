"""The views of an episode show its telemetry: as text, as pictures and live."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.error import DependencyNotInstalled, ResetNeeded
from gymnasium.wrappers import RecordVideo

import vllm_tenant_tuning  # noqa: F401  (registers the environment)
from vllm_tenant_tuning.rendering import RENDER_MODES, EpisodeView
from vllm_tenant_tuning.rendering_figure import FRAME_SHAPE, EpisodeFigure
from vllm_tenant_tuning.scenario import Scenario, parse_scenario
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE, Telemetry

INTERVAL_S = 3.0
SLO_S = 12.0


def scenario_of(n_tenants: int, episode_s: float = 90.0, prefix: str = "t") -> Scenario:
    tenant = {
        "arrivals": {"process": "poisson", "rate_per_s": 0.8},
        "prompt_tokens": {"distribution": "fixed", "tokens": 512},
        "output_tokens": {"distribution": "fixed", "tokens": 100},
        "service": {"model": "exponential", "mean_s": 2.5},
        "patience_s": 3.0,
        "slo_latency_p99_s": SLO_S,
        "cap_initial": 4,
    }
    return parse_scenario(
        {
            "name": "views",
            "question": "What is shown?",
            "tenants": [{"name": f"{prefix}{i:02d}", **tenant} for i in range(n_tenants)],
            "engine": {"fidelity": "slots", "max_num_seqs": 8},
            "control": {"control_interval_s": INTERVAL_S, "episode_s": episode_s, "cap_max": 8},
        }
    )


def telemetry_of(step: int, n_tenants: int, **fields: Any) -> Telemetry:
    """Zeros, NaN latencies, and what `fields` say of the tenants."""
    telemetry = Telemetry(
        np.zeros((n_tenants, len(TENANT_DTYPE.names or ()))),
        np.zeros(len(CLUSTER_DTYPE.names or ())),
    )
    telemetry.tenants["latency_p99_s"] = np.nan
    telemetry.cluster["time_s"] = step * INTERVAL_S
    for field, values in fields.items():
        telemetry.tenants[field] = values
    return telemetry


def history_of(n_tenants: int, n_steps: int, seed: int = 0) -> list[Telemetry]:
    """An episode of arbitrary readings; the first one is of time 0."""
    rng = np.random.default_rng(seed)
    return [
        telemetry_of(
            step,
            n_tenants,
            cap=rng.integers(1, 9, n_tenants),
            queued=rng.integers(0, 30, n_tenants),
            latency_p99_s=rng.uniform(1, 40, n_tenants),
            arrived=rng.integers(0, 9, n_tenants),
            completed=rng.integers(0, 9, n_tenants),
            dropped=rng.integers(0, 3, n_tenants),
        )
        for step in range(n_steps + 1)
    ]


def frame_of(scenario: Scenario, history: list[Telemetry]) -> npt.NDArray[np.uint8]:
    view = EpisodeView(scenario, "rgb_array")
    view.start(history[0])
    for telemetry in history[1:]:
        view.add(telemetry)
    frame = view.render()
    assert isinstance(frame, np.ndarray)
    return frame


def text_of(scenario: Scenario, telemetry: Telemetry) -> str:
    view = EpisodeView(scenario, "ansi")
    view.start(telemetry)
    text = view.render()
    assert isinstance(text, str)
    return text


def row_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


# --- text ---------------------------------------------------------------------------------


def test_text_has_the_readings_of_every_tenant_in_order() -> None:
    fields = {
        "in_flight": [2, 1],
        "queued": [11, 12],
        "arrived": [21, 22],
        "completed": [31, 32],
        "dropped": [41, 42],
        "arrived_total": [51, 52],
        "completed_total": [61, 62],
        "dropped_total": [71, 72],
    }
    telemetry = telemetry_of(7, 2, cap=[3, 8], latency_p99_s=[11.999, 12.001], **fields)
    text = text_of(scenario_of(2), telemetry)
    assert "t = 21 of 90 s" in text
    # the bar of eight cells lies behind the cap; above the SLO is marked
    assert row_of(text, "t00").split() == [
        *("t00", "3", "##-.....", "2", "11", "12.00", "12.00"),
        *("21", "31", "41", "51", "61", "71"),
    ]
    assert row_of(text, "t01").split() == [
        *("t01", "8", "#-------", "1", "12", "12.00!", "12.00"),
        *("22", "32", "42", "52", "62", "72"),
    ]


def test_text_shows_a_tenant_that_drains_down_and_one_without_a_reading() -> None:
    row = row_of(text_of(scenario_of(1), telemetry_of(1, 1, cap=2, in_flight=5)), "t00")
    assert row.split()[:6] == ["t00", "2", "##+++...", "5", "0", "-"]


def test_text_has_the_cluster() -> None:
    telemetry = telemetry_of(1, 2, failed_total=[3, 4])
    cluster: Any = telemetry.cluster
    cluster["num_requests_running"] = 6
    cluster["num_requests_waiting"] = 9
    cluster["kv_cache_usage"] = 0.75
    cluster["gpu_memory_utilization"] = np.nan
    cluster["preemptions"] = 5
    cluster["latency_p99_s"] = 8.25
    row = row_of(text_of(scenario_of(2), telemetry), "cluster")
    words = " ".join(row.split())
    assert words == (
        "cluster: running 6 of 8, waiting 9, KV 75 %, GPU memory - %, p99 8.25 s, "
        "preempted 5, failed 7"
    )


@pytest.mark.parametrize("n_tenants", [1, 2, 64])
def test_text_keeps_its_shape_whatever_the_readings(n_tenants: int) -> None:
    scenario = scenario_of(n_tenants)
    shapes = set()
    for value in (0.0, 12345.0, 9.9e9):
        telemetry = telemetry_of(1, n_tenants)
        telemetry.tenant_values[:] = value
        telemetry.cluster_values[1:] = value
        for share in ("kv_cache_usage", "gpu_memory_utilization"):
            telemetry.cluster[share] = min(value, 1.0)
        text = text_of(scenario, telemetry)
        assert text.isascii()
        assert all(character.isprintable() for character in text.replace("\n", ""))
        lines = text.splitlines()
        assert sum(line.startswith("t") and line[1:3].isdigit() for line in lines) == n_tenants
        shapes.add((len(lines), *map(len, lines)))
    assert len(shapes) == 1


# --- pictures -----------------------------------------------------------------------------


def panel_of(figure: EpisodeFigure, title: str) -> Any:
    return next(ax for ax in figure.figure.axes if ax.get_title(loc="left").startswith(title))


def figure_of(scenario: Scenario, history: list[Telemetry]) -> EpisodeFigure:
    figure = EpisodeFigure(scenario)
    for telemetry in history:
        figure.add(telemetry)
    figure.frame()
    return figure


@pytest.mark.parametrize("n_steps", [5, 400])
def test_lines_are_the_telemetry(n_steps: int) -> None:
    scenario, history = scenario_of(3, 1200.0), history_of(3, n_steps)
    figure = figure_of(scenario, history)
    for title, field, scale in (
        ("cap", "cap", 1.0),
        ("queued", "queued", 1.0),
        ("p99", "latency_p99_s", SLO_S),
    ):
        lines = {line.get_label(): line for line in panel_of(figure, title).lines}
        for tenant, name in enumerate(scenario.tenant_names):
            np.testing.assert_array_equal(
                lines[name].get_xdata(), [INTERVAL_S * step for step in range(n_steps + 1)]
            )
            np.testing.assert_array_equal(
                lines[name].get_ydata(),
                [float(telemetry.tenants[field][tenant]) / scale for telemetry in history],
            )


def test_long_lines_are_thinned_out_without_losing_a_peak() -> None:
    n_steps = 5_000
    history = [telemetry_of(step, 2, queued=3) for step in range(n_steps + 1)]
    history[1234].tenants["queued"][0] = 99
    history[4321].tenants["queued"][1] = 1
    ax = panel_of(figure_of(scenario_of(2, n_steps * INTERVAL_S), history), "queued")
    for tenant, step, peak in ((0, 1234, 99), (1, 4321, 1)):
        time_s, shown = ax.lines[tenant].get_data()
        assert len(shown) < 2_100
        assert sorted(set(shown)) == sorted({3, peak})
        (where,) = np.flatnonzero(shown == peak)
        pixels = ax.transData.transform([(time_s[where], 0), (step * INTERVAL_S, 0)])[:, 0]
        assert abs(pixels[0] - pixels[1]) < 1


def test_rates_are_the_interval_counts_of_all_tenants_over_its_length() -> None:
    history = history_of(2, 8)
    figure = figure_of(scenario_of(2), history)
    lines = {line.get_label(): line for line in panel_of(figure, "requests/s").lines}
    for field in ("arrived", "completed", "dropped"):
        shown = lines[field].get_ydata()
        assert np.isnan(shown[0])  # no interval lies before time 0
        counts = [sum(telemetry.tenants[field].tolist()) for telemetry in history[1:]]
        np.testing.assert_allclose(shown[1:], np.array(counts) / INTERVAL_S)


def test_heat_map_rows_are_the_telemetry() -> None:
    scenario, history = scenario_of(12), history_of(12, 20)
    figure = figure_of(scenario, history)
    for title, field, scale in (
        ("cap", "cap", 1.0),
        ("queued", "queued", 1.0),
        ("p99", "latency_p99_s", SLO_S),
    ):
        (image,) = panel_of(figure, title).images
        expected = [(telemetry.tenants[field] / scale).tolist() for telemetry in history[1:]]
        np.testing.assert_array_equal(image.get_array(), np.transpose(expected))
        assert tuple(image.get_extent()) == (0, 20 * INTERVAL_S, 12, 0)


@pytest.mark.parametrize("n_tenants", [2, 12])
def test_all_readings_lie_within_the_axes(n_tenants: int) -> None:
    history = history_of(n_tenants, 10)
    history[4].tenants["queued"] = 31_000
    history[5].tenants["latency_p99_s"] = 5_000
    history[6].tenants["latency_p99_s"] = 0.001
    figure = figure_of(scenario_of(n_tenants), history)
    for title, largest in (("queued", 31_000), ("p99", 5_000 / SLO_S)):
        ax = panel_of(figure, title)
        top = ax.get_ylim()[1] if n_tenants == 2 else ax.images[0].get_clim()[1]
        assert largest <= top <= 2.5 * largest
    if n_tenants == 2:
        assert 0.0001 / SLO_S <= panel_of(figure, "p99").get_ylim()[0] <= 0.001 / SLO_S


@pytest.mark.parametrize("n_tenants", [1, 8, 9, 64])
def test_frames_follow_from_the_history_alone(n_tenants: int) -> None:
    scenario, history = scenario_of(n_tenants), history_of(n_tenants, 6)
    frame = frame_of(scenario, history)
    assert frame.shape == FRAME_SHAPE
    assert frame.dtype == np.uint8

    # the same history after another episode, and rendered at every step
    view = EpisodeView(scenario, "rgb_array")
    other = history_of(n_tenants, 9, seed=1)
    for episode in (other, history):
        view.start(episode[0])
        frames: list[Any] = [view.render()]
        for telemetry in episode[1:]:
            view.add(telemetry)
            frames.append(view.render())
    np.testing.assert_array_equal(frames[-1], frame)
    assert all(one.shape == FRAME_SHAPE for one in frames)
    assert not np.array_equal(frames[-2], frame)


@pytest.mark.parametrize("n_tenants", [2, 12])
@pytest.mark.parametrize("field", ["cap", "queued", "latency_p99_s", "completed", "dropped"])
def test_a_frame_changes_with_each_reading_and_only_in_its_panel(
    n_tenants: int, field: str
) -> None:
    scenario = scenario_of(n_tenants)
    history, changed = history_of(n_tenants, 10), history_of(n_tenants, 10)
    changed[6].tenants[field][0] = {"latency_p99_s": 39.0}.get(field, 8.0) - (
        changed[6].tenants[field][0] > 7
    )
    differs = (frame_of(scenario, history) != frame_of(scenario, changed)).any(axis=2)
    assert differs.any()
    row = 0 if field in ("cap", "queued") else 1
    column = 0 if field in ("cap", "latency_p99_s") else 1
    half_height, half_width = FRAME_SHAPE[0] // 2, FRAME_SHAPE[1] // 2
    differs[
        row * half_height : (row + 1) * half_height, column * half_width : (column + 1) * half_width
    ] = False
    assert not differs.any()


@pytest.mark.parametrize("n_tenants", [2, 12])
def test_a_latency_that_is_not_known_draws_nothing(n_tenants: int) -> None:
    scenario = scenario_of(n_tenants)
    unknown = [telemetry_of(step, n_tenants, cap=4) for step in range(11)]
    half = [telemetry_of(step, n_tenants, cap=4) for step in range(11)]
    half[5].tenants["latency_p99_s"][1] = 6.0
    half[6].tenants["latency_p99_s"][1] = 6.0
    blank = frame_of(scenario, unknown)
    differs = (frame_of(scenario, half) != blank).any(axis=2)
    assert differs.any()
    # only around the two readings: 10 of 30 intervals are shown, the last four are unknown
    ax = panel_of(figure_of(scenario, half), "p99")
    left, right = (ax.transData.transform((time_s, 1))[0] for time_s in (12.0, 18.0))
    columns = np.flatnonzero(differs.any(axis=0))
    assert left - 3 <= columns.min()
    assert columns.max() <= right + 3


def test_names_keep_apart_when_they_are_shortened() -> None:
    scenario = scenario_of(12, prefix="a-customer-with-a-long-name-")
    ax = panel_of(figure_of(scenario, history_of(12, 2)), "cap")
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [f"{i:02d}" for i in range(12)]


def test_the_frame_belongs_to_the_caller() -> None:
    view = EpisodeView(scenario_of(2), "rgb_array")
    view.start(telemetry_of(0, 2, cap=4))
    first: Any = view.render()
    kept = first.copy()
    view.add(telemetry_of(1, 2, cap=8))
    view.render()
    np.testing.assert_array_equal(first, kept)


# --- the environment ----------------------------------------------------------------------


def test_record_video_writes_a_film_of_the_episode(tmp_path: Path) -> None:
    moviepy = pytest.importorskip("moviepy")
    env: Any = gym.make("VLLMTenantTuning-v0", scenario=scenario_of(2), render_mode="rgb_array")
    env = RecordVideo(env, str(tmp_path), episode_trigger=lambda _: True)
    env.reset(seed=0)
    n_steps, truncated = 0, False
    while not truncated:
        *_, truncated, _ = env.step(np.array([1, 2]))
        n_steps += 1
    env.close()
    assert n_steps == 30
    (film,) = tmp_path.glob("*.mp4")
    with moviepy.VideoFileClip(str(film)) as clip:
        assert tuple(clip.size) == (FRAME_SHAPE[1], FRAME_SHAPE[0])
        assert clip.n_frames == n_steps + 1
        assert clip.fps == env.metadata["render_fps"]
        first, last = clip.get_frame(0).astype(int), clip.get_frame(clip.duration - 0.05)
    assert np.abs(first - last).max() > 100


def test_environment_shows_its_telemetry() -> None:
    env: Any = gym.make("VLLMTenantTuning-v0", scenario=scenario_of(2), render_mode="ansi")
    env.reset(seed=3)
    for _ in range(5):
        *_, info = env.step(np.array([2, 0]))
    text = env.render()
    assert "t = 15 of 90 s" in text
    for name, cap, row in zip(("t00", "t01"), info["caps"], info["telemetry"].tenants, strict=True):
        words = row_of(text, name).split()
        assert words[1] == str(cap)
        assert words[-3] == f"{row['arrived_total']:.0f}"
    assert row_of(text, "t00").split()[1] == "8"


def test_render_needs_an_episode() -> None:
    with pytest.raises(ResetNeeded, match="reset"):
        EpisodeView(scenario_of(2), "ansi").render()


# --- live ---------------------------------------------------------------------------------

HEADLESS_EPISODE = """
import numpy as np
from test_rendering import scenario_of, telemetry_of
from vllm_tenant_tuning.rendering import EpisodeView
view = EpisodeView(scenario_of(2), "human")
for episode in range(2):
    view.start(telemetry_of(0, 2, cap=4))
    view.render()
    for step in range(1, 31):
        view.add(telemetry_of(step, 2, cap=[step % 8, 8], queued=episode))
        assert view.render() is None
view.close()
view.close()
"""


def test_human_without_display_and_terminal_prints_the_last_state() -> None:
    result = subprocess.run(
        [sys.executable, "-c", HEADLESS_EPISODE],
        cwd=Path(__file__).parent,
        env={"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    last = telemetry_of(30, 2, cap=[6, 8], queued=1)
    assert result.stdout == text_of(scenario_of(2), last) + "\n"


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX")
def test_human_in_a_terminal_shows_every_state() -> None:
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HEADLESS_EPISODE.replace("range(2)", "range(1)").replace("31", "6")],
        cwd=Path(__file__).parent,
        env={"MPLBACKEND": "agg", "TERM": "xterm", "COLUMNS": "140", "LINES": "30"},
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # Linux's sign that the other end is closed
        while data := os.read(master, 65536):
            output += data
    os.close(master)
    assert process.wait() == 0, output.decode()
    shown = output.decode()
    for step in range(6):
        assert f"t = {step * 3} of 90 s" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize(
    ("render_mode", "library"), [("rgb_array", "matplotlib"), ("human", "rich")]
)
def test_a_missing_library_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, render_mode: str, library: str
) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyNotInstalled, match=rf"{library}.*vllm-tenant-tuning\[report\]"):
        gym.make("VLLMTenantTuning-v0", scenario=scenario_of(2), render_mode=render_mode)


def test_render_modes_are_declared() -> None:
    env: Any = gym.make("VLLMTenantTuning-v0", scenario=scenario_of(2))
    assert tuple(env.metadata["render_modes"]) == RENDER_MODES


def test_drawing_libraries_are_imported_only_when_needed() -> None:
    code = (
        "import sys, gymnasium\n"
        "env = gymnasium.make('vllm_tenant_tuning:VLLMTenantTuning-v0', render_mode='ansi')\n"
        "print(sorted({'matplotlib', 'rich'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
