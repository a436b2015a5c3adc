"""Scenarios: what is packaged loads, and every mistake gets one message that names it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.scenario import (
    MAX_TENANTS,
    ScenarioError,
    family_names,
    load_scenario,
    parse_scenario,
    scenario_names,
)


def plain(**changes: Any) -> dict[str, Any]:
    """A valid scenario of two tenants as plain data; keys are dotted paths to change."""
    content = yaml.safe_load(yaml.safe_dump(load_scenario("study").model_dump(mode="json")))
    for path, value in changes.items():
        *parents, last = path.split("__")
        part: Any = content
        for key in parents:
            part = part[int(key) if key.isdecimal() else key]
        if value is DELETE:
            del part[last]
        else:
            part[last] = value
    return content


DELETE = object()


@pytest.mark.parametrize("name", scenario_names())
def test_a_packaged_scenario_survives_yaml(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    again = parse_scenario(yaml.safe_load(yaml.safe_dump(scenario.model_dump(mode="json"))))
    assert again == scenario


def test_a_path_is_read_and_a_scenario_is_returned_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(plain(name="mine")), encoding="utf-8")
    scenario = load_scenario(file)
    assert scenario.name == "mine"
    assert load_scenario(str(file)) == scenario
    assert load_scenario(scenario) is scenario


def test_a_scenario_is_frozen() -> None:
    scenario = load_scenario("study")
    with pytest.raises(ValueError, match="frozen"):
        scenario.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("n_tenants", [1, MAX_TENANTS])
def test_one_to_sixty_four_tenants(n_tenants: int) -> None:
    tenant = plain()["tenants"][0]
    tenants = [tenant | {"name": f"t{i}"} for i in range(n_tenants)]
    assert parse_scenario(plain(tenants=tenants)).n_tenants == n_tenants


LOGNORMAL = {"distribution": "lognormal", "median_tokens": 100, "sigma": 1}
QUANTILES = {"distribution": "quantiles", "probabilities": [0, 0.5, 1], "tokens": [1, 10, 99]}
BURSTS = {
    "process": "periodic_bursts",
    "on_rate_per_s": 1,
    "off_rate_per_s": 0,
    "period_s": 10,
    "on_s": 5,
}
TENANT = "tenants__0__"

MALFORMED: list[tuple[dict[str, Any], list[str]]] = [
    ({"nmae": "x"}, ["nmae", "unknown key"]),
    ({"name": DELETE}, ["name", "missing"]),
    ({"name": "Über"}, ["name", "'Über'", "pattern"]),
    ({"question": ""}, ["question", "at least 1 character"]),
    ({"tenants": []}, ["tenants", "at least 1"]),
    ({"tenants": [plain()["tenants"][0]] * 2}, ["tenant names must differ", "a, a"]),
    ({"tenants": "two"}, ["tenants", "'two'"]),
    ({TENANT + "name": "a b"}, ["tenants.0.name", "'a b'"]),
    ({TENANT + "colour": "red"}, ["tenants.0.colour", "unknown key"]),
    ({TENANT + "cap_initial": 9}, ["tenant 'a'", "9", "1 to 8"]),
    ({TENANT + "cap_initial": 0}, ["tenant 'a'", "0", "1 to 8"]),
    ({TENANT + "cap_initial": 4.5}, ["tenants.0.cap_initial", "4.5", "integer"]),
    ({TENANT + "patience_s": -1}, ["tenants.0.patience_s", "-1", "greater than or equal to 0"]),
    ({TENANT + "patience_s": float("nan")}, ["tenants.0.patience_s", "nan", "finite"]),
    ({TENANT + "queue_limit": 0}, ["tenants.0.queue_limit", "0", "greater than or equal to 1"]),
    ({TENANT + "slo_latency_p99_s": 0}, ["tenants.0.slo_latency_p99_s", "0", "greater than 0"]),
    ({TENANT + "slo_weight": -0.1}, ["tenants.0.slo_weight", "-0.1"]),
    ({TENANT + "arrivals__process": "weibull"}, ["tenants.0.arrivals", "poisson", "trace"]),
    (
        {TENANT + "arrivals__rate_per_s": -0.5},
        ["tenants.0.arrivals.poisson.rate_per_s", "-0.5", "greater than or equal to 0"],
    ),
    (
        {TENANT + "arrivals__rate_per_s": "fast"},
        ["tenants.0.arrivals.poisson.rate_per_s", "'fast'", "number"],
    ),
    ({TENANT + "arrivals__rate_per_s": float("inf")}, ["rate_per_s", "inf", "finite"]),
    ({TENANT + "arrivals": BURSTS | {"on_s": 11}}, ["on_s (11", "at most period_s"]),
    (
        {TENANT + "arrivals": {"process": "gamma", "rate_per_s": 1, "cv": 0}},
        ["arrivals.gamma.cv", "0", "0.01"],
    ),
    (
        {TENANT + "arrivals": {"process": "piecewise", "rates_per_s": [1], "durations_s": [1, 2]}},
        ["rates_per_s has 1", "durations_s 2"],
    ),
    (
        {TENANT + "arrivals": {"process": "trace", "format": "aws", "file": "x"}},
        ["arrivals.trace.format", "'aws'", "'azure'"],
    ),
    (
        {
            TENANT + "arrivals": {
                "process": "trace",
                "format": "azure",
                "file": "x",
                "sample_fraction": 1.5,
            }
        },
        ["sample_fraction", "1.5", "less than or equal to 1"],
    ),
    (
        {TENANT + "prompt_tokens": {"distribution": "trace"}},
        ["tenants.0", "prompt_tokens", "'poisson'"],
    ),
    ({TENANT + "prompt_tokens__tokens": 0}, ["prompt_tokens.fixed.tokens", "0"]),
    ({TENANT + "output_tokens": LOGNORMAL | {"sigma": 9}}, ["output_tokens.lognormal.sigma", "9"]),
    (
        {TENANT + "output_tokens": LOGNORMAL | {"min_tokens": 5, "max_tokens": 4}},
        ["min_tokens (5)", "max_tokens (4)"],
    ),
    (
        {TENANT + "output_tokens": QUANTILES | {"probabilities": [0.1, 0.5, 1]}},
        ["probabilities must begin at 0"],
    ),
    (
        {TENANT + "output_tokens": QUANTILES | {"tokens": [10, 5, 99]}},
        ["tokens must not decrease"],
    ),
    ({TENANT + "output_tokens": QUANTILES | {"tokens": [1, 2]}}, ["probabilities has 3", "2"]),
    ({TENANT + "service": {"model": "exponential"}}, ["service.exponential.mean_s", "missing"]),
    ({TENANT + "service__mean_s": 0}, ["service.exponential.mean_s", "0", "greater than 0"]),
    ({TENANT + "service": None}, ["tenants.0.service", "missing", "slots"]),
    ({TENANT + "slo_ttft_p99_s": 1}, ["tenants.0.slo_ttft_p99_s", "fidelity 'engine'"]),
    ({"engine__fidelity": "exact"}, ["engine.fidelity", "'exact'", "'slots'"]),
    ({"engine__max_num_seqs": 0}, ["engine.slots.max_num_seqs", "0"]),
    ({"engine__tick_s": 0.7}, ["control_interval_s (3.0)", "tick_s (0.7)", "multiple"]),
    (
        {"engine__knee": {"slowdown": -1, "segments": [{"duration_s": 1, "knee": 1}]}},
        ["engine.slots.knee.slowdown", "-1"],
    ),
    (
        {"engine__knee": {"slowdown": 1, "segments": []}},
        ["engine.slots.knee.segments", "at least 1"],
    ),
    ({"control__episode_s": 1000}, ["episode_s (1000", "control_interval_s (3"]),
    ({"control__control_interval_s": 1e-13}, ["control.control_interval_s", "1e-13", "0.001"]),
    ({"control__cap_min": 9}, ["cap_min (9)", "cap_max (8)"]),
    ({"control__max_delta": 0}, ["control.max_delta", "0"]),
    ({"control__total_cap": 7}, ["sum is 8", "total_cap 7"]),
    ({"control__total_cap": 1}, ["total_cap (1)", "cap_min (1)", "2 tenants"]),
    ({"control__window_s": 0.25}, ["control.window_s (0.25)", "tick_s (0.5)"]),
    ({"reward__w_drop": "much"}, ["reward.w_drop", "'much'"]),
    ({"reward__slo_clip": 0}, ["reward.slo_clip", "0"]),
    ({"engine__max_num_seqs": True}, ["engine.slots.max_num_seqs", "got true", "number"]),
    ({"control__cap_min": False}, ["control.cap_min", "got false", "number"]),
    (
        {
            TENANT + "arrivals": {
                "process": "piecewise",
                "rates_per_s": [1, True],
                "durations_s": [1, 2],
            }
        },
        ["tenants.0.arrivals.piecewise.rates_per_s", "got true", "number"],
    ),
    ({"reward__throughput_unit": "words"}, ["throughput_unit", "'words'", "'output_tokens'"]),
]


@pytest.mark.parametrize(
    ("changes", "expected"), MALFORMED, ids=[expected[0] for _, expected in MALFORMED]
)
def test_a_mistake_is_named_with_value_and_what_is_accepted(
    changes: dict[str, Any], expected: list[str]
) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(plain(**changes), "mine")
    message = str(caught.value)
    assert message.startswith("scenario mine: ")
    assert "\n" not in message
    for part in expected:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not YAML"),
        ("", "NoneType"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("name: !!python/object/apply:os.getcwd []", "not YAML"),
        ("name: 2001-99-99", "not YAML: month must be in 1..12"),
        ("name: !!int abc", "not YAML: invalid literal"),
        ("name: " + "9" * 5000, "not YAML: Exceeds the limit"),
    ],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError, match=expected):
        load_scenario(file)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "missing.yaml",
        lambda folder: folder,
        lambda folder: "no_such_scenario",
    ],
)
def test_a_scenario_that_is_not_there(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    with pytest.raises(ScenarioError, match=r"neither a packaged scenario .*study.* nor a file"):
        load_scenario(make(tmp_path))


def test_binary_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenario(file)


def test_the_command_line_lists_shows_and_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scenarios", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == scenario_names() + family_names()

    assert main(["scenarios", "show", "moving_knee"]) == 0
    shown = capsys.readouterr().out
    assert parse_scenario(yaml.safe_load(shown)) == load_scenario("moving_knee")

    file = tmp_path / "shown.yaml"
    file.write_text(shown, encoding="utf-8")
    assert main(["scenarios", "check", str(file)]) == 0
    assert "is fine" in capsys.readouterr().out

    content = copy.deepcopy(yaml.safe_load(shown))
    content["tenants"][1]["patience_s"] = -3
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert main(["scenarios", "check", str(file)]) == 2
    assert "tenants.1.patience_s: got -3" in capsys.readouterr().err
