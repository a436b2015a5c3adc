"""Fits of known laws, of the shared grid, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vllm_tenant_tuning.backends.sim import step_time
from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.baselines.calibrate import (
    COLUMNS,
    CalibrationError,
    StepGrid,
    errors_by_region,
    fit_step_time,
    left_out_error,
    read_grid,
    regions,
)
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.profile import StepTimeCoefficients, load_profile

GRID = "h200/step_time_grid.json"
TRUTH = StepTimeCoefficients(
    base_ms=2.0,
    weights_ms=4.0,
    dense_ms_per_token=0.03,
    sequence_ms=0.006,
    kv_read_ms_per_token=4e-5,
    prefill_attention_ms_per_pair=2e-6,
)
SHAPES = [
    *((0, n, context) for n in (1, 4, 16, 64, 256) for context in (128, 1024, 8192)),
    *((p, n, 2048) for p in (64, 256, 1024, 4096) for n in (0, 8, 128)),
    *((p, 32, 8192) for p in (128, 2048)),
]


def synthetic(truth: StepTimeCoefficients, noise: float = 0.0) -> StepGrid:
    p, n, context = np.array(SHAPES, np.float64).T
    exact_ms = step_time_ms(truth, p, n, n * context, p * (context + 1) / 2)
    noisy = 1 + noise * np.random.default_rng(0).standard_normal(len(p))
    return StepGrid("a/synthetic", "made up", p, n, context, context, exact_ms * noisy)


def as_file(path: Path, grid: StepGrid, **changes: Any) -> Path:
    columns = (grid.prefill_tokens, grid.decode_seqs, grid.context_tokens, grid.step_ms)
    rows = np.column_stack(columns).tolist()
    content = {"source": "made up", "columns": list(COLUMNS), "models": {grid.model: rows}}
    path.write_text(json.dumps(content | changes))
    return path


OPTIONS = [
    *("--name", "mine", "--gpu", "a GPU", "--num-gpu-blocks", "4000", "--max-num-seqs", "128"),
    *("--max-num-batched-tokens", "2048", "--max-model-len", "8192"),
]


def test_a_law_without_noise_is_recovered() -> None:
    fitted = fit_step_time(synthetic(TRUTH))
    for name, value in TRUTH:
        assert getattr(fitted, name) == pytest.approx(value, rel=2e-3), name


def test_a_slower_machine_scales_every_coefficient() -> None:
    slower = StepTimeCoefficients(**{name: 500 * value for name, value in TRUTH})
    fitted = fit_step_time(synthetic(slower))
    for name, value in slower:
        assert getattr(fitted, name) == pytest.approx(value, rel=2e-3), name


def test_a_fit_that_no_profile_can_hold_is_refused() -> None:
    grid = synthetic(TRUTH)
    with pytest.raises(CalibrationError, match=r"a/synthetic: the fit gives .*base_ms"):
        fit_step_time(replace(grid, step_ms=grid.step_ms * 1e-5))


def test_noise_shows_as_the_error() -> None:
    grid = synthetic(TRUTH, noise=0.02)
    total = errors_by_region(grid, fit_step_time(grid))[0]
    # The mean of |N(0, 0.02)| is 0.016; six coefficients for 29 points take some of it away.
    assert 0.008 < total.mean < 0.02
    assert total.mean < total.p95 <= total.worst
    assert left_out_error(grid).mean > total.mean


def test_a_coefficient_that_is_not_there_is_zero() -> None:
    truth = TRUTH.model_copy(update={"weights_ms": 0.0})
    fitted = fit_step_time(synthetic(truth))
    assert fitted.weights_ms == 0
    assert fitted.base_ms == pytest.approx(truth.base_ms, rel=2e-3)


def test_regions_are_a_partition() -> None:
    grid = synthetic(TRUTH)
    masks = np.array(list(regions(grid).values()))
    assert (masks.sum(axis=0) == 1).all()
    total, *parts = errors_by_region(grid, TRUTH)
    assert total.points == sum(part.points for part in parts) == len(grid)


MODELS = {
    "Meta-Llama-3.1-8B": "h200-llama-3.1-8b",
    "Qwen3-8B": "h200-qwen3-8b",
    "Qwen3-32B-FP8": "h200-qwen3-32b-fp8",
}
# The fits of shared/DESIGN.md, section 4: base, weights, dense, sequence; mean error.
WITH_EXPONENT_4 = {
    "Meta-Llama-3.1-8B": (1.778, 3.356, 0.01988, 0.00472, 0.031),
    "Qwen3-8B": (2.681, 2.607, 0.01973, 0.00368, 0.033),
    "Qwen3-32B-FP8": (21.316, 0.0, 0.05521, 0.00565, 0.047),
}


@pytest.mark.shared
@pytest.mark.parametrize("model", MODELS)
def test_the_exponent_2_betters_the_design_s_exponent_4(
    shared: Callable[[str], Path], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = read_grid(shared(GRID), model)
    found, found_left_out = errors_by_region(grid, fit_step_time(grid))[0], left_out_error(grid)
    monkeypatch.setattr(step_time, "ROOFLINE_EXPONENT", 4)
    fitted = fit_step_time(grid)
    *coefficients, mean_error = WITH_EXPONENT_4[model]
    names = ("base_ms", "weights_ms", "dense_ms_per_token", "sequence_ms")
    assert [getattr(fitted, name) for name in names] == pytest.approx(coefficients, rel=2e-3)
    error = errors_by_region(grid, fitted)[0]
    assert error.mean == pytest.approx(mean_error, abs=5e-4)
    better = 1.0 if fitted.weights_ms == 0 else 0.8  # without weights there is no corner
    assert found.mean <= better * error.mean
    assert found_left_out.mean <= better * left_out_error(grid).mean


@pytest.mark.shared
@pytest.mark.parametrize(("model", "name"), MODELS.items())
def test_the_command_regenerates_the_packaged_profiles(
    shared: Callable[[str], Path],
    model: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, root = shared(GRID), Path(__file__).parents[2]
    packaged = f"configs/engines/{name}.yaml"
    (tmp_path / "repository" / "configs" / "engines").mkdir(parents=True)
    (tmp_path / "repository" / packaged).write_bytes((root / packaged).read_bytes())
    (tmp_path / "shared").symlink_to(grid.parents[1])
    monkeypatch.chdir(tmp_path / "repository")
    options = ["--model", model, "--template", packaged, "--sequence-ms", "0.01"]
    assert main(["calibrate", "--grid", f"../shared/{GRID}", "--out", packaged, *options]) == 0
    assert load_profile(tmp_path / "repository" / packaged) == load_profile(name)


def test_the_command_writes_a_profile_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = as_file(tmp_path / "grid.json", synthetic(TRUTH))
    out = tmp_path / "mine.yaml"
    assert main(["calibrate", "--grid", str(grid), "--out", str(out), *OPTIONS]) == 0
    printed = capsys.readouterr().out
    assert "decode, more sequences" in printed
    assert "each region by a fit to the others" in printed
    profile = load_profile(out)
    assert profile.name == "mine"
    assert profile.model == "a/synthetic"
    assert profile.kv_cache.num_gpu_blocks == 4000
    assert profile.step_time.weights_ms == pytest.approx(4.0, rel=2e-3)
    assert profile.fit is not None
    assert profile.fit.mean_relative_error < 1e-3
    assert f"--grid {grid}" in profile.source
    assert "--num-gpu-blocks 4000" in profile.source


@pytest.mark.parametrize(
    ("factors", "warned"),
    [((1.0, 1.0), ""), ((1.0, 2.0), "misses these points by"), ((0.01, 0.01), "milliseconds")],
)
def test_a_fit_that_says_little_is_warned_of(
    factors: tuple[float, float],
    warned: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = synthetic(TRUTH)
    step_ms = grid.step_ms * np.resize(factors, len(grid))
    file = as_file(tmp_path / "grid.json", dataclasses.replace(grid, step_ms=step_ms))
    out = tmp_path / "mine.yaml"
    assert main(["calibrate", "--grid", str(file), "--out", str(out), *OPTIONS]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("warning" in printed) == bool(warned)
    assert warned in printed
    assert out.exists()


def test_a_template_gives_what_is_not_given(tmp_path: Path) -> None:
    grid = as_file(tmp_path / "grid.json", synthetic(TRUTH))
    out = tmp_path / "mine.yaml"
    arguments = ["--template", "h200-llama-3.1-8b", "--name", "mine", "--block-size", "32"]
    served = ["--sequence-ms", "0.02"]
    assert main(["calibrate", "--grid", str(grid), "--out", str(out), *arguments, *served]) == 0
    profile, template = load_profile(out), load_profile("h200-llama-3.1-8b")
    assert profile.scheduler == template.scheduler
    assert profile.frontend == template.frontend
    assert profile.kv_cache.num_gpu_blocks == template.kv_cache.num_gpu_blocks
    assert profile.kv_cache.block_size == 32
    assert profile.model == "a/synthetic"
    assert profile.step_time.sequence_ms == 0.02
    assert "the fit's sequence_ms is 0.006" in profile.source


def rows(**changes: Any) -> dict[str, Any]:
    """The models of a file whose fifth row has some cells changed."""
    grid = synthetic(TRUTH)
    columns = (grid.prefill_tokens, grid.decode_seqs, grid.context_tokens, grid.step_ms)
    table = np.column_stack(columns).tolist()
    for name, value in changes.items():
        table[4][COLUMNS.index(name)] = value
    return {"models": {"a/synthetic": table}}


NARROW = {"models": {"a/synthetic": [[0, n, 128, 5.0 + n] for n in range(1, 31)]}}
REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["--model", "other"], "got 'other'.* name one of a/synthetic"),
    ({"columns": ["prefill_tokens", "step_ms"]}, [], "needed are prefill_tokens, num_decode"),
    ({"columns": [*COLUMNS, COLUMNS[0]]}, [], "their names must differ"),
    ({}, ["--max-num-batched-tokens", "8"], r"max_num_batched_tokens \(8\) must be at least"),
    ({}, ["--out", "/nonexistent/p.yaml"], "--out: got /nonexistent/p.yaml; accepted is a file"),
    ({"models": {}}, [], "models: expected a mapping"),
    ({"models": {"a/synthetic": [[0, 1, 2, 3.0]] * 5}}, [], "5 points; at least 18"),
    (rows(step_ms=float("nan")), [], "row 5: step_ms: got nan; accepted are 0.001 to 1000000"),
    (rows(step_ms=-1.0), [], "row 5: step_ms: got -1.0;"),
    (rows(step_ms=0), [], "row 5: step_ms: got 0;"),
    (rows(step_ms=1e300), [], "row 5: step_ms: got 1e.300;"),
    (rows(context_tokens=-1), [], "row 5: context_tokens: got -1; accepted are 0 to 1000000000"),
    (rows(prefill_tokens=float("inf")), [], "row 5: prefill_tokens: got inf;"),
    (rows(context_tokens=10**400), [], "row 5: context_tokens: got 10{39};"),
    (rows(num_decode_seqs="four"), [], "row 5: num_decode_seqs: got 'four'; expected a number"),
    (rows(num_decode_seqs=True), [], "row 5: num_decode_seqs: got True"),
    (rows(num_decode_seqs=0), [], "row 5: neither prompt tokens nor decoding"),
    ({"models": {"a/synthetic": [[0, 1, 2]] * 20}}, [], "row 1: .* expected 4 cells"),
    (NARROW, [], "context_tokens of decode steps: got 1 different"),
    ({}, ["--max-num-seqs", "0"], "scheduler.max_num_seqs: got 0"),
    ({}, ["--sequence-ms", "-1"], "step_time.sequence_ms: got -1"),
    ({}, ["--sequence-ms", "nan"], "step_time.sequence_ms: got nan"),
    ({}, ["--name", "My profile"], "name: got 'My profile'"),
    ({"models": {"a/synthetic": 5}}, [], "a/synthetic: no points; at least 18"),
    ({}, ["--template", "absent"], "'absent' is neither"),
    ({"models": rows()["models"] | {"b": []}}, [], "--model: got None.* holds 2"),
]


@pytest.mark.parametrize(("changes", "options", "message"), REFUSED)
def test_bad_input_gets_one_message_and_writes_nothing(
    changes: dict[str, Any],
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = as_file(tmp_path / "grid.json", synthetic(TRUTH), **changes)
    out = tmp_path / "mine.yaml"
    arguments = ["calibrate", "--grid", str(grid), "--out", str(out), *OPTIONS, *options]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not out.exists()
    assert re.search(message, error), error


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "9" * 5000, "[" * 100_000])
def test_what_is_not_a_grid_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.json"
    file.write_text(text)
    assert main(["calibrate", "--grid", str(file), "--out", str(tmp_path / "x.yaml")]) == 2
    assert str(file) in capsys.readouterr().err
    assert main(["calibrate", "--grid", "absent.json", "--out", str(tmp_path / "x.yaml")]) == 2
    assert "absent.json: cannot be read" in capsys.readouterr().err


def test_without_a_template_the_missing_fields_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = as_file(tmp_path / "grid.json", synthetic(TRUTH))
    out = tmp_path / "mine.yaml"
    assert main(["calibrate", "--grid", str(grid), "--out", str(out), "--name", "mine"]) == 2
    error = capsys.readouterr().err
    for field in ("gpu", "kv_cache", "scheduler"):
        assert f"{field}: missing" in error
    assert "--template" in error
    assert not out.exists()


def test_the_written_yaml_is_plain(tmp_path: Path) -> None:
    grid = as_file(tmp_path / "grid.json", synthetic(TRUTH))
    out = tmp_path / "mine.yaml"
    assert main(["calibrate", "--grid", str(grid), "--out", str(out), *OPTIONS]) == 0
    content = yaml.safe_load(out.read_text())
    assert list(content)[:2] == ["name", "description"]
    assert content["step_time"]["kv_read_ms_per_token"] == pytest.approx(4e-5, rel=2e-3)
    assert "power" not in content
