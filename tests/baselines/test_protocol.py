"""The measured protocol and live evaluation, on a simulation that plays a live server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from test_env import short

from vllm_tenant_tuning.baselines import comparison, evaluate
from vllm_tenant_tuning.baselines import protocol as module
from vllm_tenant_tuning.baselines.cli import main
from vllm_tenant_tuning.baselines.episode import make_env
from vllm_tenant_tuning.baselines.evaluate import EPISODES_FILE
from vllm_tenant_tuning.baselines.live import RAW_FOLDER, recorded_trajectories, split_results
from vllm_tenant_tuning.baselines.protocol import (
    PROTOCOL_FILE,
    WARM_UP_SEED,
    look_ahead,
    make_protocol,
    run_protocol,
)
from vllm_tenant_tuning.baselines.records import read_records
from vllm_tenant_tuning.scenario import Scenario

SHORT = short("cpu_chat_batch", 40.0)
POLICIES = ("static", "naive", "differentiated")
SERVER = {"url": "http://127.0.0.1:1", "model": "tiny", "version": "0.32.0", "num_gpu_blocks": 1024}


class FakeLive(gym.Wrapper):
    """A simulation that answers as a live server does.

    Args:
        env: of the simulation.
        resets: takes the seed of every episode that begins.
        fault: given an episode's seed, the reason that truncates it after two steps.
        invalid: given an episode's seed, why its load was not delivered.
        server: what is known of the server.
        out_dir: of the raw records.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        resets: list[int],
        fault: Callable[[int], str],
        invalid: Callable[[int], list[str]],
        server: dict[str, Any],
        out_dir: Path,
    ) -> None:
        super().__init__(env)
        self._resets, self._fault, self._invalid = resets, fault, invalid
        self._server, self._out_dir = server, out_dir
        self._seed = self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        assert seed is not None
        self._resets.append(seed)
        self._seed, self._steps = seed, 0
        folder = self._out_dir / f"episode-{len(self._resets):04d}"
        folder.mkdir(parents=True)
        (folder / "episode.json").write_text(
            json.dumps({"server": self._server, "command": ["vllm", "serve"], "options": {}})
        )
        self._folder = folder
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, info | {"live": self._report("")}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        reason = self._fault(self._seed) if self._steps == 2 else ""
        if reason:
            truncated = True
            info["truncation_reason"] = reason
        info["live"] = self._report("it was told to" if reason else "")
        return observation, reward, terminated, truncated, info

    def _report(self, fault: str) -> dict[str, Any]:
        return {
            "folder": str(self._folder),
            "server": self._server,
            "fault": fault,
            "invalid": self._invalid(self._seed),
            "scheduled": 10,
            "delivered": 10,
            "send_lateness_p99_s": 0.001,
            "event_loop_lag_max_s": 0.001 * self._steps,
            "overrun_s": 0.0,
            "prefix_hit_rate": 0.0,
            "server_restarts": 0,
        }


class Lab:
    """Makes the environments, and knows what was played."""

    def __init__(self) -> None:
        self.resets: list[int] = []
        self.rests: list[float] = []
        self.fault: Callable[[int], str] = lambda seed: ""
        self.invalid: Callable[[int], list[str]] = lambda seed: []
        self.server: dict[str, Any] = dict(SERVER)
        self.opened = 0

    def make(self, scenario: Scenario, backend: str, trace_dir: Any, **options: Any) -> Any:
        assert backend == "live"
        self.opened += 1
        out_dir = Path(options["out_dir"])
        return FakeLive(
            make_env(scenario), self.resets, self.fault, self.invalid, self.server, out_dir
        )

    @property
    def played(self) -> list[int]:
        """The seeds of the measured episodes, in order."""
        return [seed for seed in self.resets if seed != WARM_UP_SEED]

    def run(self, protocol: module.Protocol, out_dir: Path, **more: Any) -> Any:
        return run_protocol(protocol, out_dir, make=self.make, rest=self.rests.append, **more)


@pytest.fixture
def lab() -> Lab:
    return Lab()


def protocol_of(**changes: Any) -> module.Protocol:
    settings = {"policies": POLICIES, "scenario": SHORT, "seeds": range(3), "warm_up_s": 5.0}
    return make_protocol(**(settings | changes))


def test_the_outlook_is_what_a_hand_counts(tmp_path: Path) -> None:
    outlook = look_ahead(protocol_of(cool_down_s=3.0), tmp_path)
    assert outlook.episodes == 9
    assert outlook.recorded == 0
    # control intervals of 2 s: 5 s of warm-up are three of them
    assert outlook.minutes == pytest.approx(9 * (6 + 40 + 3) / 60)
    env: Any = make_env(SHORT)
    measured = 0
    hold = np.full(2, SHORT.control.max_delta)
    for seed in range(3):
        env.reset(seed=seed)
        truncated = False
        while not truncated:
            *_, truncated, info = env.step(hold)
        measured += 3 * int(info["telemetry"].tenants["arrived_total"].sum())
    assert outlook.measured_requests == measured
    env.reset(seed=WARM_UP_SEED)
    for _ in range(3):
        *_, info = env.step(hold)
    assert outlook.warm_up_requests == 9 * info["telemetry"].tenants["arrived_total"].sum() > 0
    assert look_ahead(protocol_of(warm_up_s=0), tmp_path).warm_up_requests == 0


def test_the_order_is_a_permutation_by_seed_and_depends_on_its_seed() -> None:
    orders = [
        [(c.label, seed) for c, seed in protocol_of(seeds=range(20), order_seed=k).order()]
        for k in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    labels = [c.label for c in protocol_of().contenders]
    assert len(labels) == len(set(labels)) == 3
    for order in orders:
        assert sorted(order) == sorted((p, s) for p in labels for s in range(20))
        for i in range(0, 60, 3):  # the policies of a seed follow each other
            assert len({seed for _, seed in order[i : i + 3]}) == 1
        assert len({order[i][0] for i in range(0, 60, 3)}) == 3
        assert [seed for _, seed in order[::3]] != list(range(20))


def test_warm_up_episode_and_rest_alternate(lab: Lab, tmp_path: Path) -> None:
    protocol = protocol_of()
    records = lab.run(protocol, tmp_path, hardware_note="a machine")
    order = [seed for _, seed in protocol.order()]
    assert lab.played == order
    # a look at the server, and then before each episode
    assert lab.resets == [WARM_UP_SEED, *(s for seed in order for s in (WARM_UP_SEED, seed))]
    assert lab.rests == [5.0] * 8
    assert lab.opened == 1
    kept = read_records(tmp_path / EPISODES_FILE)
    assert [(r.policy, r.seed) for r in kept] == [(c.label, s) for c, s in protocol.order()]
    assert {r.backend for r in kept} == {"live"}
    assert all((tmp_path / r.live.folder).is_dir() for r in kept if r.live)
    labels = [c.label for c in protocol.contenders]
    assert [(r.policy, r.seed) for r in records] == [(p, s) for p in labels for s in range(3)]
    # what a simulation gives, since that is what played
    simulated = evaluate.evaluate(["naive"], SHORT, range(1, 2), tmp_path / "sim")[0]
    measured = next(r for r in records if r.policy == simulated.policy and r.seed == 1)
    same = ("return_", "drops", "latency_p99_s", "tenants")
    assert all(getattr(measured, name) == getattr(simulated, name) for name in same)

    noted = json.loads((tmp_path / PROTOCOL_FILE).read_text())
    assert noted["settings"]["order_seed"] == 0
    assert noted["scenario"]["name"] == SHORT.name
    (run,) = noted["runs"]
    assert run["hardware_note"] == "a machine"
    assert run["server"] == SERVER
    assert run["server_command"] == ["vllm", "serve"]


def test_it_resumes_with_what_is_missing_in_the_same_order(lab: Lab, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(seconds: float) -> None:
        if len(lab.played) == 4:
            raise StoppedError

    protocol = protocol_of()
    with pytest.raises(StoppedError):
        run_protocol(protocol, tmp_path, make=lab.make, rest=stop)
    outlook = look_ahead(protocol, tmp_path)
    assert outlook.recorded == 4
    assert list(outlook.order) == protocol.order()[4:]
    assert outlook.minutes == pytest.approx(5 * (6 + 40 + 5) / 60)
    lab.resets.clear()
    # listens elsewhere now
    lab.server["url"] = "http://127.0.0.1:2"
    (tmp_path / RAW_FOLDER).rename(tmp_path / "before")
    assert len(lab.run(protocol, tmp_path)) == 9
    assert lab.played == [seed for _, seed in protocol.order()[4:]]
    assert len(json.loads((tmp_path / PROTOCOL_FILE).read_text())["runs"]) == 2
    lab.resets.clear()
    assert len(lab.run(protocol, tmp_path)) == 9
    assert lab.resets == []  # not even looked at
    assert lab.opened == 2


def test_another_protocol_or_server_in_the_folder_is_refused(lab: Lab, tmp_path: Path) -> None:
    lab.run(protocol_of(policies=("static",), seeds=range(1)), tmp_path / "a")
    for change, message in (
        ({"seeds": range(2)}, r"seeds: got \[0, 1\]; accepted is \[0\]"),
        ({"policies": ("naive",)}, "policies: got"),
        ({"order_seed": 1}, "order_seed: got 1; accepted is 0"),
        ({"warm_up_s": 4.0}, "warm_up_s: got 4"),
        ({"scenario": short("cpu_chat_batch", 20.0)}, "another content of the scenario"),
        ({"options": {"serve": ("--enforce-eager",)}}, "the server's arguments"),
    ):
        other = {"policies": ("static",), "seeds": range(1)} | change
        with pytest.raises(ValueError, match=message):
            lab.run(protocol_of(**other), tmp_path / "a")
    file = tmp_path / "a" / EPISODES_FILE
    file.write_text("")
    lab.server["version"] = "0.33.0"
    (tmp_path / "a" / RAW_FOLDER).rename(tmp_path / "before")
    lab.resets.clear()
    with pytest.raises(ValueError, match=r"version is 0.33.0; .* it was 0.32.0"):
        lab.run(protocol_of(policies=("static",), seeds=range(1)), tmp_path / "a")
    assert lab.played == []
    (tmp_path / "a" / PROTOCOL_FILE).unlink()
    with pytest.raises(ValueError, match=r"holds episodes and no protocol\.json"):
        lab.run(protocol_of(), tmp_path / "a")


def test_an_episode_that_a_fault_cut_short_is_seen_and_repeated(lab: Lab, tmp_path: Path) -> None:
    protocol = protocol_of(policies=("static", "naive"))
    lab.fault = lambda seed: "server_hung" if seed == 1 else ""
    records = lab.run(protocol, tmp_path)
    cut = [record for record in records if record.seed == 1]
    assert [(r.truncation, r.steps) for r in cut] == [("server_hung", 2)] * 2
    assert cut[0].live is not None
    assert cut[0].live.fault == "it was told to"
    results, left_out = split_results(records)
    assert {record.seed for record in results} == {0, 2}
    assert len(left_out) == 2
    assert "seed 1: truncated by server_hung: it was told to; the same command" in left_out[0]

    lab.fault = lambda seed: ""
    lab.resets.clear()
    (tmp_path / RAW_FOLDER).rename(tmp_path / "before")
    records = lab.run(protocol, tmp_path)
    assert lab.played == [1, 1]
    assert {record.truncation for record in records} == {"time_limit"}
    assert len(read_records(tmp_path / EPISODES_FILE)) == 8  # what happened stays written
    assert split_results(records)[1] == []


def test_a_table_leaves_out_whose_load_was_not_delivered_and_says_so(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = protocol_of(policies=("static", "naive"), seeds=range(4))
    lab.invalid = lambda seed: ["sends were late by 30 ms"] if seed == 2 else []
    records = lab.run(protocol, tmp_path)
    assert {r.seed for r in records if r.live and r.live.invalid} == {2}
    label = protocol.contenders[0].label
    summary = comparison.conclude(records, SHORT, label, tmp_path, {})
    assert {estimate.n for estimate in summary.estimates if estimate.mean is not None} == {3}
    sentence = "seed 2: the load was not delivered: sends were late by 30 ms."
    assert capsys.readouterr().out.replace("\n", " ").count(sentence) == 2
    assert (tmp_path / "table.md").read_text().count(sentence) == 2
    assert (tmp_path / "report.html").read_text().count(sentence) == 2
    caveats = json.loads((tmp_path / "summary.json").read_text())["caveats"]
    assert sum(sentence in caveat for caveat in caveats) == 2
    with pytest.raises(ValueError, match="none of 2 episodes counts"):
        comparison.conclude(records[2:3] * 2, SHORT, label, tmp_path, {})
    with pytest.raises(ValueError, match=f"no episode of '{label}' counts"):
        comparison.conclude(records[2:3] + records[4:], SHORT, label, tmp_path, {})

    # played again only when that is asked for
    lab.invalid = lambda seed: []
    lab.resets.clear()
    (tmp_path / RAW_FOLDER).rename(tmp_path / "before")
    lab.run(protocol, tmp_path)
    assert lab.resets == []
    records = lab.run(protocol, tmp_path, repeat_invalid=True)
    assert lab.played == [2, 2]
    assert split_results(records)[1] == []


def test_live_evaluation_plays_one_after_the_other_and_repeats_faults(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "make_env", lab.make)
    lab.fault = lambda seed: "engine_stalled" if seed == 1 else ""
    options = {"url": "http://127.0.0.1:1", "out_dir": tmp_path / RAW_FOLDER}
    arguments: dict[str, Any] = {"backend": "live", "backend_options": options}
    records = evaluate.evaluate(["static", "naive"], SHORT, range(2), tmp_path, **arguments)
    assert lab.resets == [0, 1, 0, 1]
    assert lab.opened == 2  # the first only to check the options
    assert [r.truncation for r in records] == ["time_limit", "engine_stalled"] * 2
    lab.fault = lambda seed: ""
    lab.resets.clear()
    options |= {"url": "http://127.0.0.1:2", "out_dir": tmp_path / "again"}
    records = evaluate.evaluate(["static", "naive"], SHORT, range(2), tmp_path, **arguments)
    assert lab.resets == [1, 1]
    assert {r.truncation for r in records} == {"time_limit"}
    for refused in ({"workers": 2}, {"cluster": object()}):
        with pytest.raises(ValueError, match="one episode at a time"):
            evaluate.evaluate(["static"], SHORT, range(2), tmp_path, **arguments, **refused)
    monkeypatch.undo()  # a simulation's records are others
    simulated = evaluate.evaluate(["static"], SHORT, range(2), tmp_path)
    assert [record.backend for record in simulated] == ["sim", "sim"]


def test_trajectories_come_from_raw_records(lab: Lab, tmp_path: Path) -> None:
    records = lab.run(protocol_of(policies=("static", "naive"), seeds=range(2)), tmp_path)
    steps = [
        {
            "cluster": {"time_s": 2.0 * k},
            "tenants": {
                "cap": [8, 4],
                "queued": [k, 0],
                "latency_p99_s": [None, 1.5],
                "completed": [1, 2],
                "dropped": [0, 0],
            },
        }
        for k in range(3)
    ]
    for record in records:
        assert record.live is not None
        text = "".join(json.dumps(step) + "\n" for step in steps)
        (tmp_path / record.live.folder / "steps.jsonl").write_text(text)
    shown = recorded_trajectories(records, tmp_path)
    assert set(shown) == {record.policy for record in records}
    for trajectory in shown.values():
        assert trajectory["time_s"].tolist() == [2.0, 4.0]
        assert trajectory["queued"].tolist() == [[1, 0], [2, 0]]
        assert np.isnan(trajectory["latency_p99_s"][:, 0]).all()
    assert recorded_trajectories(records[:1] + records[3:], tmp_path) == {}


LIVE = ["--url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["protocol"], "got neither --url nor --serve"),
        (["protocol", *LIVE, "--serve", "m"], "and not both"),
        (["protocol", "--url", "nowhere"], "url: accepted is http://HOST:PORT"),
        (["protocol", *LIVE, "--vllm", "v"], "--vllm: accepted with --serve"),
        (["protocol", *LIVE, "--serve-arguments", "a b"], "--serve-arguments: accepted with"),
        (["protocol", *LIVE, "--live", "workers"], "accepted is KEY=VALUE"),
        (["protocol", *LIVE, "--live", "worker=2"], "worker: unknown key"),
        (["protocol", *LIVE, "--live", "workers=none"], "workers: got 'none'"),
        (["protocol", *LIVE, "--live", "workers=["], "accepted is KEY=VALUE in YAML"),
        (["protocol", "--serve", "m", "--serve-arguments", "a 'b"], "No closing quotation"),
        (
            ["protocol", "--serve", "m", "--serve-arguments", "--api-key k3y"],
            "--api-key is refused",
        ),
        (["protocol", *LIVE, "--live", "out_dir=x"], "out_dir is set by another option"),
        (["protocol", *LIVE, "--policies", "nave"], "policy: got 'nave'"),
        (["protocol", *LIVE, "--policies", "static,static"], "names must differ"),
        (["protocol", *LIVE, "--seeds", "5"], "seeds: got '5'"),
        (["protocol", *LIVE, "--warm-up-s", "121"], "warm_up_s: got 121; accepted is 0 to"),
        (["protocol", *LIVE, "--cool-down-s", "-1"], "cool_down_s: got -1"),
        (["protocol", *LIVE, "--order-seed", "-1"], "order_seed: got -1"),
        (["protocol", *LIVE, "--reference", "naive:2", "--policies", "static"], "reference: got"),
        (["evaluate", *LIVE], "accepted with --backend live"),
        (["evaluate", "--backend", "live"], "got neither --url nor --serve"),
        (["evaluate", "--backend", "live", *LIVE, "--workers", "2"], "one episode at a time"),
    ],
)
def test_a_wrong_option_is_one_message_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "out"
    assert main([*arguments, "--out", str(out_dir)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: ")
    assert message in line
    assert "k3y" not in line
    assert not out_dir.exists()


def test_a_dry_run_says_it_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "out"
    arguments = ["--policies", "static,naive,differentiated", "--out", str(out_dir), "--dry-run"]
    assert main(["protocol", *LIVE, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "3 policies x 10 seeds = 30 episodes; 0 are recorded, 30 are left" in printed
    assert "minutes: 67.5 (10 s warm-up, 120 s episode, 5 s cool-down)" in printed
    shown = [line.split()[-1] for line in printed.splitlines() if line.startswith("  ")]
    assert len(shown) == 30
    assert {shown.count(label) for label in set(shown)} == {10}
    assert not out_dir.exists()


def test_no_server_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp")
    arguments = ["--out", str(tmp_path), "--live", "reset_timeout_s=0.5", "--seeds", "0:1"]
    assert main(["protocol", *LIVE, *arguments]) == 2
    assert "error: http://127.0.0.1:1 is not ready" in capsys.readouterr().err
    assert read_records(tmp_path / EPISODES_FILE) == []
