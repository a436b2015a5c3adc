"""The study's rules, each decision against the rule as the study states it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vllm_tenant_tuning import Telemetry, load_scenario
from vllm_tenant_tuning.agents import (
    POLICY_FORMS,
    BacklogPolicy,
    Policy,
    StaticPolicy,
    WindowP99Policy,
    as_action,
    make_policy,
)
from vllm_tenant_tuning.telemetry import CLUSTER_DTYPE, TENANT_DTYPE

STUDY = load_scenario("study")  # 8 slots, caps 1 to 8, max_delta 1


def info(
    *,
    p99_s: float = 5.0,
    tenants_p99_s: tuple[float, float] = (5.0, 5.0),
    completions: tuple[int, int] = (3, 3),
    in_flight: tuple[int, int] = (1, 1),
    queued: tuple[int, int] = (0, 0),
    caps: tuple[int, int] = (4, 4),
) -> dict[str, Any]:
    tenants = np.zeros((2, len(TENANT_DTYPE)))
    cluster = np.zeros(len(CLUSTER_DTYPE))
    telemetry = Telemetry(tenants, cluster)
    telemetry.tenants["latency_p99_s"] = tenants_p99_s
    telemetry.tenants["window_completions"] = completions
    telemetry.tenants["in_flight"] = in_flight
    telemetry.tenants["queued"] = queued
    telemetry.cluster["latency_p99_s"] = p99_s
    telemetry.cluster["window_completions"] = sum(completions)
    return {"telemetry": telemetry, "caps": np.array(caps)}


def deltas(policy: Policy, seen: dict[str, Any]) -> list[int]:
    policy.reset(STUDY, 0)
    action: npt.NDArray[np.int64] = policy.act(np.zeros(29, np.float32), seen)
    assert action.dtype == np.int64
    return (action - 1).tolist()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (info(p99_s=6.5), [-1, -1]),
        (info(p99_s=6.0), [0, 0]),  # above 6 s, not at it
        (info(p99_s=1.0, in_flight=(4, 4)), [-1, -1]),  # occupancy 1
        (info(p99_s=1.0, in_flight=(4, 3), queued=(1, 0)), [0, 0]),  # 0.875: neither
        (info(p99_s=1.0, in_flight=(3, 3), queued=(0, 1)), [1, 1]),
        (info(p99_s=1.0, in_flight=(3, 3)), [0, 0]),  # nothing queued
        (info(p99_s=3.0, queued=(1, 1)), [0, 0]),  # below 3 s, not at it
        (info(p99_s=50.0, completions=(0, 0), queued=(2, 0)), [1, 1]),  # an empty window is 0 s
    ],
)
def test_naive(seen: dict[str, Any], expected: list[int]) -> None:
    assert deltas(WindowP99Policy(), seen) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (info(tenants_p99_s=(7, 2), queued=(1, 1)), [-1, 1]),
        (info(tenants_p99_s=(2, 2), queued=(1, 0)), [1, 0]),
        (info(tenants_p99_s=(9, 9), completions=(3, 0), queued=(0, 1)), [-1, 1]),
        (info(tenants_p99_s=(1, 1), in_flight=(8, 0), queued=(1, 1)), [-1, -1]),
    ],
)
def test_per_tenant_window_p99(seen: dict[str, Any], expected: list[int]) -> None:
    assert deltas(WindowP99Policy("per_tenant"), seen) == expected


@pytest.mark.parametrize(
    ("queued", "caps"), list(itertools.product([(0, 7), (2, 3), (6, 6), (13, 1)], [(4, 4), (1, 8)]))
)
def test_backlog_rules(queued: tuple[int, int], caps: tuple[int, int]) -> None:
    def rule(backlog: float) -> int:
        return 1 if backlog > 1.5 else -1 if backlog <= 0.5 else 0

    seen = info(queued=queued, caps=caps)
    assert deltas(BacklogPolicy(), seen) == [rule(queued[i] / caps[i]) for i in range(2)]
    together = rule(sum(queued) / sum(caps))
    assert deltas(BacklogPolicy("coupled"), seen) == [together, together]


def test_static_holds_whatever_it_sees() -> None:
    policy = StaticPolicy([2, 7])
    assert policy.initial_caps(STUDY) == (2, 7)
    assert policy.name == "static:2/7"
    assert deltas(policy, info(p99_s=99, in_flight=(8, 8), queued=(99, 99))) == [0, 0]
    with pytest.raises(ValueError, match="tenant 'b' has 9"):
        StaticPolicy([2, 9]).initial_caps(STUDY)


def test_a_change_is_cut_to_max_delta() -> None:
    assert as_action([-5, 9], STUDY).tolist() == [0, 2]


def test_policies_by_name() -> None:
    names = ["static", "naive", "differentiated", "per_tenant_window_p99", "coupled_backlog"]
    assert [make_policy(name).name for name in names] == names
    assert set(names) <= set(POLICY_FORMS)
    assert make_policy("static:3/5").initial_caps(STUDY) == (3, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nave", "policy: got 'nave'; accepted are static, .*naive"),
        ("static:a/b", "caps must be whole numbers"),
        ("static:", "accepted are"),
        ("", "accepted are"),
    ],
)
def test_an_unknown_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(text)
