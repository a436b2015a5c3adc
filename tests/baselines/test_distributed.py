"""On a Ray cluster the same records and models come out, also when a node dies meanwhile."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from missing_extra import run_without

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

import ray
from ray.cluster_utils import Cluster
from test_env import short

from vllm_tenant_tuning import Scenario, load_scenario
from vllm_tenant_tuning.baselines import cli, distributed, training
from vllm_tenant_tuning.baselines import evaluate as module
from vllm_tenant_tuning.baselines.distributed import Files, RayCluster, trace_files
from vllm_tenant_tuning.baselines.evaluate import EPISODES_FILE, Contender, evaluate
from vllm_tenant_tuning.baselines.records import EpisodeRecord, read_records
from vllm_tenant_tuning.baselines.training import load_run
from vllm_tenant_tuning.baselines.training_config import load_training_config
from vllm_tenant_tuning.baselines.training_sweep import _train_sent, sweep

pytestmark = pytest.mark.slow

SCENARIO = short("premium_burst", 600.0)
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROLLOUT = 4 * 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that plays nothing, and two nodes of one core."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    started = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            started.add_node(**NODE | {"num_cpus": 0, "include_dashboard": False})
            for _ in range(2):
                started.add_node(**NODE)
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


@pytest.fixture(scope="module")
def reached(cluster: Cluster) -> RayCluster:
    return RayCluster(cluster.address)


def comparable(records: list[EpisodeRecord]) -> list[dict[str, Any]]:
    return [record.model_dump(exclude={"wall_s"}) for record in records]


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_small(folder: Path, seed: int) -> training.TrainingRun:
    config = small()
    return training.train(short("reserved", 60.0), seed=seed, training=config, run_dir=folder)


def small() -> Any:
    sizes = {"n_envs": 4, "n_steps": 20, "batch_size": 40, "n_epochs": 2, "net_arch": [8]}
    sizes |= {"total_timesteps": 3 * ROLLOUT, "checkpoint_timesteps": ROLLOUT}
    return load_training_config("ppo", "reserved", **sizes)


def test_records_are_those_of_this_machine(reached: RayCluster, tmp_path: Path) -> None:
    policies = ["static", "differentiated"]
    here = evaluate(policies, SCENARIO, range(7), tmp_path / "here", workers=1)
    there = evaluate(policies, SCENARIO, range(3), tmp_path / "there", cluster=reached)
    assert comparable(there) == comparable(here[:3] + here[7:10])
    assert not ray.is_initialized()
    done: list[int] = []
    there = evaluate(
        policies,
        SCENARIO,
        range(7),
        tmp_path / "there",
        cluster=reached,
        on_progress=lambda now, total: done.append(now),
    )
    assert comparable(there) == comparable(here)
    assert sorted(done) == [10, 14]  # the six records that were there are not played again
    assert len(read_records(tmp_path / "there" / EPISODES_FILE)) == 14


def test_nothing_is_lost_with_a_node(cluster: Cluster, reached: RayCluster, tmp_path: Path) -> None:
    policies = ["static", "naive", "differentiated"]
    here = evaluate(policies, SCENARIO, range(20), tmp_path / "here", workers=1)
    victim = cluster.add_node(**NODE)
    left: list[int] = []

    def on_progress(done: int, total: int) -> None:
        if not left:
            cluster.remove_node(victim, allow_graceful=False)
        left.append(total - done)

    there = evaluate(
        policies,
        SCENARIO,
        range(20),
        tmp_path / "there",
        cluster=reached,
        on_progress=on_progress,
    )
    assert left[0] == 55
    assert comparable(there) == comparable(here)
    assert len(read_records(tmp_path / "there" / EPISODES_FILE)) == 60


def hang_on_the_victim(folder: Path, victim: str, number: int) -> int:
    """A task that ends nowhere before one has begun on the victim, and never there."""
    node = ray.get_runtime_context().get_node_id()
    (folder / f"{number}-{node}").touch()
    await_(lambda: node != victim and any(folder.glob(f"*-{victim}")))
    return number


def test_a_task_in_the_hands_of_a_dying_node_is_played_again(
    cluster: Cluster, reached: RayCluster, tmp_path: Path
) -> None:
    victim = cluster.add_node(**NODE)

    def kill() -> None:
        await_(lambda: any(tmp_path.glob(f"*-{victim.node_id}")))
        cluster.remove_node(victim, allow_graceful=False)

    tasks = [(tmp_path, victim.node_id, number) for number in range(5)]
    killer = threading.Thread(target=kill)
    killer.start()
    results = list(reached.run(hang_on_the_victim, tasks))
    killer.join()
    assert sorted(results) == list(range(5))
    (lost,) = tmp_path.glob(f"*-{victim.node_id}")
    number = lost.name.partition("-")[0]
    assert len(list(tmp_path.glob(f"{number}-*"))) == 2
    assert len(list(tmp_path.iterdir())) == 6


def refuse(number: int) -> int:
    if number == 3:
        raise ValueError(f"number: got {number}; accepted are others")
    return number


def test_what_a_task_raises_reaches_the_driver(reached: RayCluster) -> None:
    results = reached.run(refuse, [(i,) for i in range(5)])
    with pytest.raises(ValueError, match=r"^number: got 3; accepted are others$"):
        list(results)
    assert not ray.is_initialized()


def test_a_task_that_kills_its_workers_ends_in_one_message(
    reached: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "MAX_RETRIES", 1)
    with pytest.raises(ConnectionError, match=r"^ray: a task was lost 2 times: \S"):
        list(reached.run(os._exit, [(1,)]))


def test_a_sweep_leaves_the_runs_of_this_machine(reached: RayCluster, tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    scenario = short("reserved", 60.0)
    alone = [run_small(tmp_path / f"alone-{seed}", seed) for seed in range(2)]
    done: list[tuple[int, int]] = []

    def swept() -> list[training.TrainingRun]:
        done.clear()
        return sweep(
            scenario,
            "ppo",
            range(2),
            tmp_path / "sweep",
            training=small(),
            cluster=reached,
            on_progress=lambda *counts: done.append(counts),
        )

    runs = swept()
    assert done == [(1, 2), (2, 2)]
    for run, single in zip(runs, alone, strict=True):
        assert same_weights(run, single)
        assert run.config == single.config
        assert names(run) == names(single)
        assert without_time(run) == without_time(single)
    before = {path: path.stat().st_mtime_ns for path in runs[0].run_dir.rglob("*.zip")}
    shutil.rmtree(runs[1].run_dir)
    again = swept()
    assert done == [(2, 2)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert same_weights(again[1], alone[1])


def names(run: training.TrainingRun) -> set[str]:
    paths = (path for path in run.run_dir.rglob("*") if path.is_file())
    return {
        "event file" if "tfevents" in path.name else str(path.relative_to(run.run_dir))
        for path in paths
    }


def without_time(run: training.TrainingRun) -> list[dict[str, Any]]:
    return [{name: point[name] for name in point if name != "wall_s"} for point in run.curve]


def same_weights(a: training.TrainingRun, b: training.TrainingRun) -> bool:
    from stable_baselines3 import PPO

    one, two = (PPO.load(run.model_path, device="cpu").policy.state_dict() for run in (a, b))
    return one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)


def test_the_command_sweeps_goes_on_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump({"default": small().model_dump(mode="json")}))
    scenario = short("reserved", 60.0, cap_max=5)
    Path("short.yaml").write_text(yaml.safe_dump(scenario.model_dump(mode="json")))
    arguments = ["--scenario", "short.yaml", "--config", "small.yaml", "--seeds", "3:5"]
    arguments += ["--eval-seeds", "0:3"]
    begun = Path("runs/sweep-reserved-ppo/seed-4")
    config = small().model_copy(update={"total_timesteps": 2 * ROLLOUT})
    training.train(scenario, seed=4, training=config, run_dir=begun)
    assert training.main(arguments) == 2
    assert "holds something else than this sweep's run" in capsys.readouterr().err
    assert not begun.with_name("seed-3").exists()

    content = (begun / "config.yaml").read_text()  # as if it was interrupted on its way to 240
    (begun / "config.yaml").write_text(content.replace("timesteps: 160", "timesteps: 240"))
    assert training.main(arguments) == 0
    for seed in (3, 4):
        run = load_run(begun.with_name(f"seed-{seed}"))
        assert (run.config.seed, run.timesteps, run.interrupted) == (seed, 240, False)
    policies = {record.policy for record in read_records(begun.with_name(EPISODES_FILE))}
    assert {"ppo:seed3", "ppo:seed4", "static", "naive"} < policies
    assert begun.with_name("report.html").is_file()


def test_a_worker_needs_neither_the_models_nor_the_traces_of_the_driver(tmp_path: Path) -> None:
    """Tasks are made, the files removed, and the tasks run as a worker runs them."""
    pytest.importorskip("stable_baselines3")
    lines = [f"2023-11-16 18:00:{i:02}.0000000,100,20\n" for i in range(60)]
    traces = tmp_path / "traces"
    Files({"a/one.csv": "".join([HEADER, *lines]).encode()}).write(traces)
    scenario = short("reserved", 60.0)
    arrivals = {"process": "trace", "file": "a/one.csv", "format": "azure"}
    content = scenario.model_dump(mode="json")
    content["tenants"][0]["arrivals"] = arrivals
    scenario = Scenario.model_validate(content)
    run = training.train(scenario, training=small(), trace_dir=traces, run_dir=tmp_path / "run")
    checkpoint = run.run_dir / "checkpoints" / f"{2 * ROLLOUT:012d}"
    texts = {"static": "static", "run": f"model:{run.run_dir}", "file": f"model:{run.model_path}"}
    texts["checkpoint"] = f"model:{checkpoint}"
    contenders = [Contender(label, text) for label, text in texts.items()]
    here = evaluate(contenders, scenario, range(2), tmp_path, trace_dir=traces, workers=1)
    tasks = module._with_files(
        [
            module.Task(scenario, "sim", traces, c, here[2 * i].scenario_digest, [0, 1], tmp_path)
            for i, c in enumerate(contenders)
        ]
    )
    shutil.rmtree(run.run_dir)
    shutil.rmtree(traces)
    there = [record for task in tasks for record in module._run_sent(*task)]
    assert comparable(there) == comparable(here)
    assert there[2].return_ != there[0].return_

    config = training.run_config(scenario, "ppo", 0, small(), traces)
    _, files = _train_sent("0", config, scenario, tasks[0][1], Files({}))
    files.write(tmp_path / "back")
    assert load_run(tmp_path / "back").config == run.config


def test_traces_outside_the_folder_are_refused(tmp_path: Path) -> None:
    content = load_scenario("azure").model_dump(mode="json")
    for name in (str(tmp_path / "one.csv"), "../one.csv"):
        content["tenants"][0]["arrivals"]["file"] = name
        with pytest.raises(ValueError, match="accepted on a Ray cluster is a path inside"):
            trace_files(Scenario.model_validate(content), tmp_path)


@pytest.mark.parametrize("silent", [False, True])
def test_an_address_without_a_cluster_is_one_message(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(distributed, "CONNECT_TIMEOUT_S", 4.0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if silent:  # a server that takes connections and is no Ray
            server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert cli.main(["evaluate", "--ray", address, "--out", str(tmp_path)]) == 2
    error = f"error: ray: no cluster answered at '{address}' within 4 s\n"
    assert capsys.readouterr().err == error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["", "local", "head", "http://head:6379", "head:6379/x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="accepted are auto, HOST:PORT and ray://HOST:PORT"):
        RayCluster(address)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "--ray", "auto", "--workers", "2", "--out", "x"], "--workers: accepted"),
        (["train", "--ray", "auto"], "--ray: accepted for a sweep, beside --seeds"),
        (["train", "--seeds", "0:2", "--seed", "1"], "--seed: a sweep has its seeds from --seeds"),
        (["train", "--seeds", "2"], "seeds: got '2'; accepted is A:B"),
        (["train", "--resume", "x", "--seeds", "0:2"], "--seeds: a resumed run keeps its own"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_worker_of_another_version_is_refused() -> None:
    with pytest.raises(ImportError, match=r"the driver 0\.0\.0; install the same version"):
        distributed._call("0.0.0", refuse, 0)


def test_without_the_extra_one_message_names_it(tmp_path: Path) -> None:
    process = run_without("ray", ["evaluate", "--ray", "auto", "--out", str(tmp_path)])
    assert process.returncode == 2
    assert "pip install 'vllm-tenant-tuning[ray]'" in process.stderr
    assert len(process.stderr.splitlines()) == 1
