"""The measured experiment: policies on one live server, in random order, seed by seed.

For each seed, in random order, every policy plays the seed's episode, in random order: what
drifts on the server meets all of them alike, and policies are compared by paired differences.
Before each episode load runs that is not measured (warm-up), after it the server rests
(cool-down).
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.baselines.comparison import conclude, progress_bar
from vllm_tenant_tuning.baselines.episode import Env, make_env
from vllm_tenant_tuning.baselines.evaluate import (
    EPISODES_FILE,
    Contender,
    Task,
    digest,
    play_task,
    resolve,
)
from vllm_tenant_tuning.baselines.live import (
    COOL_DOWN_S,
    RAW_FOLDER,
    WARM_UP_S,
    live_conditions,
)
from vllm_tenant_tuning.baselines.records import EpisodeRecord, append_record, read_records
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import Workload

PROTOCOL_FILE = "protocol.json"

WARM_UP_SEED = 10_000
"""A training seed: what warms the server up is no load that is measured."""


@dataclass(frozen=True)
class Protocol:
    """What is played; equal for all runs of one folder.

    Attributes:
        scenario: the task.
        policies: as they were asked for.
        contenders: what they are, in the same order.
        seeds: of the episodes, the same for all policies.
        order_seed: of the order in which they are played.
        warm_up_s: load before an episode that is not measured, up to the length of an episode;
            rounded up to whole control intervals. 0 for none.
        cool_down_s: rest after an episode.
        options: fields of `LiveOptions`, without `out_dir`.
        trace_dir: the folder of the trace files.
    """

    scenario: Scenario
    policies: tuple[str, ...]
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    order_seed: int
    warm_up_s: float
    cool_down_s: float
    options: Mapping[str, Any]
    trace_dir: str | Path | None

    @property
    def warm_up_steps(self) -> int:
        """Control intervals of a warm-up."""
        control = self.scenario.control
        return math.ceil(self.warm_up_s / control.control_interval_s - 1e-9)

    def order(self) -> list[tuple[Contender, int]]:
        """All episodes in the order in which they are played."""
        rng = np.random.default_rng(self.order_seed)
        return [
            (self.contenders[i], int(seed))
            for seed in rng.permutation(self.seeds)
            for i in rng.permutation(len(self.contenders))
        ]

    def digest(self, contender: Contender) -> str:
        """Of the contender's records."""
        conditions = f"{live_conditions(self.options)}\n{self.warm_up_s} {self.cool_down_s}"
        return digest(self.scenario, contender.text, self.trace_dir, conditions)

    def settings(self) -> dict[str, Any]:
        """Plain data; what must stay as it is when the protocol is taken up again."""
        return {
            "scenario": self.scenario.name,
            "policies": list(self.policies),
            "seeds": list(self.seeds),
            "order_seed": self.order_seed,
            "warm_up_s": self.warm_up_s,
            "cool_down_s": self.cool_down_s,
            "digests": {c.label: self.digest(c) for c in self.contenders},
        }


@dataclass(frozen=True)
class Outlook:
    """What a protocol would take.

    Attributes:
        episodes: in all; recorded: of these, whole ones that are there already.
        order: those that are left, in the order in which they are played.
        minutes: of warm-up, episode and cool-down of those that are left. The server's start
            and the second or two in which it becomes idle before an episode come on top.
        measured_requests, warm_up_requests: that they offer.
    """

    episodes: int
    recorded: int
    order: tuple[tuple[Contender, int], ...]
    minutes: float
    measured_requests: int
    warm_up_requests: int


def make_protocol(
    policies: Sequence[str],
    scenario: Scenario,
    seeds: Sequence[int],
    *,
    order_seed: int = 0,
    warm_up_s: float = WARM_UP_S,
    cool_down_s: float = COOL_DOWN_S,
    options: Mapping[str, Any] | None = None,
    trace_dir: str | Path | None = None,
) -> Protocol:
    """Check what is asked for.

    Raises:
        ValueError: a policy, seed or length that is refused.
    """
    episode_s = scenario.control.episode_s
    if not 0 <= warm_up_s <= episode_s:
        raise ValueError(
            f"warm_up_s: got {warm_up_s:g}; accepted is 0 to the episode's {episode_s:g} s"
        )
    if not 0 <= cool_down_s < math.inf:
        raise ValueError(f"cool_down_s: got {cool_down_s:g}; accepted is 0 or more seconds")
    if order_seed < 0:
        raise ValueError(f"order_seed: got {order_seed}; accepted is 0 or more")
    if not seeds:
        raise ValueError("seeds: got none; at least one is needed")
    contenders = tuple(resolve(policy, scenario, trace_dir) for policy in policies)
    labels = [contender.label for contender in contenders]
    if len(set(labels)) != len(labels):
        raise ValueError(f"policies: names must differ, got {', '.join(labels)}")
    return Protocol(
        scenario=scenario,
        policies=tuple(policies),
        contenders=contenders,
        seeds=tuple(seeds),
        order_seed=order_seed,
        warm_up_s=warm_up_s,
        cool_down_s=cool_down_s,
        options=dict(options or {}),
        trace_dir=trace_dir,
    )


def look_ahead(protocol: Protocol, out_dir: Path, *, repeat_invalid: bool = False) -> Outlook:
    """What the protocol would take, with what `out_dir` has of it already.

    Args:
        protocol: made by `make_protocol`.
        out_dir: of its records.
        repeat_invalid: whether an episode whose load was not delivered is to be played again.

    Raises:
        ValueError: the folder holds another protocol.
    """
    left = _left(protocol, out_dir, repeat_invalid)
    episodes = len(protocol.order())
    control = protocol.scenario.control
    warm_up_s = protocol.warm_up_steps * control.control_interval_s
    workload = Workload(protocol.scenario, protocol.trace_dir)

    def arrivals_s(seed: int) -> Any:
        return workload.sample(gym.utils.seeding.np_random(seed)[0]).arrival_s

    measured = {seed: len(arrivals_s(seed)) for seed in protocol.seeds}
    warming = int((arrivals_s(WARM_UP_SEED) < warm_up_s).sum())
    one_s = warm_up_s + control.n_steps * control.control_interval_s + protocol.cool_down_s
    return Outlook(
        episodes=episodes,
        recorded=episodes - len(left),
        order=tuple(left),
        minutes=len(left) * one_s / 60,
        measured_requests=sum(measured[seed] for _, seed in left),
        warm_up_requests=len(left) * warming,
    )


def describe(protocol: Protocol, outlook: Outlook) -> str:
    """The outlook in words, with the order."""
    control = protocol.scenario.control
    lines = [
        f"{protocol.scenario.name}: {len(protocol.contenders)} policies x {len(protocol.seeds)} "
        f"seeds = {outlook.episodes} episodes; {outlook.recorded} are recorded, "
        f"{len(outlook.order)} are left",
        f"minutes: {outlook.minutes:.1f} ({protocol.warm_up_steps * control.control_interval_s:g} "
        f"s warm-up, {control.episode_s:g} s episode, {protocol.cool_down_s:g} s cool-down); the "
        "server's start, and 1 to 2 s an episode until it is idle, come on top",
        f"requests: {outlook.measured_requests + outlook.warm_up_requests} "
        f"({outlook.measured_requests} measured, {outlook.warm_up_requests} of warm-ups)",
        f"order (seed {protocol.order_seed}):",
    ]
    width = len(str(len(outlook.order)))
    lines += [
        f"  {number:{width}}  seed {seed}  {contender.label}"
        for number, (contender, seed) in enumerate(outlook.order, start=1)
    ]
    return "\n".join(lines)


def run_protocol(
    protocol: Protocol,
    out_dir: Path,
    *,
    hardware_note: str = "",
    repeat_invalid: bool = False,
    make: Callable[..., Env] = make_env,
    rest: Callable[[float], None] = time.sleep,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[EpisodeRecord]:
    """Play what is left of the protocol, and record each episode as it ends.

    An episode that a fault cuts short is recorded with its reason, and played again by the next
    run. `protocol.json` says what is played and, for each run, on what.

    Args:
        protocol: made by `make_protocol`.
        out_dir: for the records.
        hardware_note: what the server runs on, and how it was started if not by this run.
        repeat_invalid: whether an episode whose load was not delivered is played again.
        make: makes the environment, called as `make_env`.
        rest: called with seconds for each cool-down.
        on_progress: called with (episodes done, episodes in all).

    Returns:
        The records, policy by policy, of each seed the last attempt.

    Raises:
        ValueError: the folder holds another protocol, or was measured on another server.
        BackendError: a server on which no episode can begin; what was played is recorded.
    """
    left = _left(protocol, out_dir, repeat_invalid)
    total = len(protocol.order())
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / EPISODES_FILE
    if left:
        options = {**protocol.options, "out_dir": out_dir / RAW_FOLDER}
        with closing(make(protocol.scenario, "live", protocol.trace_dir, **options)) as env:
            _, info = env.reset(seed=WARM_UP_SEED)
            _note_run(protocol, out_dir, hardware_note, info.get("live", {}))
            for number, (contender, seed) in enumerate(left):
                if on_progress is not None:
                    on_progress(total - len(left) + number, total)
                if number:
                    rest(protocol.cool_down_s)
                _warm_up(env, contender, protocol)
                task = Task(
                    protocol.scenario,
                    "live",
                    protocol.trace_dir,
                    contender,
                    protocol.digest(contender),
                    [seed],
                    out_dir,
                )
                for record in play_task(env, task):
                    append_record(path, record)
    if on_progress is not None:
        on_progress(total, total)
    last = {record.key: record for record in read_records(path)}
    keys = [_key(protocol, c, seed) for c in protocol.contenders for seed in protocol.seeds]
    return [last[key] for key in keys]


def measure(
    protocol: Protocol,
    out_dir: Path,
    reference: str,
    *,
    hardware_note: str = "",
    repeat_invalid: bool = False,
) -> bool:
    """Run the protocol, write the report and print the table.

    Args:
        protocol: made by `make_protocol`.
        out_dir: for records and report.
        reference: the label of the policy that the others are compared with.
        hardware_note: see `run_protocol`.
        repeat_invalid: see `run_protocol`.

    Returns:
        Whether all episodes are whole; else another run has some to repeat.

    Raises:
        ValueError: see `run_protocol`, or no episode that counts.
        BackendError: see `run_protocol`.
    """
    with progress_bar("measuring") as on_progress:
        records = run_protocol(
            protocol,
            out_dir,
            hardware_note=hardware_note,
            repeat_invalid=repeat_invalid,
            on_progress=on_progress,
        )
    notes = [hardware_note] if hardware_note else []
    conclude(records, protocol.scenario, reference, out_dir, None, notes=notes)
    return all(record.is_whole for record in records)


def _left(protocol: Protocol, out_dir: Path, repeat_invalid: bool) -> list[tuple[Contender, int]]:
    """The episodes that `out_dir` does not have yet, in the order in which they are played.

    Raises:
        ValueError: the folder holds another protocol.
    """
    _check_same(protocol, out_dir)
    known = {
        record.key
        for record in read_records(out_dir / EPISODES_FILE)
        if (record.is_whole and not repeat_invalid) or not record.left_out
    }
    return [(c, seed) for c, seed in protocol.order() if _key(protocol, c, seed) not in known]


def _key(protocol: Protocol, contender: Contender, seed: int) -> tuple[str, str, str, int]:
    return (protocol.scenario.name, protocol.digest(contender), contender.label, seed)


def _warm_up(env: Env, contender: Contender, protocol: Protocol) -> None:
    """Play under the caps that the contender starts with, held; nothing of it is recorded."""
    if not protocol.warm_up_steps:
        return
    caps = make_policy(contender.text).initial_caps(protocol.scenario)
    hold = np.full(protocol.scenario.n_tenants, protocol.scenario.control.max_delta)
    env.reset(seed=WARM_UP_SEED, options={"caps": caps})
    for _ in range(protocol.warm_up_steps):
        if env.step(hold)[3]:  # a fault, or as long as an episode: the next reset decides
            return


def _check_same(protocol: Protocol, out_dir: Path) -> None:
    """Raises: ValueError: the folder holds another protocol, or episodes without one."""
    file = out_dir / PROTOCOL_FILE
    if not file.exists():
        if (out_dir / EPISODES_FILE).exists():
            raise ValueError(
                f"out: {out_dir} holds episodes and no {PROTOCOL_FILE}; accepted is a new folder, "
                "or one of an earlier run of the protocol"
            )
        return
    before = json.loads(file.read_text(encoding="utf-8"))["settings"]
    for name, value in protocol.settings().items():
        if before[name] != value:
            if name == "digests":
                raise ValueError(
                    f"out: {out_dir} was measured with another content of the scenario, the "
                    "policies or the server's arguments; accepted is the same, or another folder"
                )
            raise ValueError(
                f"{name}: got {value}; accepted is {before[name]}, as in the earlier run in "
                f"{out_dir}, or another folder"
            )


def _note_run(
    protocol: Protocol, out_dir: Path, hardware_note: str, live: Mapping[str, Any]
) -> None:
    """Add this run to `protocol.json`.

    Raises:
        ValueError: an earlier run had another server; nothing has been played then.
    """
    file = out_dir / PROTOCOL_FILE
    content: dict[str, Any] = {
        "settings": protocol.settings(),
        "scenario": protocol.scenario.model_dump(mode="json"),
        "contenders": [asdict(contender) for contender in protocol.contenders],
        "runs": [],
    }
    if file.exists():
        content = json.loads(file.read_text(encoding="utf-8"))
    server = dict(live.get("server", {}))
    episode = Path(live["folder"]) / "episode.json" if "folder" in live else None
    started = json.loads(episode.read_text(encoding="utf-8")) if episode is not None else {}
    for earlier in content["runs"]:
        for name, value in server.items():
            if name != "url" and earlier["server"].get(name) != value:
                raise ValueError(
                    f"server: its {name} is {value}; in the earlier run in {out_dir} it was "
                    f"{earlier['server'].get(name)}; accepted is the same server, or another folder"
                )
    content["runs"].append(
        {
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware_note": hardware_note,
            "server": server,
            "server_command": started.get("command"),
            "options": started.get("options"),
            "gpu_unavailable": started.get("gpu_unavailable"),
            "client": {
                "vllm_tenant_tuning": version("vllm-tenant-tuning"),
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}",
                "cpus": os.cpu_count(),
            },
        }
    )
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(file)
