"""Families of scenarios: what is drawn, that the seed alone draws it, and what stays the base's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium.vector import AutoresetMode
from other_process import printed_elsewhere
from scipy import stats
from test_env import short

from vllm_tenant_tuning import (
    ScenarioError,
    ScenarioFamily,
    VLLMTenantTuningEnv,
    VLLMTenantTuningVectorEnv,
    family_names,
    load_scenario,
    scenario_names,
)
from vllm_tenant_tuning.backends.sim.engine import EngineBackend
from vllm_tenant_tuning.backends.sim.slots import SlotsBackend
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.records import read_records
from vllm_tenant_tuning.family import TenantVariation
from vllm_tenant_tuning.scenario import parse_scenario
from vllm_tenant_tuning.workload import Workload

STREAM = ("offsets", "arrival_s", "prompt_tokens", "output_tokens", "service_s")
POINTS = {
    "rate_factor": 1,
    "burst_factor": [1, 1],
    "period_factor": 1.0,
    "on_share": 0.5,
    "patience_factor": 1,
}


def family(base: str = "reserved", episode_s: float = 60.0, **content: Any) -> ScenarioFamily:
    parsed = parse_scenario(
        {"name": "loads", "question": "Which?", "base": base, "variation": {}} | content
    )
    control = parsed.control.model_copy(update={"episode_s": episode_s})
    changed = parsed.model_copy(update={"control": control})
    assert isinstance(changed, ScenarioFamily)
    return changed


def wide(episode_s: float = 60.0) -> ScenarioFamily:
    packaged = short("reserved_loads", episode_s)
    assert isinstance(packaged, ScenarioFamily)
    return packaged


def same_stream(a: Any, b: Any) -> None:
    for name in STREAM:
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()


# --- the description ----------------------------------------------------------------------


@pytest.mark.parametrize("name", family_names())
def test_packaged_families_keep_the_spaces_of_their_base(name: str) -> None:
    assert name not in scenario_names()
    packaged = load_scenario(name)
    assert isinstance(packaged, ScenarioFamily)
    base = load_scenario(packaged.base)
    members = [packaged.member(member) for member in packaged.members]
    assert members
    envs = [VLLMTenantTuningEnv(task) for task in (base, packaged, *members)]
    for env in envs:
        assert env.observation_space == envs[0].observation_space
        assert env.action_space == envs[0].action_space
        assert env.observation_names == envs[0].observation_names
    for task in (packaged, *members):
        text = yaml.safe_dump(task.model_dump(mode="json"))
        assert parse_scenario(yaml.safe_load(text)) == task
        for field in set(type(base).model_fields) - {"name", "question", "description"}:
            assert getattr(task, field) == getattr(base, field)


@pytest.mark.parametrize(
    ("base", "content", "message"),
    [
        ("reserved", {"variation": {"c": {}}}, r"variation\.c: no such tenant; accepted are a, b"),
        ("reserved", {"variation": {"a": {"rate": 1}}}, r"variation\.a\.rate: unknown key"),
        (
            "reserved",
            {"variation": {"a": {"rate_factor": [2, 1]}}},
            r"variation\.a\.rate_factor: got the range \[2\.0, 1\.0\]; its first number must be",
        ),
        ("reserved", {"variation": {"a": {"rate_factor": 0}}}, "got 0; Input should be greater"),
        ("reserved", {"variation": {"a": {"rate_factor": "x"}}}, r"rate_factor\.0: got 'x'"),
        ("reserved", {"variation": {"a": {"rate_factor": True}}}, "rate_factor: got true"),
        ("reserved", {"variation": {"a": {"rate_factor": [1, True]}}}, "rate_factor: got true"),
        ("reserved", {"variation": {"a": {"rate_factor": [1, 2, 3]}}}, "rate_factor: Tuple should"),
        ("reserved", {"variation": {"a": {"on_share": [0.5, 1.5]}}}, r"on_share\.1: got 1\.5"),
        (
            "study",
            {"variation": {"a": {"burst_factor": [1, 2]}}},
            r"variation\.a\.burst_factor: the tenant's process is 'poisson'; accepted is a process",
        ),
        (
            "azure_like",
            {"variation": {"code": {"phase_share": 0.5}}},
            r"phase_share: the tenant's process is 'random_bursts'; accepted is the process 'per",
        ),
        (
            "azure",
            {"variation": {"chat": {"rate_factor": [1, 2]}}},
            r"variation\.chat\.rate_factor: the tenant's process is 'trace'; accepted is a process",
        ),
        (
            "reserved",
            {"variation": {"a": {"rate_factor": [1, 1000], "burst_factor": [1, 1000]}}},
            r"variation: with .*on_rate_per_s: got 1600000\.0; Input should be less",
        ),
        (
            "azure_like",
            {"variation": {"code": {"on_share": [0.5, 1]}}},
            r"variation: with .*mean_off_s: got 0\.0; Input should be greater than 0",
        ),
        (
            "reserved",
            {"members": {"m": {"a": {"rate_factor": [1, 2]}}}},
            r"members\.m\.a: accepted are values, not ranges",
        ),
        ("reserved", {"members": {"No!": {}}}, "members"),
        ("reserved", {"tenant": []}, "tenant: unknown key"),
        ("nowhere", {}, "base: scenario: 'nowhere' is neither a packaged scenario"),
        ("reserved_loads", {}, "base: got the family 'reserved_loads'; accepted is a scenario"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    base: str, content: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScenarioError, match=message) as caught:
        family(base, **content)
    assert "\n" not in str(caught.value)


def test_a_family_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nquestion: Which?\nbase: {file}\nvariation: {{}}\n")
    with pytest.raises(ScenarioError, match="base: got the family 'mine'; accepted is a scenario"):
        load_scenario(file)


def test_a_factor_may_be_written_as_a_power_of_ten() -> None:
    # YAML reads 1e-1 as a text
    content = {"variation": {"a": {"rate_factor": "1e-1"}}}
    assert family("reserved", **content).variation["a"].rate_factor == (0.1, 0.1)


def test_patience_varies_only_where_there_is_one() -> None:
    content: dict[str, Any] = load_scenario("reserved").model_dump() | {"base": "reserved"}
    content["tenants"][1]["patience_s"] = None
    variation = {"a": {"patience_factor": 2}, "b": {"rate_factor": 2}}
    stream = Workload(parse_scenario(content | {"variation": variation})).sample(
        np.random.default_rng(0)
    )
    assert stream.patience_s == (6.0, None)
    variation["b"] = {"patience_factor": 2}
    with pytest.raises(ScenarioError, match=r"b\.patience_factor: the tenant has no patience_s"):
        parse_scenario(content | {"variation": variation})


def test_members_are_refused_that_are_not_there() -> None:
    with pytest.raises(ScenarioError, match=r"got 'huge'; accepted are base, light, .*rapid"):
        wide().member("huge")


# --- what is drawn ------------------------------------------------------------------------


def test_draws_fill_their_ranges_and_do_not_leave_them() -> None:
    ranges: dict[str, tuple[float, float]] = {
        "rate_factor": (0.25, 4.0),
        "period_factor": (0.5, 1.5),
        "on_share": (0.1, 0.9),
        "phase_share": (0.0, 1.0),
    }
    variation = TenantVariation.model_validate(ranges | {"patience_factor": 2})
    rng = np.random.default_rng(0)
    draws = [variation.draw(rng) for _ in range(4000)]
    for name, (low, high) in ranges.items():
        values = np.array([draw[name] for draw in draws])
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
        if name.endswith("_factor"):
            expected = stats.loguniform(low, high)
        else:
            expected = stats.uniform(low, high - low)
        assert stats.kstest(values, expected.cdf).pvalue > 1e-3
    assert {draw["patience_factor"] for draw in draws} == {2.0}
    assert set(draws[0]) == {*ranges, "patience_factor"}
    # independent of each other
    pairs = np.array([[draw[name] for name in ranges] for draw in draws])
    correlation = np.corrcoef(pairs.T) - np.eye(len(ranges))
    assert abs(correlation).max() < 4.5 / np.sqrt(len(draws))


def test_one_range_can_be_changed_and_the_other_draws_stay() -> None:
    few = TenantVariation.model_validate({"phase_share": [0, 1]})
    more = TenantVariation.model_validate(
        {"phase_share": [0, 1], "rate_factor": [0.5, 2], "patience_factor": [0.5, 2]}
    )
    for seed in range(5):
        drawn = (each.draw(np.random.default_rng(seed)) for each in (few, more))
        first, second = drawn
        assert first["phase_share"] == second["phase_share"]


def test_ranges_that_are_points_leave_the_base_as_it_is() -> None:
    tasks = [family(variation={"a": POINTS, "b": POINTS}), wide().member("base"), family()]
    base = short("reserved")
    for seed in (0, 7):
        expected = Workload(base).sample(np.random.default_rng(seed))
        for task in tasks:
            stream = Workload(task).sample(np.random.default_rng(seed))
            same_stream(stream, expected)
            assert stream.patience_s == (3.0, 3.0)
    for task in tasks:
        assert trajectory(VLLMTenantTuningEnv(task), 7) == trajectory(VLLMTenantTuningEnv(base), 7)


def test_a_tenant_that_does_not_vary_keeps_its_requests() -> None:
    task = family(variation={"b": {"rate_factor": [0.5, 2], "patience_factor": [2, 3]}})
    for seed in range(3):
        stream = Workload(task).sample(np.random.default_rng(seed))
        expected = Workload(short("reserved")).sample(np.random.default_rng(seed))
        mine, theirs = (each.arrival_s[: each.offsets[1]] for each in (stream, expected))
        np.testing.assert_array_equal(mine, theirs)
        assert set(stream.drawn) == {"b"}
        patience = stream.patience_s
        assert patience is not None
        assert patience[0] == 3.0
        assert patience[1] == 3.0 * stream.drawn["b"]["patience_factor"]


@pytest.mark.parametrize("name", family_names())
def test_an_episode_is_that_of_the_plain_scenario_with_the_drawn_values(name: str) -> None:
    task = short(name, 300.0)
    assert isinstance(task, ScenarioFamily)
    for seed in range(5):
        stream = Workload(task).sample(np.random.default_rng(seed))
        plain = task.varied(stream.drawn)
        assert not isinstance(plain, ScenarioFamily)
        expected = Workload(plain).sample(np.random.default_rng(seed))
        same_stream(stream, expected)
        assert stream.patience_s == expected.patience_s
        for tenant, base in zip(plain.tenants, task.tenants, strict=True):
            drawn = stream.drawn[tenant.name]
            arrivals: Any = tenant.arrivals
            before: Any = base.arrivals
            if tenant.arrivals.process == "periodic_bursts":
                assert arrivals.on_rate_per_s == before.on_rate_per_s * drawn["rate_factor"]
                assert arrivals.off_rate_per_s == before.off_rate_per_s * drawn["rate_factor"]
                assert arrivals.period_s == before.period_s * drawn["period_factor"]
                assert arrivals.on_s == pytest.approx(arrivals.period_s * drawn["on_share"])
                assert arrivals.phase_s == pytest.approx(arrivals.period_s * drawn["phase_share"])
            elif tenant.arrivals.process == "random_bursts":
                cycle_s = arrivals.mean_on_s + arrivals.mean_off_s
                before_s = before.mean_on_s + before.mean_off_s
                assert cycle_s == pytest.approx(before_s * drawn["period_factor"])
                assert arrivals.mean_on_s / cycle_s == pytest.approx(drawn["on_share"])
            else:
                assert arrivals.rate_per_s == before.rate_per_s * drawn["rate_factor"]


def test_the_drawn_rates_are_those_of_the_requests() -> None:
    """Counts of Poisson arrivals, each episode against the rate that it drew."""
    task = family("moving_knee", 1800.0, variation={"a": {"rate_factor": [0.25, 4]}})
    workload, rng = Workload(task), np.random.default_rng(1)
    score = 0.0
    for _ in range(300):
        stream = workload.sample(rng)
        expected = 0.85 * 1800 * stream.drawn["a"]["rate_factor"]
        score += (stream.offsets[1] - expected) ** 2 / expected
    assert stats.chi2(300).sf(score) > 1e-4
    assert stats.chi2(300).cdf(score) > 1e-4


# --- the same seed, the same episode ------------------------------------------------------


def trajectory(env: Any, seed: int, episodes: int = 2) -> str:
    """A digest of observations, rewards and draws under actions of a fixed generator."""
    digest = hashlib.sha256()
    rng = np.random.default_rng(9)
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed if episode == 0 else None)
        digest.update(observation.tobytes())
        truncated = False
        while not truncated:
            observation, reward, _, truncated, _ = env.step(rng.integers(0, 3, 2))
            digest.update(observation.tobytes() + np.float64(reward).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["reserved_loads", "azure_like_loads"])
def test_vector_environments_give_what_scalar_ones_give(name: str) -> None:
    task = short(name)
    n = 4
    vector = VLLMTenantTuningVectorEnv(n, task, autoreset_mode=AutoresetMode.SAME_STEP)
    scalars: list[Any] = [gym.make("VLLMTenantTuning-v0", scenario=task) for _ in range(n)]
    observations, _ = vector.reset(seed=50)
    drawn = []
    for i, env in enumerate(scalars):
        assert env.reset(seed=50 + i)[0].tobytes() == observations[i].tobytes()
    rng = np.random.default_rng(2)
    for step in range(45):  # two episodes of twenty steps, and more
        if step % 20 == 0:
            assert vector.drawn == [env.unwrapped.drawn for env in scalars]
            drawn += vector.drawn
        actions = rng.integers(0, 3, (n, 2))
        observations, rewards, _, truncated, infos = vector.step(actions)
        for i, env in enumerate(scalars):
            observation, reward, _, ended, _ = env.step(actions[i])
            assert rewards[i] == reward
            assert truncated[i] == ended
            if ended:
                assert infos["final_obs"][i].tobytes() == observation.tobytes()
                observation, _ = env.reset()
            assert observations[i].tobytes() == observation.tobytes()
    assert len({str(each) for each in drawn}) == 3 * n  # every episode draws its own


def test_another_process_gives_the_same_episodes() -> None:
    printed = printed_elsewhere(
        "from test_family import VLLMTenantTuningEnv, trajectory, wide\n"
        "print(trajectory(VLLMTenantTuningEnv(wide()), 4))"
    )
    assert printed == trajectory(VLLMTenantTuningEnv(wide()), 4)
    assert printed != trajectory(VLLMTenantTuningEnv(wide()), 5)


# --- what the simulators do with it -------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "tenants"), [("reserved", ("a", "b")), ("h200_chat_batch", ("chat", "batch"))]
)
def test_patience_is_that_of_the_episode_in_both_fidelities(
    base: str, tenants: tuple[str, str]
) -> None:
    """Two clusters side by side, against plain scenarios whose patience is written in them."""
    scenario = load_scenario(base)
    given = tuple(
        tenant.model_copy(update={"patience_s": 30.0 if tenant.patience_s is None else 3.0})
        for tenant in scenario.tenants
    )
    control = scenario.control.model_copy(update={"episode_s": 300.0})
    scenario = scenario.model_copy(update={"tenants": given, "control": control})
    backend_class: Any = SlotsBackend if base == "reserved" else EngineBackend
    values = [
        {tenants[0]: {"patience_factor": 0.1}},
        {tenants[0]: {"patience_factor": 3.0}, tenants[1]: {"patience_factor": 0.4}},
    ]
    content = scenario.model_dump() | {"base": base}
    families = [parse_scenario(content | {"variation": each}) for each in values]
    backend = backend_class(scenario, 2)
    caps = np.array([[1, 1], [1, 1]])
    for cluster, task in enumerate(families):
        stream = Workload(task).sample(np.random.default_rng(0))
        backend.reset(cluster, stream, caps[cluster])
    for _ in range(scenario.control.n_steps):
        backend.advance(caps, np.ones(2, np.bool_))
    dropped = []
    for cluster, task in enumerate(families):
        assert isinstance(task, ScenarioFamily)
        plain = task.varied(values[cluster])
        alone = backend_class(plain, 1)
        alone.reset(0, Workload(plain).sample(np.random.default_rng(0)), caps[0])
        for _ in range(scenario.control.n_steps):
            alone.advance(caps[:1], np.ones(1, np.bool_))
        expected, seen = alone.outcomes(0), backend.outcomes(cluster)
        np.testing.assert_array_equal(seen.outcome, expected.outcome)
        np.testing.assert_array_equal(seen.finished_s, expected.finished_s)
        dropped.append(alone.telemetry_tenants["dropped_total"][0].tolist())
    assert dropped[0] != dropped[1]


def test_references_are_those_of_the_base() -> None:
    task = family(episode_s=300.0, variation={"a": {"rate_factor": 2}, "b": {"rate_factor": 2}})
    plain = task.varied({"a": {"rate_factor": 2.0}, "b": {"rate_factor": 2.0}})
    ours, theirs = VLLMTenantTuningEnv(task), VLLMTenantTuningEnv(plain)
    ours.reset(seed=0)
    theirs.reset(seed=0)
    rate = ours.observation_names.index("a.arrival_rate")
    compared = 0
    for _ in range(100):
        mine, his = (env.step(np.array([1, 1])) for env in (ours, theirs))
        assert mine[4]["telemetry"] == his[4]["telemetry"]
        # what was offered is twice the reference of the family, and the plain scenario's own
        mine_terms, his_terms = mine[4]["reward_terms"], his[4]["reward_terms"]
        assert mine_terms["throughput"] == pytest.approx(2 * his_terms["throughput"])
        assert mine_terms["drop"] == pytest.approx(2 * his_terms["drop"])
        if 0 < mine[0][rate] < ours.observation_space.high[rate]:
            assert mine[0][rate] == pytest.approx(2 * his[0][rate])
            compared += 1
    assert compared > 10


# --- evaluation ---------------------------------------------------------------------------


def test_each_member_is_evaluated_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.yaml").write_text(yaml.safe_dump(short("reserved").model_dump(mode="json")))
    content = {
        "name": "loads",
        "question": "Which?",
        "base": "short.yaml",
        "variation": {"a": {"rate_factor": [0.5, 2]}},
        "members": {"base": {}, "heavy": {"a": {"rate_factor": 4}}},
    }
    Path("loads.yaml").write_text(yaml.safe_dump(content))
    arguments = ["evaluate", "--seeds", "0:3", "--policies", "static,naive", "--workers", "1"]
    assert main([*arguments, "--scenario", "loads.yaml", "--members", "--out", "out"]) == 0
    printed = capsys.readouterr().out
    assert "Return at each member" in printed
    arrived = {}
    for member in ("base", "heavy"):
        records = read_records(Path("out") / member / "episodes.jsonl")
        assert {record.scenario for record in records} == {f"loads-{member}"}
        assert [(r.policy, r.seed) for r in records] == [
            (policy, seed) for policy in ("static", "naive") for seed in range(3)
        ]
        arrived[member] = [record.tenants["a"].arrived for record in records]
        assert (Path("out") / member / "report.html").is_file()
    assert sum(arrived["heavy"]) > 2 * sum(arrived["base"])

    assert main([*arguments, "--scenario", "reserved", "--members", "--out", "no"]) == 2
    assert "--members: got 'reserved', which has none" in capsys.readouterr().err
    assert not Path("no").exists()
