"""Decision traces: every move of a rule that tells has its reason, and none is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_env import short

from vllm_tenant_tuning.baselines.decision_traces import (
    TRACES_FILE,
    UNTOLD,
    DecisionTrace,
    record_traces,
)
from vllm_tenant_tuning.baselines.evaluate import Contender, trajectories
from vllm_tenant_tuning.baselines.records import read_lines

SCENARIO = short("premium_burst", 600.0)
UP = {
    "naive": "queued",
    "per_tenant_window_p99": "queued",
    "coupled_backlog": "backlog above",
    "differentiated": "backlog above",
    "aimd": "half of the cap",
}
DOWN = {
    "naive": ("window p99", "occupancy"),
    "per_tenant_window_p99": ("window p99", "occupancy"),
    "coupled_backlog": ("backlog at most",),
    "differentiated": ("backlog at most",),
    "aimd": ("p99 above the SLO", "requests failed"),
}


def traced(policy: str, folder: Path) -> DecisionTrace:
    record_traces([(Contender(policy, policy), "0123")], SCENARIO, 0, folder)
    (trace,) = read_lines(folder / TRACES_FILE, DecisionTrace)
    return trace


@pytest.mark.parametrize("policy", UP)
def test_moves_are_explained_and_go_the_way_of_the_reason(policy: str, tmp_path: Path) -> None:
    trace = traced(policy, tmp_path)
    assert trace.explained
    assert {move.change for move in trace.moves} == {-1, 1}
    for move in trace.moves:
        assert move.reason.startswith(UP[policy] if move.change > 0 else DOWN[policy]), move


@pytest.mark.parametrize("policy", ["robust", "robust:-signal-scope", "robust:-asymmetry"])
def test_the_robust_controller_leaves_no_move_unexplained(policy: str, tmp_path: Path) -> None:
    trace = traced(policy, tmp_path)
    assert trace.moves
    assert UNTOLD not in {move.reason for move in trace.moves}
    for move in trace.moves:
        up = move.reason in {
            "backlog above the cap",
            "forecast above the cap",
            "room left in the budget",
        }
        assert up == (move.change > 0)


def test_a_policy_that_does_not_tell_is_said_not_to(tmp_path: Path) -> None:
    trace = traced("fair_share", tmp_path)
    assert not trace.explained
    assert {move.reason for move in trace.moves} == {UNTOLD}


def test_moves_add_up_to_the_caps_of_the_episode(tmp_path: Path) -> None:
    trace = traced("differentiated", tmp_path)
    contender = Contender("differentiated", "differentiated")
    shown = trajectories([contender], SCENARIO, 0)["differentiated"]
    assert [list(caps) for caps in trace.caps] == shown["caps"].tolist()
    assert [list(queued) for queued in trace.queued] == shown["queued"].tolist()
    for i, name in enumerate(SCENARIO.tenant_names):
        moved = sum(move.change for move in trace.moves if move.tenant == name)
        assert SCENARIO.caps_initial[i] + moved == trace.caps[-1][i]


def test_listening_changes_nothing_and_traces_are_not_played_twice(tmp_path: Path) -> None:
    before = traced("robust", tmp_path)
    lines = (tmp_path / TRACES_FILE).read_bytes()
    assert traced("robust", tmp_path) == before
    assert (tmp_path / TRACES_FILE).read_bytes() == lines
    contender = Contender("robust", "robust")
    shown = trajectories([contender], SCENARIO, 0)["robust"]
    assert [list(caps) for caps in before.caps] == shown["caps"].tolist()
