"""The benchmark: plays a suite, resumably, and keeps raw records from which all else is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vllm_tenant_tuning.agents import make_policy
from vllm_tenant_tuning.agents.rl import MODEL_FILE
from vllm_tenant_tuning.baselines.command_line import parse_seeds
from vllm_tenant_tuning.baselines.comparison import progress_bar
from vllm_tenant_tuning.baselines.decision_traces import (
    TRACES_FILE,
    DecisionTrace,
    record_traces,
)
from vllm_tenant_tuning.baselines.evaluate import (
    EPISODES_FILE,
    Contender,
    digest,
    evaluate,
    resolve,
)
from vllm_tenant_tuning.baselines.records import EpisodeRecord, read_lines, read_records
from vllm_tenant_tuning.baselines.suite import MODEL, REFERENCE, Suite
from vllm_tenant_tuning.scenario import Scenario, load_scenario
from vllm_tenant_tuning.schema import Model
from vllm_tenant_tuning.workload import Workload

PLAN_FILE = "benchmark.json"


class PlayedPolicy(Model):
    """A policy as it was played in one scenario.

    `asked`: its text in the suite. `label`: of its records. `text`: in a form of `make_policy`.
    `digest`: of its episodes (see `evaluate.digest`).
    """

    asked: str
    label: str
    text: str
    digest: str


class PlayedScenario(Model):
    """A scenario of the suite whose playing has begun.

    `asked`: its text in the suite. `scenario`: what it stood for; the folder has its name.
    `policies`: those of the suite, then those that only ablations have; without `model` where
    none was trained.
    """

    asked: str
    scenario: Scenario
    policies: tuple[PlayedPolicy, ...]


class Plan(Model):
    """What a folder's records are of: `PLAN_FILE`, written before anything is played.

    `scenarios`: those that have begun, in the suite's order.
    """

    suite: Suite
    scenarios: tuple[PlayedScenario, ...] = ()

    def known(self, scenario: Scenario, asked: str) -> Contender | None:
        """The contender that a policy's text stood for in the very same scenario."""
        for played in self.scenarios:
            for policy in played.policies:
                if policy.asked == asked and played.scenario == scenario:
                    return Contender(policy.label, policy.text)
        return None

    def begin(self, played: PlayedScenario) -> Plan:
        """The plan with this scenario in place of what it was before."""
        by_text = {begun.asked: begun for begun in self.scenarios} | {played.asked: played}
        order = [by_text[asked] for asked in self.suite.scenarios if asked in by_text]
        return self.model_copy(update={"scenarios": tuple(order)})


@dataclass(frozen=True)
class ScenarioRecords:
    """What was recorded of a scenario.

    Attributes:
        asked: its text in the suite.
        scenario: as it was played.
        policies: as they were played.
        episodes: whole ones of the suite's seeds, by policy and seed.
        traces: by label, of the suite's `trace_seed`.
    """

    asked: str
    scenario: Scenario
    policies: tuple[PlayedPolicy, ...]
    episodes: tuple[EpisodeRecord, ...]
    traces: dict[str, DecisionTrace]

    def label(self, asked: str) -> str | None:
        """The label of the policy with this text in the suite; None if it was not played."""
        return next((played.label for played in self.policies if played.asked == asked), None)

    def of(self, texts: Sequence[str]) -> list[EpisodeRecord]:
        """The episodes of the policies with these texts in the suite."""
        labels = {self.label(text) for text in texts}
        return [episode for episode in self.episodes if episode.policy in labels]


def play_suite(
    suite: Suite, out_dir: Path, *, models_dir: Path, workers: int | None = None
) -> None:
    """Play what is missing of a suite; an interruption loses the episodes in progress alone.

    Each scenario has a folder of its name with `EPISODES_FILE` and `TRACES_FILE`. The best static
    caps that an earlier run found are kept while the scenario is the same.

    Args:
        suite: what is played.
        out_dir: for the records.
        models_dir: the folder of trained models, each in a folder of its scenario's name.
        workers: processes; None for one for each core.

    Raises:
        ValueError: a scenario or a policy that is refused, before anything is played.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers: got {workers}; accepted is at least 1")
    seeds = parse_seeds(suite.seeds)
    scenarios = [load_scenario(asked) for asked in suite.scenarios]
    names = [scenario.name for scenario in scenarios]
    if len(set(names)) < len(names):
        raise ValueError(f"scenarios: got the names {', '.join(names)}; accepted is each once")
    for asked, scenario in zip(suite.scenarios, scenarios, strict=True):
        Workload(scenario)  # refuses traces that are not there
        texts: dict[str, str] = {}
        for text in suite.played(asked):
            if text == REFERENCE:
                continue
            contender = _contender(text, scenario, models_dir, "")
            if contender is None:
                continue
            if contender.label in texts:
                raise ValueError(
                    f"policies: got {texts[contender.label]}, {text}, which are the same in "
                    f"{scenario.name}; accepted is each once"
                )
            texts[contender.label] = text

    out_dir.mkdir(parents=True, exist_ok=True)
    plan = Plan(suite=suite)
    if (out_dir / PLAN_FILE).exists():
        plan = plan.model_copy(update={"scenarios": _read_plan(out_dir).scenarios})
    for i, (asked, scenario) in enumerate(zip(suite.scenarios, scenarios, strict=True)):
        title = f"{scenario.name} ({i + 1} of {len(scenarios)})"
        folder = out_dir / scenario.name
        folder.mkdir(exist_ok=True)
        contenders: dict[str, Contender] = {}
        for text in suite.played(asked):
            contender = plan.known(scenario, text) if text == REFERENCE else None
            contender = contender or _contender(text, scenario, models_dir, title)
            if contender is not None:
                contenders[text] = contender
        plan = plan.begin(_played(asked, scenario, contenders))
        _write_plan(out_dir, plan)
        with progress_bar(f"{title}: episodes") as on_progress:
            evaluate(
                list(contenders.values()),
                scenario,
                seeds,
                folder,
                workers=workers,
                on_progress=on_progress,
            )
        traced = [
            (contender, digest(scenario, contender.text, None))
            for text, contender in contenders.items()
            if text in suite.traced
        ]
        with progress_bar(f"{title}: decision traces") as on_progress:
            record_traces(traced, scenario, suite.trace_seed, folder, on_progress)


def read_suite_records(out_dir: Path) -> tuple[Suite, list[ScenarioRecords]]:
    """The suite that a folder was played with, and what is recorded of it.

    Where a file of records is missing, its gzipped form is read (`episodes.jsonl.gz`).

    Raises:
        ValueError: a folder without a plan, or files that cannot be read.
    """
    plan = _read_plan(out_dir)
    seeds = parse_seeds(plan.suite.seeds)
    found = []
    for played in plan.scenarios:
        folder = out_dir / played.scenario.name
        order = {(p.label, p.digest): i for i, p in enumerate(played.policies)}
        whole = {
            (order[record.policy, record.scenario_digest], record.seed): record
            for record in read_records(_published(folder / EPISODES_FILE))
            if record.is_whole
            and record.seed in seeds
            and (record.policy, record.scenario_digest) in order
        }
        traces = {
            trace.policy: trace
            for trace in read_lines(_published(folder / TRACES_FILE), DecisionTrace)
            if trace.seed == plan.suite.trace_seed
            and (trace.policy, trace.scenario_digest) in order
        }
        found.append(
            ScenarioRecords(
                asked=played.asked,
                scenario=played.scenario,
                policies=played.policies,
                episodes=tuple(whole[key] for key in sorted(whole)),
                traces={p.label: traces[p.label] for p in played.policies if p.label in traces},
            )
        )
    return plan.suite, found


def _played(asked: str, scenario: Scenario, contenders: Mapping[str, Contender]) -> PlayedScenario:
    policies = [
        PlayedPolicy(
            asked=text,
            label=contender.label,
            text=contender.text,
            digest=digest(scenario, contender.text, None),
        )
        for text, contender in contenders.items()
    ]
    return PlayedScenario(asked=asked, scenario=scenario, policies=tuple(policies))


def _contender(text: str, scenario: Scenario, models_dir: Path, title: str) -> Contender | None:
    """The contender of a suite's policy; None where no model was trained on the scenario."""
    if text == MODEL:
        return _trained_model(scenario, models_dir)
    if text == REFERENCE:
        with progress_bar(f"{title}: best static caps") as on_progress:
            return resolve(text, scenario, None, on_progress)
    return resolve(text, scenario, None)


def _trained_model(scenario: Scenario, models_dir: Path) -> Contender | None:
    folder = models_dir / scenario.name
    if not (folder / MODEL_FILE).is_file():
        return None
    policy = make_policy(f"model:{folder}")
    policy.reset(scenario, 0)  # refuses another scenario's observations
    return Contender(f"{MODEL}:{policy.name}", f"model:{folder}")


def _published(path: Path) -> Path:
    """The file of records, or its gzipped form where only that is there."""
    return path if path.exists() else path.with_name(f"{path.name}.gz")


def _read_plan(out_dir: Path) -> Plan:
    file = out_dir / PLAN_FILE
    try:
        return Plan.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"--out: {out_dir} holds no {PLAN_FILE}; accepted is the folder of a benchmark"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ": ".join([str(file), *filter(None, [".".join(map(str, first["loc"]))])])
        raise ValueError(f"{where}: {first['msg']}") from error


def _write_plan(out_dir: Path, plan: Plan) -> None:
    """Whole or not at all: a crash must not cost the plan of earlier runs."""
    new = out_dir / f"{PLAN_FILE}.new"
    new.write_text(plan.model_dump_json(indent=1) + "\n", encoding="utf-8")
    os.replace(new, out_dir / PLAN_FILE)
