"""Families of scenarios: one base, whose loads and burst patterns are drawn for each episode.

A family is a `Scenario`, its base's, with ranges: it is trained on, evaluated and compared like
any other. What is drawn changes which requests come and how long they wait at the gate, and
nothing else. Spaces, caps, engine and weights are the base's, and so are the references of
observations and rewards: an agent is not told what was drawn, and a reward of 1 is the same
amount of work in every episode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from vllm_tenant_tuning.scenario import (
    Arrivals,
    PeriodicBurstArrivals,
    RandomBurstArrivals,
    Scenario,
    ScenarioError,
    Tenant,
    TraceArrivals,
    is_family,
    parse_scenario,
    read_scenario,
)
from vllm_tenant_tuning.schema import Model, explain_errors

RATE_FIELDS = ("rate_per_s", "on_rate_per_s", "off_rate_per_s", "rates_per_s")


def _as_range(value: Any) -> Any:
    """A number stands for the range that holds it alone."""
    return (value, value) if isinstance(value, int | float | str) else value


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"got the range {list(value)}; its first number must be at most its last")
    return value


_Factor = Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_PositiveShare = Annotated[float, Field(gt=0, le=1)]

FactorRange = Annotated[
    tuple[_Factor, _Factor], BeforeValidator(_as_range), AfterValidator(_ordered)
]
ShareRange = Annotated[tuple[_Share, _Share], BeforeValidator(_as_range), AfterValidator(_ordered)]
PositiveShareRange = Annotated[
    tuple[_PositiveShare, _PositiveShare], BeforeValidator(_as_range), AfterValidator(_ordered)
]

UNCHANGED = (1.0, 1.0)


class TenantVariation(Model):
    """What varies of one tenant: ranges `[lowest, highest]`, or a number that is always taken.

    `rate_factor`: of all its arrival rates.
    `burst_factor`: of the rate in bursts, besides.
    `period_factor`: of the time from one burst to the next, and with it of a burst's length, its
    phase and the mean sojourns of random bursts.
    `on_share`: a burst's part of its period, or the mean one of random bursts (none: the base's).
    `phase_share`: where in the period a burst begins (none: the base's).
    `patience_factor`: of the patience.

    Factors are drawn evenly on a logarithmic scale, so that a half is as likely as a double,
    shares evenly. The fields of bursts are accepted where the base has `periodic_bursts` or
    `random_bursts`, `phase_share` where the bursts are periodic, `patience_factor` where there is
    a patience, `rate_factor` where no trace is replayed.
    """

    rate_factor: FactorRange = UNCHANGED
    burst_factor: FactorRange = UNCHANGED
    period_factor: FactorRange = UNCHANGED
    on_share: PositiveShareRange | None = None
    phase_share: ShareRange | None = None
    patience_factor: FactorRange = UNCHANGED

    @property
    def is_point(self) -> bool:
        """Whether nothing is left to chance."""
        return all(low == high for low, high in self.ranges.values())

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """The ranges that can change something, by parameter."""
        every = {name: getattr(self, name) for name in PARAMETERS}
        return {
            name: bounds
            for name, bounds in every.items()
            if bounds is not None and not (name in FACTORS and bounds == UNCHANGED)
        }

    def draw(self, rng: np.random.Generator) -> dict[str, float]:
        """A value of each of `ranges`, by parameter.

        A number is drawn for every parameter, whether or not it varies, so that one range can be
        changed and the others' values stay.
        """
        quantiles = rng.random(len(PARAMETERS)).tolist()
        return self.at(dict(zip(PARAMETERS, quantiles, strict=True)))

    def at(self, quantiles: Mapping[str, float]) -> dict[str, float]:
        """The values at these quantiles of `ranges`, 0 to 1 for each parameter."""
        return {
            name: _between(bounds, quantiles[name], logarithmic=name in FACTORS)
            for name, bounds in self.ranges.items()
        }


PARAMETERS = tuple(TenantVariation.model_fields)
FACTORS = frozenset(name for name in PARAMETERS if name.endswith("_factor"))


class ScenarioFamily(Scenario):
    """A scenario whose tenants' loads are drawn anew for each episode.

    `base`: the name of the scenario that all other fields are from.
    `variation`: what varies, by tenant; the others are the base's.
    `members`: by name, values (no ranges) to evaluate at; they may lie outside the ranges.

    Raises:
        pydantic.ValidationError: as `Scenario`; a tenant that is not there, a parameter that it
            does not have, or values at the ends of the ranges that a scenario does not accept.
    """

    base: str
    variation: dict[str, TenantVariation]
    members: dict[
        Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,30}$")], dict[str, TenantVariation]
    ] = Field(default_factory=dict)

    def varied(self, values: Mapping[str, Mapping[str, float]]) -> Scenario:
        """The plain scenario of an episode in which these values were drawn.

        It offers the same requests, and has references of its own for observations and rewards.

        Args:
            values: by tenant, by parameter.

        Raises:
            ValueError: values that a scenario does not accept.
        """
        content = self.model_dump(include=set(Scenario.model_fields))
        content["tenants"] = [
            varied_tenant(tenant, values.get(tenant.name, {})).model_dump()
            for tenant in self.tenants
        ]
        return Scenario.model_validate(content)

    def member(self, name: str) -> ScenarioFamily:
        """The family that has this member only: its ranges are the member's values.

        Raises:
            ScenarioError: no such member.
        """
        if name not in self.members:
            raise ScenarioError(
                f"scenario {self.name}: members: got '{name}'; accepted are "
                f"{', '.join(self.members) or 'none: the family names no members'}"
            )
        return self.model_copy(
            update={
                "name": f"{self.name}-{name}",
                "variation": self.members[name],
                "members": {},
            }
        )

    @model_validator(mode="after")
    def _varies_what_is_there(self) -> ScenarioFamily:
        places = [("variation", self.variation)]
        places += [(f"members.{name}", member) for name, member in self.members.items()]
        for name in self.members:
            if len(f"{self.name}-{name}") > 63:
                raise ValueError(
                    f"members.{name}: '{self.name}-{name}' is longer than a name may be"
                )
        for place, variation in places:
            for name, ranges in variation.items():
                if name not in self.tenant_names:
                    raise ValueError(
                        f"{place}.{name}: no such tenant; accepted are "
                        f"{', '.join(self.tenant_names)}"
                    )
                tenant = self.tenants[self.tenant_names.index(name)]
                _check_parameters(f"{place}.{name}", ranges, tenant)
                if place != "variation" and not ranges.is_point:
                    raise ValueError(f"{place}.{name}: accepted are values, not ranges")
            self._accept_ends(place, variation)
        return self

    def _accept_ends(self, place: str, variation: Mapping[str, TenantVariation]) -> None:
        """Refuse ranges that could draw what a scenario would refuse.

        Every field of a tenant rises or falls with each parameter, silent times with `on_share`
        against the others: what holds at these corners holds between them.
        """
        for quantile, on_share in itertools.product((0.0, 1.0), repeat=2):
            corner = dict.fromkeys(PARAMETERS, quantile) | {"on_share": on_share}
            values = {name: each.at(corner) for name, each in variation.items()}
            try:
                self.varied(values)
            except ValidationError as error:
                raise ValueError(f"{place}: with {values}: {explain_errors(error)}") from None


def varied_tenant(tenant: Tenant, values: Mapping[str, float]) -> Tenant:
    """The tenant with its load changed.

    Args:
        tenant: the base's.
        values: of the parameters of `TenantVariation`, by name; those that are missing change
            nothing.
    """
    arrivals = scaled_rates(tenant.arrivals, values.get("rate_factor", 1.0))
    changes: dict[str, Any] = {"arrivals": _varied_bursts(arrivals, values)}
    if tenant.patience_s is not None:
        changes["patience_s"] = tenant.patience_s * values.get("patience_factor", 1.0)
    return tenant.model_copy(update=changes)


def scaled_rates(arrivals: Arrivals, factor: float) -> Arrivals:
    """The arrivals with all rates multiplied; of a trace, its time divided.

    Args:
        arrivals: a process.
        factor: above 0.
    """
    changes: dict[str, Any] = {}
    if isinstance(arrivals, TraceArrivals):
        changes["speedup"] = arrivals.speedup * factor
    for field in RATE_FIELDS:
        rates = getattr(arrivals, field, None)
        if isinstance(rates, tuple):
            changes[field] = tuple(rate * factor for rate in rates)
        elif rates is not None:
            changes[field] = rates * factor
    return arrivals.model_copy(update=changes)


def _varied_bursts(arrivals: Arrivals, values: Mapping[str, float]) -> Arrivals:
    stretch = values.get("period_factor", 1.0)
    match arrivals:
        case PeriodicBurstArrivals():
            period_s = arrivals.period_s * stretch
            on_s, phase_s = arrivals.on_s * stretch, arrivals.phase_s * stretch
            if "on_share" in values:
                on_s = values["on_share"] * period_s
            if "phase_share" in values:
                phase_s = values["phase_share"] * period_s
            changes = {"period_s": period_s, "on_s": on_s, "phase_s": phase_s}
        case RandomBurstArrivals():
            mean_on_s, mean_off_s = arrivals.mean_on_s * stretch, arrivals.mean_off_s * stretch
            if "on_share" in values:
                cycle_s = mean_on_s + mean_off_s
                mean_on_s = values["on_share"] * cycle_s
                mean_off_s = cycle_s - mean_on_s
            changes = {"mean_on_s": mean_on_s, "mean_off_s": mean_off_s}
        case _:
            return arrivals
    changes["on_rate_per_s"] = arrivals.on_rate_per_s * values.get("burst_factor", 1.0)
    return arrivals.model_copy(update=changes)


def _check_parameters(place: str, variation: TenantVariation, tenant: Tenant) -> None:
    """Refuse parameters that the tenant does not have."""
    process = tenant.arrivals.process
    bursts = {"periodic_bursts", "random_bursts"}
    needs = {
        "burst_factor": (process in bursts, "a process of bursts"),
        "period_factor": (process in bursts, "a process of bursts"),
        "on_share": (process in bursts, "a process of bursts"),
        "phase_share": (process == "periodic_bursts", "the process 'periodic_bursts'"),
        "rate_factor": (process != "trace", "a process with rates"),
    }
    for name, (has_it, needed) in needs.items():
        if name in variation.ranges and not has_it:
            raise ValueError(
                f"{place}.{name}: the tenant's process is '{process}'; accepted is {needed}"
            )
    if "patience_factor" in variation.ranges and tenant.patience_s is None:
        raise ValueError(f"{place}.patience_factor: the tenant has no patience_s")


def _between(bounds: tuple[float, float], quantile: float, *, logarithmic: bool) -> float:
    low, high = bounds
    if quantile == 0 or low == high:
        return low
    if quantile == 1:
        return high
    if logarithmic:
        return min(max(low * math.pow(high / low, quantile), low), high)
    return min(low + (high - low) * quantile, high)


# --- loading ------------------------------------------------------------------------------


class _FamilyFile(Model):
    """A family as its file describes it: everything else is the base's."""

    name: str
    question: str
    description: str = ""
    base: str
    variation: dict[str, Any]
    members: dict[str, Any] = Field(default_factory=dict)


def parse_family(content: Mapping[str, Any], label: str) -> ScenarioFamily:
    """Make a family of plain data.

    Args:
        content: what a family's file holds (`name`, `question`, `description`, `base`,
            `variation`, `members`), or all fields of a `ScenarioFamily`.
        label: how messages name the source.

    Raises:
        ScenarioError: a base that cannot be used.
        pydantic.ValidationError: values that are not accepted.
    """
    if "tenants" in content:
        return ScenarioFamily.model_validate(content)
    file = _FamilyFile.model_validate(content)
    try:
        content = read_scenario(file.base)
        if is_family(content):  # not loaded: it could be its own base
            raise ScenarioError(f"got the family '{content.get('name')}'; accepted is a scenario")
        base = parse_scenario(content, file.base)
    except ScenarioError as error:
        raise ScenarioError(f"scenario {label}: base: {error}") from error
    return ScenarioFamily.model_validate(base.model_dump() | file.model_dump())
