"""Measurements of ServeGen's clients: of files made up here, and of the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from vllm_tenant_tuning.baselines import measure_servegen
from vllm_tenant_tuning.scenario import load_scenario
from vllm_tenant_tuning.workload import TraceError

DAY = 144  # bins


def write_client(
    folder: Path, rates: list[float], cvs: list[float], lengths: dict[str, dict[str, str]] | None
) -> None:
    """A client of number 7 whose bins start at 0."""
    rows = [
        f"{600 * i},{rate},{cv},Gamma,1,1" if rate else f"{600 * i},0,0,,0,0"
        for i, (rate, cv) in enumerate(zip(rates, cvs, strict=True))
    ]
    (folder / "chunk-7-trace.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    if lengths is not None:
        (folder / "chunk-7-dataset.json").write_text(json.dumps(lengths), encoding="utf-8")


def test_the_busiest_hour_is_measured_and_the_lengths_of_its_peak(tmp_path: Path) -> None:
    rates = [0.0] * DAY
    rates[20:28] = [1, 2, 2, 2, 8, 2, 2, 1]  # the hour from bin 21 on has 18 of 20
    cvs = [1.0] * DAY
    cvs[24] = 3.0
    empty = {"input_tokens": "{}", "output_tokens": "{}"}
    at_peak = {
        "input_tokens": "{10: 0.25, 30: 0.25, 20: 0.5}",
        "output_tokens": "{0: 0.5, 4: 0.5}",
    }
    # the dataset of the peak, bin 24, begins exactly with it
    write_client(tmp_path, rates, cvs, {"0": empty, "14400": at_peak, "43200": empty})
    measured = measure_servegen.measure_client(tmp_path, 7)
    assert (measured["start_s"], measured["duration_s"]) == (21 * 600.0, 3600.0)
    assert measured["rate_per_s"] == 3.0
    assert measured["cv"] == pytest.approx((10 * 1.0 + 8 * 3.0) / 18, rel=1e-3)
    prompt, output = measured["prompt_tokens"], measured["output_tokens"]
    assert prompt["mean"] == 20.0
    quantiles = dict(zip(prompt["probabilities"], prompt["tokens"], strict=True))
    assert [quantiles[p] for p in (0, 0.2, 0.3, 0.7, 0.8, 1)] == [10, 10, 20, 20, 30, 30]
    assert output["mean"] == 2.5  # a token of 0 counts as 1
    assert output["tokens"][0] == 1


def test_quantiles_are_those_of_a_sample_of_the_distribution() -> None:
    rng = np.random.default_rng(0)
    values = np.arange(5, 400, 3)
    weights = rng.dirichlet(np.ones(values.size))
    lengths = dict(zip(values.tolist(), weights.tolist(), strict=True))
    sample = rng.choice(values, 200_000, p=weights)
    probabilities = (0.1, 0.5, 0.9, 0.99)
    expected = np.quantile(sample, probabilities, method="inverted_cdf")
    np.testing.assert_allclose(measure_servegen.quantiles(lengths, probabilities), expected, atol=6)


def test_hours_are_averaged_over_days(tmp_path: Path) -> None:
    first, second = np.arange(DAY), 3.0 * np.arange(DAY)
    write_client(tmp_path, [*first, *second], [1.0] * 2 * DAY, None)
    measured = measure_servegen.measure_client(tmp_path, 7)
    hours = 2.0 * np.arange(DAY).reshape(24, 6).mean(axis=1)
    np.testing.assert_allclose(measured["hourly_rate_per_s"], hours, rtol=1e-3)
    assert measured["prompt_tokens"] is None


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("0,1,1,Gamma,1\n", 1, "5 fields, expected 6"),
        ("0,1,1,Gamma,1,1\n600,x,1,Gamma,1,1\n", 2, "numbers"),
        ("0,-1,1,Gamma,1,1\n", 1, "0 or more"),
        ("0,nan,1,Gamma,1,1\n", 1, "0 or more"),
        ("0,1,1,Gamma,1,1\n1200,1,1,Gamma,1,1\n", 2, "expected 600 s"),
        ("0,1,1,Gamma,1,1\n", None, "at least 6"),
        ("".join(f"{600 * i},0,0,,0,0\n" for i in range(6)), None, "no request"),
    ],
)
def test_a_malformed_trace_is_refused(
    tmp_path: Path, text: str, line: int | None, reason: str
) -> None:
    (tmp_path / "chunk-7-trace.csv").write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=reason) as caught:
        measure_servegen.measure_client(tmp_path, 7)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ({}, "not of ServeGen's form"),
        ({"0": {"input_tokens": "{}", "output_tokens": "{}"}}, "no distribution"),
        ({"0": {"input_tokens": "{1: 0.4}", "output_tokens": "{1: 1.0}"}}, "no distribution"),
        ({"0": {"input_tokens": "open('x')", "output_tokens": "{}"}}, "not of ServeGen's form"),
    ],
)
def test_a_malformed_dataset_is_refused(
    tmp_path: Path, lengths: dict[str, dict[str, str]], reason: str
) -> None:
    write_client(tmp_path, [1.0] * 6, [1.0] * 6, lengths)
    with pytest.raises(TraceError, match=reason):
        measure_servegen.measure_client(tmp_path, 7)


def test_the_command_says_which_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        measure_servegen.main([str(tmp_path), "--client", "7"])
    assert caught.value.code == 2
    assert "chunk-7-trace.csv" in capsys.readouterr().err


STAND_INS = {1: 2, 5: 3}
"""Clients whose lengths are not published, and those that stand in for them."""


@pytest.mark.shared
@pytest.mark.parametrize("client", [0, 1, 2, 3, 4, 5, 10, 20])
def test_h200_servegen_holds_what_the_command_prints(
    shared: Callable[[str], Path], capsys: pytest.CaptureFixture[str], client: int
) -> None:
    folder = shared(f"traces/servegen/chunk-{client}-trace.csv").parent

    def printed(number: int) -> dict[str, dict[str, list[float]]]:
        measure_servegen.main([str(folder), "--client", str(number)])
        return dict(yaml.safe_load(capsys.readouterr().out))

    tenants = {tenant.name: tenant for tenant in load_scenario("h200_servegen").tenants}
    tenant, measured = tenants[f"client-{client}"], printed(client)
    arrivals = tenant.arrivals
    assert arrivals.process == "gamma"
    stretch = 100 if client == 5 else 4
    assert stretch * arrivals.rate_per_s == pytest.approx(measured["rate_per_s"], rel=1e-5)
    assert arrivals.cv == measured["cv"]
    lengths = printed(STAND_INS.get(client, client))
    for field in ("prompt_tokens", "output_tokens"):
        described = getattr(tenant, field)
        assert list(described.probabilities) == lengths[field]["probabilities"]
        assert list(described.tokens) == lengths[field]["tokens"]


@pytest.mark.shared
def test_h200_diurnal_has_the_hours_that_the_command_prints(
    shared: Callable[[str], Path],
) -> None:
    folder = shared("traces/servegen/chunk-5-trace.csv").parent
    hours = measure_servegen.measure_client(folder, 5)["hourly_rate_per_s"]
    consumers = load_scenario("h200_diurnal").tenants[0].arrivals
    assert consumers.process == "piecewise"
    np.testing.assert_allclose(np.array(consumers.rates_per_s) * 30, hours, rtol=1e-3)
    assert set(consumers.durations_s) == {60.0}
