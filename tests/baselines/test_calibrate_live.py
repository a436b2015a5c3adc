"""Fits of trials that a simulated server of known coefficients has gone through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twins.engine import EngineTwin
from twins.engine_cases import make_scenario, make_stream

from vllm_tenant_tuning.baselines.calibrate import CalibrationError
from vllm_tenant_tuning.baselines.calibrate_live import (
    fit_frontend,
    fit_trials,
    read_trials,
    step_points,
)
from vllm_tenant_tuning.baselines.calibration_trials import (
    DECODE_STEPS,
    PAGES,
    Limits,
    Trial,
    plan,
)
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.profile import load_profile

STEP_TIME = {
    "base_ms": 9.0,
    "weights_ms": 6.0,
    "dense_ms_per_token": 0.5,
    "sequence_ms": 0.4,
    "kv_read_ms_per_token": 0.002,
    "prefill_attention_ms_per_pair": 4e-4,
}
FRONTEND = {"request_s": 0.002, "prompt_token_s": 3e-6, "delay_s": 0.004}
LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=2048, kv_tokens=1024 * 128
)
PAGE_CPU_S = 0.01
SERVER = {
    "record": "server",
    "url": "http://127.0.0.1:1",
    "model": "made-up",
    "num_gpu_blocks": 1024,
    "block_size": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "max_model_len": 2048,
    "began": "2026-01-01T00:00:00+00:00",
    "rounds": 1,
    "salt": 0,
}
GIVEN = {"name": "mine", "gpu": "a GPU"}


def simulated(trial: Trial, frontend: dict[str, float] = FRONTEND) -> dict[str, Any]:
    """The record of a trial on a server that the step-by-step twin plays."""
    background = {
        "decode": [(0.0, trial.context_tokens, DECODE_STEPS + trial.sequences)] * trial.sequences,
        "mixed": [(0.0, trial.context_tokens, 1500)] * trial.sequences,
    }.get(trial.kind, [])
    # one after another: the longest prompt here takes under 2 s
    apart_s = 4.0 if trial.kind == "mixed" else 0.0
    probes = [(apart_s * (i + 0.5), tokens, 1) for i, tokens in enumerate(trial.prompts)]
    scenario = make_scenario(
        tenants=({}, {}),
        step_time=STEP_TIME,
        frontend=frontend,
        num_gpu_blocks=1024,
        block_size=128,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=2048,
    )
    twin = EngineTwin(scenario)
    twin.reset(make_stream(background, probes), [64, 64])
    for _ in range(40):
        twin.advance([64, 64])
    lines = []
    counters = {"queue_time_s": 0.0, "prefill_time_s": 0.0, "prefill_time_requests": 0.0}
    for role, tenant in zip(("background", "probe"), twin.tenants, strict=True):
        for request in tenant.requests:
            # a sequence of "mixed" is cut off when the last prompt is through
            until = len(trial.prompts) * apart_s * 1e12 if trial.kind == "mixed" else np.inf
            times = [at / 1e12 for at in request.token_times if at <= until]
            lines.append(
                {
                    "role": role,
                    "prompt_tokens": request.prompt,
                    "end": "completed",
                    "sent_s": request.sent / 1e12,
                    "chunk_s": [round(at, 6) for at in times],
                }
            )
            counters["queue_time_s"] += (request.scheduled - request.ready) / 1e12
            counters["prefill_time_s"] += (request.token_times[0] - request.scheduled) / 1e12
            counters["prefill_time_requests"] += 1
    pages = PAGES if trial.kind == "pages" else 2
    work_s = sum(
        frontend["request_s"] + frontend["prompt_token_s"] * line["prompt_tokens"] for line in lines
    )
    return {
        "record": "trial",
        "number": 0,
        "kind": trial.kind,
        "sequences": trial.sequences,
        "context_tokens": trial.context_tokens,
        "pages": pages,
        "requests": lines,
        "counters": counters | {"api_cpu_s": PAGE_CPU_S * pages + work_s},
    }


@pytest.fixture(scope="module")
def trials() -> list[dict[str, Any]]:
    return [simulated(trial) for shift in (0.0, 0.5) for trial in plan(LIMITS, shift)]


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_coefficients_of_the_simulated_server_are_found(
    trials: list[dict[str, Any]], tmp_path: Path
) -> None:
    records = write(tmp_path / "records.jsonl", SERVER, *trials)
    out = tmp_path / "mine.yaml"
    fit_trials([records], out, template=None, given=GIVEN, command="a test")
    profile = load_profile(out)
    for name, value in STEP_TIME.items():
        assert getattr(profile.step_time, name) == pytest.approx(value, rel=0.04), name
    assert profile.frontend.request_s == pytest.approx(FRONTEND["request_s"], rel=0.05)
    assert profile.frontend.prompt_token_s == pytest.approx(FRONTEND["prompt_token_s"], rel=0.05)
    assert profile.frontend.delay_s == pytest.approx(FRONTEND["delay_s"], rel=0.05)
    assert profile.kv_cache.num_gpu_blocks == 1024
    assert profile.kv_cache.block_size == 128
    assert profile.scheduler.model_dump() == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
    }
    assert profile.fit is not None
    assert profile.fit.mean_relative_error < 0.01
    assert profile.fit.regions is not None
    assert sum(region.points for region in profile.fit.regions.values()) == profile.fit.points


def test_every_kind_of_step_is_a_point(trials: list[dict[str, Any]]) -> None:
    grid = step_points(SERVER, trials)
    decode, alone = grid.prefill_tokens == 0, grid.decode_seqs == 0
    assert set(grid.decode_seqs[decode]) == {1, 2, 3, 4, 6, 8}
    assert alone.sum() == sum(trial["kind"] == "idle" for trial in trials)
    mixed = ~decode & ~alone
    probes = [t for trial in trials if trial["kind"] == "mixed" for t in trial["requests"]]
    assert mixed.sum() == sum(request["role"] == "probe" for request in probes)
    assert set(grid.decode_seqs[mixed]) >= {1, 4, 7}


def test_tokens_that_come_in_lumps_give_the_same_mean_step() -> None:
    trial = simulated(Trial("decode", 2, 64, ()))
    lumped = json.loads(json.dumps(trial))
    for request in lumped["requests"]:
        times = request["chunk_s"]
        # after the first, two tokens at a time
        request["chunk_s"] = [times[0], *times[2::2]]
        request["chunk_tokens"] = [1] + [2] * (len(times[2::2]))
    exact = step_points(SERVER, [trial] * 12).step_ms.mean()
    assert step_points(SERVER, [lumped] * 12).step_ms.mean() == pytest.approx(exact, rel=0.01)


def test_a_page_without_cpu_time_leaves_it_all_to_the_delay(trials: list[dict[str, Any]]) -> None:
    silent = [
        {**trial, "counters": {k: v for k, v in trial["counters"].items() if k != "api_cpu_s"}}
        for trial in trials
    ]
    frontend = fit_frontend(silent).frontend
    assert frontend.request_s == 0
    expected = FRONTEND["request_s"] + FRONTEND["delay_s"]
    assert frontend.delay_s == pytest.approx(expected, rel=0.02)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "records.jsonl", SERVER, {"record": "trial", "number": 0})
    with path.open("a") as lines:
        lines.write('{"record": "trial", "num')
    server, trials = read_trials(path)
    assert server == SERVER
    assert [trial["number"] for trial in trials] == [0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "expected a line 'server'"),
        ('{"record": "trial"}\n', "expected a line 'server'"),
        ("[1]\n", "expected a line 'server'"),
        ("{}{}\n", "cannot be read"),
    ],
)
def test_other_files_are_refused(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=says):
        read_trials(path)


def test_records_of_two_servers_are_not_mixed(trials: list[dict[str, Any]], tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", SERVER, *trials)
    two = write(tmp_path / "two.jsonl", SERVER | {"num_gpu_blocks": 500}, *trials)
    with pytest.raises(CalibrationError, match="num_gpu_blocks: got 500"):
        fit_trials([one, two], tmp_path / "x.yaml", template=None, given=GIVEN, command="a test")


def test_too_few_steps_are_refused(trials: list[dict[str, Any]]) -> None:
    with pytest.raises(CalibrationError, match="at least 18"):
        step_points(SERVER, trials[:6])


def test_a_server_without_its_own_times_is_refused(trials: list[dict[str, Any]]) -> None:
    silent = [{**trial, "counters": {}} for trial in trials]
    with pytest.raises(CalibrationError, match="vllm:request_queue_time_seconds"):
        fit_frontend(silent)


def test_a_small_context_is_refused() -> None:
    with pytest.raises(CalibrationError, match="max_model_len"):
        plan(
            Limits(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=100, kv_tokens=10**6)
        )


def test_no_trial_asks_for_more_than_the_server_holds() -> None:
    for limits in (
        LIMITS,
        Limits(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=512, kv_tokens=4096),
        Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, kv_tokens=60_000),
    ):
        for trial in [*plan(limits), *plan(limits, 0.9)]:
            tokens = trial.context_tokens + 2 * DECODE_STEPS
            assert trial.sequences <= limits.max_num_seqs
            assert trial.sequences * tokens <= limits.kv_tokens
            assert max((0, *trial.prompts)) < limits.max_model_len
            assert max((0, *trial.prompts)) <= limits.max_num_batched_tokens


def test_records_are_fitted_again_by_the_command(
    trials: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = write(tmp_path / "records.jsonl", SERVER, *trials)
    out = tmp_path / "mine.yaml"
    more = write(tmp_path / "more.jsonl", SERVER, *trials[:4])
    options = ["--records", str(records), "--records", str(more), "--out", str(out)]
    options += ["--name", "mine", "--gpu", "a GPU"]
    assert main(["calibrate", *options, "--max-num-seqs", "6"]) == 0
    assert "add" in capsys.readouterr().out
    assert load_profile(out).scheduler.max_num_seqs == 6
    assert main(["calibrate", *options, "--sequence-ms", "1"]) == 2
    assert "--sequence-ms" in capsys.readouterr().err
