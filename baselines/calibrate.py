"""Fit an engine profile's step times to measured ones.

`vllm-tenant-tuning calibrate --grid FILE --out PROFILE` reads a grid of step times, fits the law
of `backends.sim.step_time`, prints its error by region and writes the profile. What a grid cannot
tell, such as the KV cache's size, comes from `--template` or from an option of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from vllm_tenant_tuning.backends.sim.step_time import step_time_ms
from vllm_tenant_tuning.profile import (
    EngineProfile,
    Fit,
    RegionFit,
    StepTimeCoefficients,
    load_profile,
)
from vllm_tenant_tuning.schema import explain_errors

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

ACCEPTED: Final = {
    "prefill_tokens": (0, 1_000_000_000),
    "num_decode_seqs": (0, 1_000_000_000),
    "context_tokens": (0, 1_000_000_000),
    "step_ms": (0.001, 1_000_000),
}
"""Least and most of each column; a time outside it is hardly in milliseconds."""
COLUMNS: Final = tuple(ACCEPTED)
MIN_POINTS: Final = 18
"""Three a coefficient: with fewer, an error of the fit says little about other steps."""

DOUBTFUL_ERROR: Final = 0.2
"""A mean relative error above this is said to be a bad fit."""
PLAUSIBLE_STEP_MS: Final = (0.5, 1000.0)
"""A fastest step outside is hardly in milliseconds: a GPU's are 2 to 50, a small CPU's to 200."""


class CalibrationError(ValueError):
    """Step times or options that a profile cannot be fitted from."""


@dataclass(frozen=True)
class StepGrid:
    """Measured step times of one model: columns of equal length, one entry a measured step.

    Attributes:
        model: the model's name.
        source: where the times come from.
        prefill_tokens: prompt tokens in the step, from whole prompts of `prompt_tokens`.
        decode_seqs: sequences that decode one token, each with `context_tokens` of context.
        context_tokens, prompt_tokens: see there.
        step_ms: the measured times in milliseconds.
    """

    model: str
    source: str
    prefill_tokens: Floats
    decode_seqs: Floats
    context_tokens: Floats
    prompt_tokens: Floats
    step_ms: Floats

    def __len__(self) -> int:
        return len(self.step_ms)

    def select(self, chosen: Mask) -> StepGrid:
        """The chosen points."""
        return StepGrid(
            self.model,
            self.source,
            self.prefill_tokens[chosen],
            self.decode_seqs[chosen],
            self.context_tokens[chosen],
            self.prompt_tokens[chosen],
            self.step_ms[chosen],
        )

    def predicted_ms(self, coefficients: StepTimeCoefficients) -> Floats:
        """The law's times for the grid's steps."""
        return step_time_ms(
            coefficients,
            self.prefill_tokens,
            self.decode_seqs,
            kv_tokens=self.decode_seqs * self.context_tokens,
            # The tokens of a prompt attend to 1, 2, ... prompt_tokens tokens.
            attention_pairs=self.prefill_tokens * (self.prompt_tokens + 1) / 2,
        )

    def relative_errors(self, coefficients: StepTimeCoefficients) -> Floats:
        """Predicted over measured, minus 1."""
        return self.predicted_ms(coefficients) / self.step_ms - 1


@dataclass(frozen=True)
class RegionError:
    """Absolute relative errors over a region of the grid."""

    region: str
    points: int
    mean: float
    p95: float
    worst: float


def read_grid(path: str | Path, model: str | None = None) -> StepGrid:
    """Read and check the step times of a model.

    The file is JSON: `source`, `columns` (names, among them `COLUMNS`) and `models`, which maps a
    model's name to rows of these columns.

    Args:
        path: the file.
        model: a name in it, or its part after the last slash; needed when it holds several.

    Raises:
        CalibrationError: not such a file, an unknown model, or rows that cannot be fitted.
    """
    content = _read_json(Path(path))
    models = content.get("models")
    if not isinstance(models, dict) or not models:
        raise CalibrationError(f"{path}: models: expected a mapping of model names to rows")
    name = _choose_model(path, sorted(models), model)
    columns = content.get("columns")
    if not isinstance(columns, list) or not set(COLUMNS) <= set(map(str, columns)):
        raise CalibrationError(f"{path}: columns: got {columns!r}; needed are {', '.join(COLUMNS)}")
    if len(set(map(str, columns))) < len(columns):
        raise CalibrationError(f"{path}: columns: got {columns!r}; their names must differ")
    rows = models[name]
    if not isinstance(rows, list) or len(rows) < MIN_POINTS:
        found = len(rows) if isinstance(rows, list) else "no"
        raise CalibrationError(
            f"{path}: {name}: {found} points; at least {MIN_POINTS} are needed to fit a profile"
        )
    values = np.array([_numbers(path, name, i, row, columns) for i, row in enumerate(rows)])
    prefill, decodes, context, step_ms = values.T
    grid = StepGrid(
        name, str(content.get("source", path)), prefill, decodes, context, context, step_ms
    )
    _check_coverage(path, grid)
    return grid


def fit_step_time(grid: StepGrid) -> StepTimeCoefficients:
    """Fit the law by least squares of relative errors; coefficients have four digits.

    Raises:
        CalibrationError: the fit does not converge, or no profile can hold what it found.
    """
    fastest_ms = float(grid.step_ms.min())
    # Times and tokens of any hardware come near 1 in these units; coefficients are not negative.
    scale = np.array([fastest_ms, fastest_ms, fastest_ms / 256, fastest_ms / 1024, 1e-5, 1e-6])

    def residuals(scaled: Floats) -> Floats:
        return grid.relative_errors(_untested((scaled * scale).tolist()))

    # Two starts, since the corner of the roofline has a local minimum on either side.
    fits = [
        least_squares(residuals, (base, 1 - base, 1.0, 1.0, 1.0, 1.0), bounds=(0, np.inf))
        for base in (0.2, 0.8)
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    if not best.success:
        raise CalibrationError(f"{grid.model}: the fit does not converge: {best.message}")
    # The interior-point fit stops a hair above a bound of 0.
    found = np.where(best.x > 1e-4, best.x, 0.0) * scale
    rounded = _untested([_rounded(value, 4) for value in found.tolist()])
    try:
        return StepTimeCoefficients.model_validate(dict(rounded))
    except ValidationError as error:
        raise CalibrationError(f"{grid.model}: the fit gives {explain_errors(error)}") from error


def regions(grid: StepGrid) -> dict[str, Mask]:
    """The regions that errors are told for; together they are the grid."""
    p, n, context = grid.prefill_tokens, grid.decode_seqs, grid.context_tokens
    decode = p == 0
    small, short = n <= 16, context <= 1024
    parts = {
        "decode, up to 16 sequences, context up to 1024": decode & small & short,
        "decode, up to 16 sequences, longer context": decode & small & ~short,
        "decode, more sequences, context up to 1024": decode & ~small & short,
        "decode, more sequences, longer context": decode & ~small & ~short,
        "mixed, up to 512 prompt tokens": ~decode & (p <= 512),
        "mixed, 513 to 2048 prompt tokens": ~decode & (p > 512) & (p <= 2048),
        "mixed, more prompt tokens": ~decode & (p > 2048),
    }
    return {name: mask for name, mask in parts.items() if mask.any()}


def errors_by_region(grid: StepGrid, coefficients: StepTimeCoefficients) -> list[RegionError]:
    """The fit's errors: all points, then each region."""
    errors = np.abs(grid.relative_errors(coefficients))
    everywhere = np.ones(len(grid), dtype=np.bool_)
    return [
        _region_error(name, errors[mask])
        for name, mask in {"all": everywhere, **regions(grid)}.items()
    ]


def left_out_error(grid: StepGrid) -> RegionError:
    """Errors on every region as predicted by a fit to all the others."""
    errors = []
    for mask in regions(grid).values():
        rest = grid.select(~mask)
        if len(rest) >= MIN_POINTS and rest.prefill_tokens.any() and rest.decode_seqs.any():
            errors.append(np.abs(grid.select(mask).relative_errors(fit_step_time(rest))))
    if not errors:
        return RegionError("each region by a fit to the others", 0, *[math.nan] * 3)
    return _region_error("each region by a fit to the others", np.concatenate(errors))


def make_profile(
    grid: StepGrid,
    coefficients: StepTimeCoefficients,
    template: EngineProfile | None,
    given: Mapping[str, Any],
    command: str,
    sequence_ms: float | None = None,
    *,
    keep_regions: bool = False,
) -> EngineProfile:
    """The profile of a fit.

    Args:
        grid: the fitted points.
        coefficients: what `fit_step_time` found.
        template: a profile for whatever is not given.
        given: dotted names of the profile's fields (`kv_cache.num_gpu_blocks`) to values.
        command: what made it, for the profile's source.
        sequence_ms: a served engine's cost per decoding sequence in place of the fitted one.
        keep_regions: whether the profile holds the errors of each region, too.

    Raises:
        CalibrationError: a field is missing or its value is not accepted.
    """
    content = {} if template is None else template.model_dump(exclude_none=True)
    content["model"] = grid.model
    for path, value in given.items():
        *sections, field = path.split(".")
        target = content
        for section in sections:
            target = target.setdefault(section, {})
        target[field] = value
    errors, *by_region = errors_by_region(grid, coefficients)
    regions = {
        error.region: RegionFit(
            points=error.points,
            mean_relative_error=round(error.mean, 4),
            p95_relative_error=round(error.p95, 4),
        )
        for error in by_region
    }
    content["fit"] = Fit(
        points=len(grid),
        mean_relative_error=_rounded(errors.mean, 2),
        p95_relative_error=_rounded(errors.p95, 2),
        regions=regions if keep_regions else None,
    ).model_dump()
    source = f"{grid.source.rstrip('.')}. Fitted by: {command}"
    if sequence_ms is not None:
        source += (
            f" (the fit's sequence_ms is {coefficients.sequence_ms:g}, the kernels' part; "
            f"{sequence_ms:g} is given: a served engine's host works for every sequence too)"
        )
        coefficients = coefficients.model_copy(update={"sequence_ms": sequence_ms})
    content |= {"source": source, "step_time": coefficients.model_dump()}
    try:
        return EngineProfile.model_validate(content)
    except ValidationError as error:
        raise CalibrationError(
            f"profile: {explain_errors(error)} (options and --template give what a grid cannot)"
        ) from error


def write_profile(path: Path, profile: EngineProfile) -> None:
    """Write a profile as YAML, in the order of its fields."""
    content = profile.model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    path.write_text(text, encoding="utf-8")


def calibrate(
    grid_file: str | Path,
    out: Path,
    *,
    model: str | None = None,
    template: str | None = None,
    sequence_ms: float | None = None,
    given: Mapping[str, Any],
    command: str,
) -> EngineProfile:
    """Fit a grid, write the profile and print the errors by region.

    Args:
        grid_file: as `read_grid` reads it.
        out: the profile to write.
        model: which of the grid's models.
        template: a packaged profile or a file, for whatever is not given.
        sequence_ms: see `make_profile`.
        given: see `make_profile`.
        command: what is running, for the profile's source.

    Raises:
        CalibrationError: the input is refused; nothing has been written.
        ProfileError: the template is refused.
        OSError: the profile cannot be written.
    """
    check_writable(out)
    grid = read_grid(grid_file, model)
    base = None if template is None else load_profile(template)
    coefficients = fit_step_time(grid)
    profile = make_profile(grid, coefficients, base, given, command, sequence_ms)
    write_profile(out, profile)
    console = Console()
    print_errors(console, grid, coefficients)
    console.print(f"wrote {out}")
    return profile


def check_writable(out: Path) -> None:
    """Refuse a profile that could not be written in the end.

    Raises:
        CalibrationError: its folder is missing, or a folder is in its place.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise CalibrationError(f"--out: got {out}; accepted is a file in a folder that exists")


def print_errors(console: Console, grid: StepGrid, coefficients: StepTimeCoefficients) -> None:
    """The errors by region, and a warning where the law says little about the points."""
    table = Table(title=f"{grid.model}: relative errors of the step time")
    table.add_column("region")
    for column in ("points", "mean", "p95", "worst"):
        table.add_column(column, justify="right")
    for error in (*errors_by_region(grid, coefficients), left_out_error(grid)):
        shares = (f"{100 * value:.1f} %" for value in (error.mean, error.p95, error.worst))
        table.add_row(error.region, str(error.points), *shares)
    console.print(table)
    mean = float(np.abs(grid.relative_errors(coefficients)).mean())
    if mean > DOUBTFUL_ERROR:
        console.print(
            f"[bold yellow]warning:[/] the law misses these points by {100 * mean:.0f} % on "
            "average; a simulation on this profile says little about the server"
        )
    low_ms, high_ms = PLAUSIBLE_STEP_MS
    fastest_ms = float(grid.step_ms.min())
    if not low_ms <= fastest_ms <= high_ms:
        console.print(
            f"[bold yellow]warning:[/] the fastest step takes {fastest_ms:g} ms; step_ms is in "
            "milliseconds"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path}: cannot be read: {error}") from error
    except RecursionError as error:
        raise CalibrationError(f"{path}: nested too deeply to be read") from error
    except ValueError as error:  # also a number of more digits than Python reads
        raise CalibrationError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CalibrationError(
            f"{path}: got {type(content).__name__}; expected an object of source, columns, models"
        )
    return content


def _choose_model(path: str | Path, names: Sequence[str], wanted: str | None) -> str:
    matching = [name for name in names if wanted in (None, name, name.rsplit("/", 1)[-1])]
    if len(matching) != 1:
        raise CalibrationError(
            f"--model: got {wanted!r}; {path} holds {len(names)}, name one of {', '.join(names)}"
        )
    return matching[0]


def _numbers(
    path: str | Path, model: str, row: int, cells: Any, columns: Sequence[Any]
) -> list[float]:
    """The needed cells of a row in the order of `COLUMNS`, each checked."""
    where = f"{path}: {model}, row {row + 1}"
    if not isinstance(cells, list) or len(cells) != len(columns):
        raise CalibrationError(f"{where}: got {cells!r}; expected {len(columns)} cells")
    named = dict(zip(columns, cells, strict=True))
    numbers = []
    for column in COLUMNS:
        value = named[column]
        least, most = ACCEPTED[column]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CalibrationError(f"{where}: {column}: got {value!r}; expected a number")
        if not least <= value <= most:
            raise CalibrationError(
                f"{where}: {column}: got {value!r:.40}; accepted are {least} to {most}"
            )
        numbers.append(float(value))
    if named["prefill_tokens"] + named["num_decode_seqs"] == 0:
        raise CalibrationError(f"{where}: neither prompt tokens nor decoding sequences")
    return numbers


def _check_coverage(path: str | Path, grid: StepGrid) -> None:
    """Every coefficient must show in the grid."""
    decode, mixed = grid.prefill_tokens == 0, grid.prefill_tokens > 0
    needed = {
        "num_decode_seqs of decode steps": grid.decode_seqs[decode],
        "context_tokens of decode steps": grid.context_tokens[decode],
        "prefill_tokens of mixed steps": grid.prefill_tokens[mixed],
        "context_tokens of mixed steps": grid.context_tokens[mixed],
    }
    for name, values in needed.items():
        if len(np.unique(values)) < 2:
            raise CalibrationError(
                f"{path}: {grid.model}: {name}: got {len(np.unique(values))} different values; "
                "at least 2 are needed to tell the coefficients apart"
            )


def _untested(values: Sequence[float]) -> StepTimeCoefficients:
    """Coefficients that a search may try, whether a profile may hold them or not."""
    named = dict(zip(StepTimeCoefficients.model_fields, values, strict=True))
    return StepTimeCoefficients.model_construct(None, **named)


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _region_error(name: str, errors: Floats) -> RegionError:
    return RegionError(
        name,
        len(errors),
        float(errors.mean()),
        float(np.quantile(errors, 0.95)),
        float(errors.max()),
    )
