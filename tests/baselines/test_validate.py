"""Simulated and measured episodes compared, on records made by hand and by the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_tenant_tuning.backends.base import Outcome, RequestOutcomes
from vllm_tenant_tuning.backends.live.client import Completion
from vllm_tenant_tuning.backends.live.records import RecordFile, read_requests, request_record
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.validate import Cell, prepare, with_load
from vllm_tenant_tuning.baselines.validation_measures import (
    ALL,
    Episode,
    compare_episodes,
    inter_token_s,
    pack_requests,
    read_live,
    write_json,
)
from vllm_tenant_tuning.baselines.validation_play import find_pace, play_sim
from vllm_tenant_tuning.profile import StepTimeCoefficients, load_profile
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.workload import Workload

NAN = float("nan")
NO_ITL = [{"p50": NAN, "p95": NAN, "p99": NAN}] * 3


def outcomes(rows: list[tuple[int, Outcome, float, float, float]]) -> RequestOutcomes:
    """Requests of (tenant, outcome, arrival, first token, end), of 10 output tokens each."""
    tenant, outcome, arrival, first, end = (np.array(column) for column in zip(*rows, strict=True))
    n = len(rows)
    return RequestOutcomes(
        tenant=tenant.astype(np.int64),
        prompt_tokens=np.full(n, 5, np.int64),
        output_tokens=np.full(n, 10, np.int64),
        outcome=outcome.astype(np.int8),
        arrival_s=arrival,
        admitted_s=arrival,
        scheduled_s=np.full(n, NAN),
        first_token_s=first,
        finished_s=end,
        preemptions=np.zeros(n, np.int64),
    )


DONE, LOST, CUT = Outcome.COMPLETED, Outcome.DROPPED, Outcome.IN_FLIGHT
SIM = outcomes(
    [
        (0, DONE, 0.0, 0.2, 1.0),
        (0, DONE, 1.0, 1.4, 3.0),
        (0, DONE, 2.0, 2.6, 5.0),
        (1, DONE, 0.0, 1.0, 2.0),
        (1, CUT, 5.0, NAN, NAN),
    ]
)
LIVE = outcomes(
    [
        (0, DONE, 0.0, 0.1, 2.0),
        (0, DONE, 1.0, 1.3, 4.0),
        (0, DONE, 2.0, 2.5, 6.0),
        (1, DONE, 0.0, 1.0, 2.0),
        (1, LOST, 5.0, NAN, 8.0),
    ]
)


def test_measures_of_a_case_calculated_by_hand() -> None:
    rows = compare_episodes(Episode(SIM, NO_ITL), Episode(LIVE, NO_ITL), ("a", "b"), 10.0)
    a, b, both = rows["a"], rows["b"], rows[ALL]
    # latencies 1, 2, 3 against 2, 3, 4
    assert a["latency_s"]["p50"] == {
        "sim": 2.0,
        "live": 3.0,
        "error": pytest.approx(-1 / 3, abs=1e-5),
    }
    assert a["latency_s"]["p99"]["live"] == pytest.approx(3.98)
    # TTFT 0.2, 0.4, 0.6 against 0.1, 0.3, 0.5
    assert a["ttft_s"]["p50"]["sim"] == pytest.approx(0.4)
    assert a["ttft_s"]["p50"]["error"] == pytest.approx(1 / 3, abs=1e-4)
    assert a["correlation"] == {"pairs": 3, "latency": 1.0, "ttft": 1.0}
    assert a["throughput_rps"] == {"sim": 0.3, "live": 0.3, "error": 0.0}
    assert a["output_tokens_per_s"]["sim"] == 3.0
    assert a["itl_s"]["p50"] == {"sim": None, "live": None, "error": None}
    assert b["requests"] == 2
    assert b["completed"] == {"sim": 1, "live": 1}
    assert b["dropped"] == {"sim": 0, "live": 1}
    assert b["correlation"] == {"pairs": 1, "latency": None, "ttft": None}
    assert both["completed"] == {"sim": 4, "live": 4}
    assert both["requests"] == 5
    json.dumps(rows, allow_nan=False)


def test_a_tenant_without_completions_has_no_errors() -> None:
    nothing = outcomes([(0, CUT, 0.0, NAN, NAN)])
    rows = compare_episodes(Episode(nothing, NO_ITL), Episode(nothing, NO_ITL), ("a",), 10.0)
    assert rows["a"]["latency_s"]["p50"] == {"sim": None, "live": None, "error": None}
    assert rows["a"]["throughput_rps"]["error"] is None
    json.dumps(rows, allow_nan=False)


def completion(sent_s: float, first_s: float, end_s: float, tokens: int) -> Completion:
    made = Completion(end="completed", sent_s=sent_s, prompt_tokens=5)
    for at_s in np.linspace(first_s, end_s, tokens):
        made.add_chunk(float(at_s), 1, None)
    return made


def write_episode(
    folder: Path, scenario: Scenario, played: RequestOutcomes, stretch: float = 1.0
) -> None:
    """Records as the live backend writes them, of requests that a simulation has played."""
    folder.mkdir(parents=True)
    write_json(folder / "episode.json", {"tenants": list(scenario.tenant_names)})
    records = RecordFile(folder / "requests.jsonl")
    ended = np.argsort(played.finished_s, kind="stable")
    for r in ended.tolist():
        if played.outcome[r] == Outcome.PENDING:
            continue
        arrival_s, done = float(played.arrival_s[r]), played.outcome[r] == Outcome.COMPLETED
        first_s = arrival_s + stretch * float(played.ttft_s[r])
        end_s = arrival_s + stretch * float(played.latency_s[r])
        records.append(
            request_record(
                request=r,
                tenant=scenario.tenant_names[played.tenant[r]],
                prompt_tokens=int(played.prompt_tokens[r]),
                output_tokens=int(played.output_tokens[r]),
                end="completed" if done else "cut_off",
                start_s=0.0,
                arrival_s=arrival_s,
                admitted_s=arrival_s,
                finished_s=end_s if done else scenario.control.episode_s,
                completion=completion(arrival_s, first_s, end_s, int(played.output_tokens[r]))
                if done
                else None,
            )
        )
    records.close()


SPEED = {"ttft_s": 0.1, "ttft_s_predicted": 0.1, "step_s": 0.02, "step_s_predicted": 0.02}
DELIVERY: dict[str, Any] = {"invalid": ["sends were late by 30.0 ms"]}


def played_before(out: Path, cell: Cell, scenario: Scenario, seed: int, stretch: float) -> None:
    """What `validate` keeps of a live episode, here of one that the simulator played."""
    episode = play_sim(with_load(scenario, cell.load), cell.caps, seed)
    write_episode(out / cell.folder / "episode-0000", scenario, episode.outcomes, stretch)
    pack_requests(out / cell.folder / "episode-0000")
    known = {"episode": "episode-0000", "seed": seed, "delivery": DELIVERY}
    write_json(
        out / cell.folder / "live.json", known | {"server_speed": {"before": SPEED, "after": SPEED}}
    )


def options(out: Path, *more: str) -> list[str]:
    return [
        *("validate", "--scenario", "cpu_chat_batch", "--profile", "cpu-90m", "--out", str(out)),
        *("--seed", "3", "--episode-s", "40", *more),
    ]


@pytest.mark.parametrize("stretch", [1.0, 1.25])
def test_recorded_episodes_are_compared_without_a_server(
    stretch: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = prepare("cpu_chat_batch", load_profile("cpu-90m"), 40.0)
    for cell in (Cell(0.2, (8, 4)), Cell(0.2, (8, 1))):
        played_before(tmp_path, cell, scenario, 3, stretch)
    assert main(options(tmp_path, "--loads", "0.2", "--caps", "8,4", "--caps", "8,1")) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [cell["caps"] for cell in summary["cells"]] == [[8, 4], [8, 1]]
    for cell in summary["cells"]:
        row = cell["tenants"]["all"]
        assert row["correlation"]["latency"] == pytest.approx(1.0, abs=1e-4)
        for q in ("p50", "p95", "p99"):
            for field in ("latency_s", "ttft_s"):
                assert row[field][q]["error"] == pytest.approx(1 / stretch - 1, abs=1e-3)
        assert row["throughput_rps"]["error"] == 0
    assert (tmp_path / "validation.svg").stat().st_size < 200_000
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 of them still to be played live" in printed
    assert printed.count("INVALID: sends were late by 30.0 ms") == 2


def test_records_of_other_requests_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = prepare("cpu_chat_batch", load_profile("cpu-90m"), 40.0)
    cell = Cell(0.2, (8, 3))
    played_before(tmp_path, replace(cell, load=0.3), scenario, 3, 1.0)
    (tmp_path / "load-0.3-caps-8-3").rename(tmp_path / cell.folder)
    assert main(options(tmp_path, "--loads", "0.2")) == 2
    assert "played with other requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "--url: needed, 1 episodes"),
        (("--caps", "9,1"), "tenant 'chat' has 9"),
        (("--caps", "8"), "caps"),
        (("--caps", "8,x"), "--caps: got '8,x'"),
        (("--loads", "0"), "--loads: got 0"),
        (("--loads", "nan"), "--loads: got nan"),
        (("--profile", "other"), "engine profile: 'other'"),
        (("--scenario", "study"), "fidelity 'slots'"),
        (("--episode-s", "41"), "episode_s"),
    ],
)
def test_options_are_refused_before_anything_is_played(
    more: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(options(out, *more)) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_dry_run_says_what_it_would_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        main(options(out, "--dry-run", "--loads", "0.5,1", "--caps", "8,4", "--caps", "4,2")) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("4 episodes of 40 s, 4 of them still to be played live: ")
    assert "about 3 min" in said
    assert not out.exists()


def test_a_load_multiplies_every_rate_and_leaves_the_rest() -> None:
    task = load_scenario("cpu_chat_batch")
    double = with_load(task, 2.0)
    before, after = (Workload(scenario).offered_rate_per_s for scenario in (task, double))
    assert after == pytest.approx(2 * before)
    assert double.control == task.control
    assert double.tenants[0].arrivals.period_s == task.tenants[0].arrivals.period_s


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_the_pace_of_another_server_is_found(factor: float) -> None:
    profile = load_profile("cpu-90m")
    law = {name: factor * value for name, value in profile.step_time.model_dump().items()}
    other = profile.model_copy(update={"step_time": StepTimeCoefficients(**law)})
    measured = play_sim(with_load(prepare("cpu_chat_batch", other, 120.0), 0.6), (8, 3), 5)
    scenario = with_load(prepare("cpu_chat_batch", profile, 120.0), 0.6)
    pace, paced = find_pace(scenario, (8, 3), 5, measured.outcomes)
    assert pace == pytest.approx(factor, rel=2e-3)
    both = ~np.isnan(measured.outcomes.latency_s) & ~np.isnan(paced.outcomes.latency_s)
    assert both.sum() > 50
    ratio = paced.outcomes.latency_s[both] / measured.outcomes.latency_s[both]
    assert np.median(ratio) == pytest.approx(1, abs=0.01)  # single ones may meet another step


def test_without_completions_the_pace_is_the_profile_s() -> None:
    scenario = with_load(prepare("cpu_chat_batch", load_profile("cpu-90m"), 20.0), 0.2)
    nothing = outcomes([(0, CUT, 0.0, NAN, NAN)])
    assert find_pace(scenario, (8, 3), 0, nothing)[0] == 1.0


def test_packed_records_are_the_same_and_always_the_same_bytes(tmp_path: Path) -> None:
    scenario = prepare("cpu_chat_batch", load_profile("cpu-90m"), 20.0)
    played = play_sim(with_load(scenario, 0.2), (8, 4), 0).outcomes
    packed = []
    for name in ("one", "two"):
        write_episode(tmp_path / name, scenario, played)
        plain = read_requests(tmp_path / name)
        pack_requests(tmp_path / name)
        assert read_requests(tmp_path / name) == plain
        packed.append((tmp_path / name / "requests.jsonl.gz").read_bytes())
    assert packed[0] == packed[1]


def test_tokens_of_one_chunk_have_no_time_between_them(tmp_path: Path) -> None:
    made = Completion(end="completed", sent_s=0.0)
    for at_s, tokens in ((1.0, 1), (1.5, 3), (2.5, 1)):
        made.add_chunk(at_s, tokens, None)
    record = request_record(
        request=0,
        tenant="a",
        prompt_tokens=1,
        output_tokens=5,
        end="completed",
        start_s=0.0,
        arrival_s=0.0,
        admitted_s=0.0,
        finished_s=2.5,
        completion=made,
    )
    assert inter_token_s(record) == pytest.approx([0.5, 0.0, 0.0, 1.0])
    folder = tmp_path / "episode"
    folder.mkdir()
    write_json(folder / "episode.json", {"tenants": ["a"]})
    records = RecordFile(folder / "requests.jsonl")
    records.append(record)
    records.close()
    episode, numbers = read_live(folder, ["a"])
    assert numbers.tolist() == [0]
    assert episode.itl_s[0]["p50"] == pytest.approx(0.25)
