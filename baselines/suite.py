"""A suite: what a benchmark plays and compares, as a file that is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from vllm_tenant_tuning.baselines.command_line import parse_seeds
from vllm_tenant_tuning.schema import Model, explain_errors, packaged_names, read_yaml

REFERENCE = "best_static"
"""What every policy of a suite is compared with."""

MODEL = "model"
"""In a suite: the model that was trained on the scenario, where there is one."""

Text = Annotated[str, Field(min_length=1, max_length=200)]


class SuiteError(ValueError):
    """A suite that cannot be read or is not accepted."""


class Cell(Model):
    """One policy of an ablation.

    `label`: how its tables call it. `policy`: in a form of `make_policy`.
    """

    label: Text
    policy: Text


class Ablation(Model):
    """Policies that differ in one thing each.

    `compared`: every cell with the first, or with the one before it.
    `scenarios`: of the suite; None for all of them.
    """

    name: Text
    question: Text
    compared: Literal["first", "previous"]
    scenarios: tuple[Text, ...] | None = None
    cells: Annotated[tuple[Cell, ...], Field(min_length=2)]

    @model_validator(mode="after")
    def _cells_differ(self) -> Ablation:
        _distinct("cells", [cell.policy for cell in self.cells])
        _distinct("cells", [cell.label for cell in self.cells])
        return self

    def pairs(self) -> list[tuple[str, str]]:
        """(policy, compared with) by the texts of the cells."""
        texts = [cell.policy for cell in self.cells]
        others = texts[:1] * (len(texts) - 1) if self.compared == "first" else texts[:-1]
        return list(zip(texts[1:], others, strict=True))


class Suite(Model):
    """What a benchmark plays and compares.

    `scenarios`: names of packaged ones, or paths.
    `policies`: `best_static`, with which all are compared; `model`, the one that was trained on
    the scenario; and any form of `make_policy`.
    `seeds`: A:B for A to B - 1, the same for all policies.
    `trace_seed`: of the episodes whose decisions are shown. `traced`: the policies of those.
    `notes`: sentences that the report ends with.
    """

    name: Text
    description: str
    scenarios: Annotated[tuple[Text, ...], Field(min_length=1)]
    policies: Annotated[tuple[Text, ...], Field(min_length=2)]
    seeds: str
    trace_seed: Annotated[int, Field(ge=0, lt=1000)] = 0
    traced: tuple[Text, ...] = ()
    ablations: tuple[Ablation, ...] = ()
    notes: tuple[str, ...] = ()

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds_are_a_range(cls, text: Any) -> Any:
        if not isinstance(text, str):  # YAML takes 1:4 for the number 64
            raise ValueError(f"got {text!r}; accepted is A:B in quotation marks, such as '0:100'")
        parse_seeds(text)
        return text

    @model_validator(mode="after")
    def _names_fit(self) -> Suite:
        _distinct("scenarios", self.scenarios)
        _distinct("policies", self.policies)
        _distinct("ablations", [ablation.name for ablation in self.ablations])
        if REFERENCE not in self.policies:
            raise ValueError(
                f"policies: got {', '.join(self.policies)}; accepted are lists with {REFERENCE}, "
                "with which all are compared"
            )
        _known("traced", self.traced, self.policies)
        for ablation in self.ablations:
            where = f"ablations: {ablation.name}: scenarios"
            _known(where, ablation.scenarios or (), self.scenarios)
        return self

    @property
    def n_seeds(self) -> int:
        """Episodes of each policy in each scenario."""
        return len(parse_seeds(self.seeds))

    def with_seeds(self, text: str) -> Suite:
        """The suite with other seeds, A:B.

        Raises:
            ValueError: not such a range.
        """
        parse_seeds(text)
        return self.model_copy(update={"seeds": text})

    def ablations_of(self, scenario: str) -> tuple[Ablation, ...]:
        """The ablations that are played in one of the suite's scenarios."""
        return tuple(a for a in self.ablations if a.scenarios is None or scenario in a.scenarios)

    def played(self, scenario: str) -> tuple[str, ...]:
        """The texts of all policies of a scenario, its ablations' included, each once."""
        cells = [cell.policy for a in self.ablations_of(scenario) for cell in a.cells]
        return tuple(dict.fromkeys([*self.policies, *cells]))


def suite_names() -> list[str]:
    """The packaged suites."""
    return packaged_names("suites")


def load_suite(source: str | Path) -> Suite:
    """Read a suite.

    Args:
        source: the name of a packaged suite, or the path of a YAML file.

    Raises:
        SuiteError: no such suite or file, YAML that cannot be read, or values that are not
            accepted; each is named with its path, the value and what is accepted.
    """
    content = read_yaml("suite", source, {"suites": "a packaged suite"}, SuiteError)
    if not isinstance(content, dict):
        raise SuiteError(f"suite {source}: got {content!r}; a mapping is accepted")
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        raise SuiteError(f"suite {source}: {explain_errors(error, Suite)}") from error


def _distinct(where: str, names: tuple[str, ...] | list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{where}: got {', '.join(twice)} twice; accepted is each once")


def _known(where: str, names: tuple[str, ...], accepted: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in accepted]
    if unknown:
        raise ValueError(
            f"{where}: got {', '.join(unknown)}; accepted are the suite's: {', '.join(accepted)}"
        )
