"""Policies x seeds on one scenario: parallel, resumable, one raw record an episode."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tenant_tuning.agents import TranscribedPolicy, make_policy
from vllm_tenant_tuning.agents.llm import agent_content, agent_folder, agent_text, load_agent
from vllm_tenant_tuning.agents.rl import MODEL_FILE, NORMALIZATION_FILE, RUN_CONFIG_FILE
from vllm_tenant_tuning.baselines.best_static import find_best_static
from vllm_tenant_tuning.baselines.distributed import Files, RayCluster, trace_files
from vllm_tenant_tuning.baselines.episode import Env, Trajectory, make_env, play
from vllm_tenant_tuning.baselines.live import live_conditions
from vllm_tenant_tuning.baselines.parallel import run_here
from vllm_tenant_tuning.baselines.records import (
    EpisodeRecord,
    append_record,
    completed_keys,
    read_records,
)
from vllm_tenant_tuning.scenario import Scenario, load_scenario

EVALUATION_SEEDS = range(0, 1000)
"""Training seeds begin at 10000 and never meet these."""

RULE_POLICIES = (
    "static",
    "best_static",
    "naive",
    "differentiated",
    "per_tenant_window_p99",
    "coupled_backlog",
)
"""What a trained policy is compared with."""

EPISODES_FILE = "episodes.jsonl"

TRANSCRIPTS_FOLDER = "transcripts"

SEEDS_PER_TASK = 5


@dataclass(frozen=True)
class Contender:
    """A policy as an evaluation knows it.

    Attributes:
        label: how records and tables call it.
        text: how `make_policy` builds it, in any process.
    """

    label: str
    text: str

    @property
    def is_llm(self) -> bool:
        """Whether its decisions come from a language model."""
        return self.text.partition(":")[0] == "llm"


def evaluate(
    policies: Sequence[str | Contender],
    scenario: str | Path | Scenario,
    seeds: Sequence[int],
    out_dir: str | Path,
    *,
    backend: str = "sim",
    backend_options: Mapping[str, Any] | None = None,
    trace_dir: str | Path | None = None,
    workers: int | None = None,
    cluster: RayCluster | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[EpisodeRecord]:
    """Play every policy on every seed and record each episode as it ends.

    Whole episodes already recorded in `out_dir`, of the same scenario, policy and seed, are not
    played again; those that a fault cut short are. On a live server the episodes are played one
    after the other.

    Args:
        policies: texts that `resolve` accepts, or what it gave.
        scenario: a packaged scenario's name, a path, or a `Scenario`.
        seeds: the same for all policies (common random numbers).
        out_dir: where `episodes.jsonl` is kept.
        backend: the backend's name.
        backend_options: its keyword arguments (live: `LiveOptions`).
        trace_dir: the folder of the trace files.
        workers: processes; None for one for each core. Only for a simulation, like `cluster`.
        cluster: plays in place of processes of this machine. Traces and model files are sent to
            it.
        on_progress: called with (episodes done, episodes in all).

    Returns:
        The records, policy by policy in the order given, seeds in theirs; of an episode that
        was never whole, the last attempt (see `EpisodeRecord.left_out`).

    Raises:
        ValueError: a policy, scenario, trace or option that is refused, before anything is played.
        BackendError: a live server on which no episode can begin; what was played is recorded.
    """
    task = load_scenario(scenario)
    if not seeds:
        raise ValueError("seeds: got none; at least one is needed")
    contenders = [resolve(policy, task, trace_dir) for policy in policies]
    labels = [contender.label for contender in contenders]
    if len(set(labels)) != len(labels):
        raise ValueError(f"policies: names must differ, got {', '.join(labels)}")
    if cluster is not None and any(contender.is_llm for contender in contenders):
        raise ValueError(
            "cluster: got an LLM agent; accepted are policies without transcripts, which a cluster "
            "would leave on its machines"
        )
    if backend != "sim" and (cluster is not None or workers is not None):
        raise ValueError(
            f"{'workers' if cluster is None else 'cluster'}: accepted in simulation; a live server "
            "plays one episode at a time"
        )
    options = dict(backend_options or {})
    make_env(task, backend, trace_dir, **options).close()
    conditions = live_conditions(options) if backend == "live" else ""

    path = Path(out_dir) / EPISODES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    digests = {c.label: digest(task, c.text, trace_dir, conditions) for c in contenders}
    known = completed_keys(path)
    parts: list[tuple[Contender, list[int]]] = []
    for contender in contenders:
        missing = [
            seed
            for seed in seeds
            if (task.name, digests[contender.label], contender.label, seed) not in known
        ]
        # an LLM's episode is long, and waits for the network rather than for a core
        n_seeds = 1 if contender.is_llm or backend != "sim" else SEEDS_PER_TASK
        parts += [(contender, missing[i : i + n_seeds]) for i in range(0, len(missing), n_seeds)]
    total = len(contenders) * len(seeds)
    done = total - sum(len(chunk) for _, chunk in parts)
    tasks = [
        Task(task, backend, trace_dir, contender, digests[contender.label], chunk, Path(out_dir))
        for contender, chunk in parts
    ]
    if backend != "sim":
        batches = _run_in_turn(tasks, options)
    elif cluster is None:
        batches = run_here(_run_task, [(task,) for task in tasks], workers)
    else:
        batches = cluster.run(_run_sent, _with_files(tasks))
    with closing(batches):
        for records in batches:
            for record in records:
                append_record(path, record)
            done += len(records)
            if on_progress is not None:
                on_progress(done, total)

    wanted = {
        (task.name, digests[label], label, seed): (i, seed)
        for i, label in enumerate(labels)
        for seed in seeds
    }
    chosen = {
        wanted[key]: record
        for record in read_records(path)
        if (key := (record.scenario, record.scenario_digest, record.policy, record.seed)) in wanted
    }
    return [chosen[i, seed] for i in range(len(labels)) for seed in seeds]


def resolve(
    text: str | Contender,
    scenario: Scenario,
    trace_dir: str | Path | None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Contender:
    """The contender that a policy's text names, in a form of `make_policy` or `best_static`.

    A contender stands for itself.

    Args:
        text: of the policy.
        scenario: the task.
        trace_dir: the folder of the trace files.
        on_progress: of the search that `best_static` needs (see `find_best_static`).

    Raises:
        ValueError: a policy that is unknown or does not fit the scenario.
    """
    if isinstance(text, Contender):
        return text
    if text == "best_static":
        found = find_best_static(scenario, trace_dir=trace_dir, on_progress=on_progress)
        caps = "/".join(map(str, found.caps))
        return Contender(f"best_static:{caps}", f"static:{caps}")
    policy = make_policy(text)
    policy.initial_caps(scenario)
    return Contender(policy.name, text)


def digest(
    scenario: Scenario,
    policy_text: str,
    trace_dir: str | Path | None,
    conditions: str = "",
) -> str:
    """Twelve hex digits of all that an episode's result depends on but the seed.

    Args:
        scenario: the task.
        policy_text: a contender's.
        trace_dir: the folder of the trace files.
        conditions: what else it depends on; nothing in simulation.
    """
    content = hashlib.sha256(scenario.model_dump_json().encode())
    content.update(f"\n{policy_text}\n{trace_dir}{conditions}".encode())
    for data in _model_files(policy_text).content.values():
        content.update(data)
    if policy_text.partition(":")[0] == "llm":
        content.update(agent_content(policy_text))
    return content.hexdigest()[:12]


def trajectories(
    contenders: Sequence[Contender],
    scenario: Scenario,
    seed: int,
    trace_dir: str | Path | None = None,
    out_dir: str | Path = ".",
) -> dict[str, Trajectory]:
    """The episode of one seed under each contender.

    Args:
        contenders: who plays.
        scenario: the task.
        seed: of the episode.
        trace_dir: the folder of the trace files.
        out_dir: where `evaluate` has kept the transcripts of LLMs; they are replayed.
    """
    shown = {}
    with closing(make_env(scenario, trace_dir=trace_dir)) as env:
        for contender in contenders:
            policy = make_policy(contender.text)
            if isinstance(policy, TranscribedPolicy):
                policy.replay_from(_transcripts(Path(out_dir), contender))
            shown[contender.label] = play(env, policy, seed)[1]
    return shown


def llm_text(text: str, options: Mapping[str, Any], replay: str | Path | None) -> str:
    """The text of an LLM as a policy, with keys of its configuration set.

    Args:
        text: in the form `llm:CONFIG`.
        options: by the configuration's keys; None is left out.
        replay: the `out_dir` of an earlier evaluation to take the answers from.

    Raises:
        ValueError: a configuration that is refused.
    """
    if replay is None:
        return agent_text(text, options)
    label = load_agent(agent_text(text, {**options, "replay": replay})).config.label
    folder = _transcripts(Path(replay), Contender(label, text))
    return agent_text(text, {**options, "replay": folder})


def _transcripts(out_dir: Path, contender: Contender) -> Path:
    return out_dir / TRANSCRIPTS_FOLDER / agent_folder(contender.label)


class Task(NamedTuple):
    """Some episodes of one contender."""

    scenario: Scenario
    backend: str
    trace_dir: str | Path | None
    contender: Contender
    scenario_digest: str
    seeds: Sequence[int]
    out_dir: Path


def _run_task(task: Task) -> list[EpisodeRecord]:
    with closing(make_env(task.scenario, task.backend, task.trace_dir)) as env:
        return play_task(env, task)


def _run_in_turn(
    tasks: Sequence[Task], backend_options: Mapping[str, Any]
) -> Generator[list[EpisodeRecord], None, None]:
    """The tasks' records, one task after the other in one environment."""
    if not tasks:
        return
    first = tasks[0]
    with closing(
        make_env(first.scenario, first.backend, first.trace_dir, **backend_options)
    ) as env:
        for task in tasks:
            yield play_task(env, task)


def play_task(env: Env, task: Task) -> list[EpisodeRecord]:
    """Play the task's episodes in an environment of its scenario."""
    backend, contender = task.backend, task.contender
    policy = make_policy(contender.text)
    if isinstance(policy, TranscribedPolicy):
        policy.record_to(_transcripts(task.out_dir, contender))
        if backend != "sim":
            policy.run_in_real_time()
    update: Mapping[str, Any] = {
        "policy": contender.label,
        "scenario_digest": task.scenario_digest,
        "backend": backend,
    }
    try:
        return [play(env, policy, seed)[0].model_copy(update=update) for seed in task.seeds]
    finally:
        if isinstance(policy, TranscribedPolicy):
            policy.close()


def _with_files(tasks: Sequence[Task]) -> list[tuple[Task, Files, Files]]:
    """Each task with the traces and the model that a worker on another machine lacks."""
    traces: Files | None = None
    models: dict[Contender, Files] = {}
    sent = []
    for task in tasks:
        traces = traces or trace_files(task.scenario, task.trace_dir)
        if task.contender not in models:
            models[task.contender] = _model_files(task.contender.text)
        sent.append((task, traces, models[task.contender]))
    return sent


def _model_files(policy_text: str) -> Files:
    """What `ModelPolicy` reads, as files of one folder; none for other policies."""
    if not policy_text.startswith("model:"):
        return Files({})
    path = Path(policy_text.removeprefix("model:"))
    model = path / MODEL_FILE if path.is_dir() else path
    configs = (folder / RUN_CONFIG_FILE for folder in model.absolute().parents[:3])
    config = next(file for file in configs if file.is_file())
    return Files(
        {
            MODEL_FILE: model.read_bytes(),
            NORMALIZATION_FILE: (model.parent / NORMALIZATION_FILE).read_bytes(),
            RUN_CONFIG_FILE: config.read_bytes(),
        }
    )


def _run_sent(task: Task, traces: Files, model: Files) -> list[EpisodeRecord]:
    """`_run_task` on a worker."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces.write(folder / "traces")
        task = task._replace(trace_dir=folder / "traces", out_dir=folder)
        if model.content:
            model.write(folder / "model")
            contender = replace(task.contender, text=f"model:{folder / 'model'}")
            task = task._replace(contender=contender)
        return _run_task(task)
