"""Actions: an obvious reference of what a change does to the caps, and of the masks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scenario import plain

from vllm_tenant_tuning.scenario import Scenario, parse_scenario
from vllm_tenant_tuning.spaces import ActionDecoder


def scenario_with(n_tenants: int, **control: Any) -> Scenario:
    content = plain()
    content["control"] |= control
    tenant = content["tenants"][0] | {"cap_initial": content["control"]["cap_min"]}
    content["tenants"] = [tenant | {"name": f"t{i}"} for i in range(n_tenants)]
    return parse_scenario(content)


def apply(decoder: ActionDecoder, caps: list[int], deltas: list[int], max_delta: int) -> Any:
    after = np.array([caps])
    clipped = np.zeros_like(after)
    decoder.apply(np.array([deltas]) + max_delta, after, clipped, np.ones(1, np.bool_))
    return after[0].tolist(), clipped[0].tolist()


def reference(
    caps: list[int], deltas: list[int], cap_min: int, cap_max: int, total_cap: int
) -> list[int]:
    """Decreases first; then one unit at a time to the asking tenant with the smallest cap."""
    after = [max(cap + min(delta, 0), cap_min) for cap, delta in zip(caps, deltas, strict=True)]
    wanted = [max(delta, 0) for delta in deltas]
    while sum(after) < total_cap:
        asking = [i for i, want in enumerate(wanted) if want > 0 and after[i] < cap_max]
        if not asking:
            break
        chosen = min(asking, key=lambda i: (after[i], i))
        after[chosen] += 1
        wanted[chosen] -= 1
    return after


@given(st.data())
def test_caps_follow_the_reference(data: st.DataObject) -> None:
    n_tenants = data.draw(st.integers(1, 5))
    cap_min = data.draw(st.integers(0, 3))
    cap_max = data.draw(st.integers(max(cap_min, 1), 9))
    max_delta = data.draw(st.integers(1, 4))
    least = max(n_tenants * cap_min, 1)
    total_cap = data.draw(st.one_of(st.none(), st.integers(least, least + 20)))
    scenario = scenario_with(
        n_tenants, cap_min=cap_min, cap_max=cap_max, max_delta=max_delta, total_cap=total_cap
    )
    bound = scenario.total_cap
    caps: list[int] = []
    for i in range(n_tenants):
        room = bound - sum(caps) - (n_tenants - 1 - i) * cap_min
        caps.append(data.draw(st.integers(cap_min, min(cap_max, room))))
    deltas = data.draw(
        st.lists(st.integers(-max_delta, max_delta), min_size=n_tenants, max_size=n_tenants)
    )
    after, clipped = apply(ActionDecoder(scenario), caps, deltas, max_delta)
    assert after == reference(caps, deltas, cap_min, cap_max, bound)
    assert [a - c for a, c in zip(after, caps, strict=True)] == [
        d - x for d, x in zip(deltas, clipped, strict=True)
    ]
    assert all(cap_min <= cap <= cap_max for cap in after)
    assert sum(after) <= bound


@pytest.mark.parametrize(
    ("caps", "total_cap"), [((4, 4), 8), ((1, 7), 8), ((8, 1), None), ((2, 3), 8), ((1, 1), 2)]
)
def test_a_choice_is_masked_when_every_joint_action_cuts_it(
    caps: tuple[int, int], total_cap: int | None
) -> None:
    scenario = scenario_with(2, cap_min=1, cap_max=8, max_delta=2, total_cap=total_cap)
    decoder = ActionDecoder(scenario)
    possible = np.zeros((2, 5), np.bool_)
    for deltas in itertools.product(range(-2, 3), repeat=2):
        _, clipped = apply(decoder, list(caps), list(deltas), 2)
        for tenant in range(2):
            possible[tenant, deltas[tenant] + 2] |= clipped[tenant] == 0
    mask = decoder.mask(np.array([caps])).reshape(2, 5)
    np.testing.assert_array_equal(mask, possible)
    assert mask[:, 2].all()


def test_inactive_clusters_keep_their_caps() -> None:
    decoder = ActionDecoder(scenario_with(2))
    caps = np.array([[3, 3], [3, 3]])
    clipped = np.full_like(caps, 5)
    decoder.apply(np.array([[2, 2], [9, 9]]), caps, clipped, np.array([True, False]))
    assert caps.tolist() == [[4, 4], [3, 3]]
    assert clipped.tolist() == [[0, 0], [0, 0]]
