"""Evaluation: what a record says is what happened, whoever runs it and however often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from missing_extra import run_without
from test_env import short

from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.backends import Outcome
from vllm_tenant_tuning.baselines import evaluate as module
from vllm_tenant_tuning.baselines.best_static import find_best_static
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.command_line import explain_missing, parse_seeds
from vllm_tenant_tuning.baselines.episode import make_env, play
from vllm_tenant_tuning.baselines.evaluate import EPISODES_FILE, evaluate
from vllm_tenant_tuning.baselines.records import read_records

SHORT = short("premium_burst", 120.0)


def comparable(records: list[Any]) -> list[Any]:
    return [record.model_copy(update={"wall_s": 0.0}) for record in records]


def test_a_record_agrees_with_the_outcomes_of_single_requests() -> None:
    env = make_env(SHORT)
    inner: Any = env.unwrapped
    policy = make_policy("differentiated")
    record, trajectory = play(env, policy, 3)
    outcomes = inner.outcomes()
    done = outcomes.outcome == Outcome.COMPLETED
    latency_s = outcomes.latency_s[done]
    dropped = outcomes.outcome == Outcome.DROPPED
    assert record.throughput_rps == done.sum() / 120
    assert record.goodput_rps == (latency_s <= 12.0).sum() / 120
    assert record.drops == dropped.sum()
    assert (
        record.weighted_drops
        == (dropped & (outcomes.tenant == 1)).sum() + 5 * (dropped & (outcomes.tenant == 0)).sum()
    )
    assert record.latency_p99_s == np.percentile(latency_s, 99)
    held_s = np.where(done, outcomes.finished_s, 120.0) - outcomes.admitted_s
    assert record.cost == pytest.approx(np.nansum(held_s) / 120 / 8)
    assert record.steps == 40
    assert trajectory["time_s"].tolist() == [3.0 * (i + 1) for i in range(40)]
    assert trajectory["completed"].sum() == done.sum()

    policy.reset(SHORT, 3)
    observation, info = env.reset(seed=3)
    total, changes, caps = 0.0, 0, info["caps"]
    for _ in range(40):
        observation, reward, _, _, info = env.step(policy.act(observation, info))
        total += float(reward)
        changes += int((info["caps"] != caps).sum())
        caps = info["caps"]
    assert record.return_ == pytest.approx(total)
    assert sum(record.reward_terms.model_dump().values()) == pytest.approx(total)
    assert record.cap_changes == changes


def test_processes_and_order_do_not_matter(tmp_path: Path) -> None:
    policies = ["static", "naive"]
    alone = evaluate(policies, SHORT, range(12), tmp_path / "alone", workers=1)
    shared = evaluate(policies, SHORT, range(12), tmp_path / "shared", workers=2)
    assert comparable(alone) == comparable(shared)
    assert [(r.policy, r.seed) for r in shared] == [(p, s) for p in policies for s in range(12)]


def test_it_resumes_and_plays_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[tuple[str, int]] = []
    original = module.play

    def counting(env: Any, policy: Any, seed: int) -> Any:
        played.append((policy.name, seed))
        return original(env, policy, seed)

    monkeypatch.setattr(module, "play", counting)
    evaluate(["static", "naive"], SHORT, range(3), tmp_path, workers=1)
    assert len(played) == 6
    file = tmp_path / EPISODES_FILE
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]) + lines[4][:37])  # killed in the middle of a line
    played.clear()
    records = evaluate(["static", "naive"], SHORT, range(4), tmp_path, workers=1)
    assert sorted(played) == [("naive", 1), ("naive", 2), ("naive", 3), ("static", 3)]
    assert comparable(records) == comparable(
        evaluate(["static", "naive"], SHORT, range(4), tmp_path / "fresh", workers=1)
    )

    other = SHORT.model_copy(update={"description": "other"})
    played.clear()
    evaluate(["static"], other, range(2), tmp_path, workers=1)
    assert len(played) == 2  # another scenario of the same name is not the same


def test_what_was_measured_before_a_crash_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = module.play

    def failing(env: Any, policy: Any, seed: int) -> Any:
        if seed == 7:
            raise RuntimeError("broken")
        return original(env, policy, seed)

    monkeypatch.setattr(module, "play", failing)
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(["static"], SHORT, range(10), tmp_path, workers=1)
    assert [record.seed for record in read_records(tmp_path / EPISODES_FILE)] == list(range(5))


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (["nave"], "policy: got 'nave'"),
        (["static", "static"], "names must differ"),
        (["static:99/1"], "tenant 'premium' has 99"),
        (["static:1"], "got 1 of them"),
    ],
)
def test_wrong_policies_are_refused_before_anything_is_played(
    tmp_path: Path, policies: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(policies, SHORT, range(2), tmp_path)
    assert not (tmp_path / EPISODES_FILE).exists()


@pytest.mark.parametrize("text", ["", "5", "5:5", "7:5", "-1:5", "0:1001", "a:b", "0:5:2", "1.0:2"])
def test_seed_ranges_are_checked(text: str) -> None:
    with pytest.raises(ValueError, match="accepted is A:B"):
        parse_seeds(text)
    assert parse_seeds("3:5") == range(3, 5)


def test_the_best_static_is_the_best_of_the_grid_played_one_by_one() -> None:
    control = {"cap_max": 3, "cap_min": 1}
    scenario = short("premium_burst", 60.0, **control)
    tenants = tuple(t.model_copy(update={"cap_initial": 1}) for t in scenario.tenants)
    scenario = scenario.model_copy(update={"tenants": tenants})
    seeds = range(10_000, 10_004)
    found = find_best_static(scenario, seeds)
    env = make_env(scenario)
    returns = {
        (a, b): np.mean([play(env, make_policy(f"static:{a}/{b}"), s)[0].return_ for s in seeds])
        for a in range(1, 4)
        for b in range(1, 4)
    }
    assert found.tried == pytest.approx(returns)
    assert found.caps == max(returns, key=lambda caps: returns[caps])


def test_the_best_static_of_many_tenants_cannot_be_bettered_by_one_cap() -> None:
    study = short("study", 60.0)
    tenants = tuple(study.tenants[1].model_copy(update={"name": f"t{i}"}) for i in range(4))
    scenario = study.model_copy(update={"tenants": tenants})
    seeds = range(10_000, 10_003)
    heard: list[tuple[int, int]] = []
    found = find_best_static(
        scenario, seeds, on_progress=lambda tried, known: heard.append((tried, known))
    )
    assert len(found.tried) < 8**4
    assert heard == sorted(heard)
    assert heard[-1] == (len(found.tried),) * 2
    env = make_env(scenario)
    for tenant in range(4):
        for cap in (1, 4, 8):
            caps = [*found.caps]
            caps[tenant] = cap
            text = "static:" + "/".join(map(str, caps))
            mean = np.mean([play(env, make_policy(text), s)[0].return_ for s in seeds])
            assert mean <= found.mean_return + 1e-9


def test_the_command_writes_records_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--policies", "static,naive,best_static", "--scenario", "reserved"]
    arguments += ["--seeds", "0:4", "--out", str(tmp_path)]
    assert main(["evaluate", *arguments]) == 0
    printed = capsys.readouterr().out
    records = read_records(tmp_path / EPISODES_FILE)
    assert len(records) == 12
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "naive" in printed
    assert "best_static" in printed

    assert main(["evaluate", "--seeds", "0:2000", "--out", str(tmp_path)]) == 2
    assert "seeds: got '0:2000'" in capsys.readouterr().err
    assert main(["evaluate", "--scenario", "nowhere", "--out", str(tmp_path)]) == 2
    assert "neither a packaged scenario" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["evaluate", "--policies", "static", "--out", "new"], ["study", "--seeds", "1"]],
)
def test_where_a_library_is_missing_the_message_names_its_extra(
    arguments: list[str], tmp_path: Path
) -> None:
    arguments = [str(tmp_path / word) if word == "new" else word for word in arguments]
    process = run_without("rich", arguments)
    assert process.returncode == 2
    assert "pip install 'vllm-tenant-tuning[report]'" in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", [None, "nowhere", "sub.nowhere", "numpy"])
def test_a_library_of_no_extra_is_named_as_it_is(name: str | None) -> None:
    assert explain_missing(ImportError("not there", name=name)) == "not there"
