"""Honest comparison of policies from episode records.

Every policy plays the same seeds, so policies are compared by paired differences: a bootstrap
interval of their mean, and Wilcoxon's signed-rank test with Holm's correction over all
comparisons made together. The interquartile mean stands beside the mean, because a few bad
episodes can carry a mean away; where they carry it against the ranks, the verdict says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import moocore
import numpy as np
import numpy.typing as npt
from scipy import stats
from statsmodels.stats.multitest import multipletests

from vllm_tenant_tuning.baselines.metrics import METRICS, TESTED, TOKEN_METRICS, Metric
from vllm_tenant_tuning.baselines.records import EpisodeRecord

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
RESAMPLES = 5000
TRIMMED = 0.25
"""Share cut off either end for the interquartile mean."""

Verdict = Literal["better", "worse", "mixed", "not significant"]
FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """One metric of one policy over its seeds.

    Attributes:
        n: episodes with a value (an episode without a completion has no latency).
        mean, sd, iqm: None where n is too small (0; 1 for the deviation).
        mean_interval, iqm_interval: bootstrap intervals at 95 %; None below two episodes.
    """

    policy: str
    metric: str
    n: int
    mean: float | None
    sd: float | None
    iqm: float | None
    mean_interval: Interval | None
    iqm_interval: Interval | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """A policy minus the reference, paired by seed.

    Attributes:
        n: seeds that both have.
        mean: of the differences; None without a common seed.
        interval: bootstrap interval at 95 % of the mean; None below two seeds.
        p_value: Wilcoxon's signed-rank test, two-sided; None below two seeds.
        p_holm: after Holm's correction over all comparisons of the call.
        significant: p_holm below 0.05.
        verdict: "better", "worse", or "not significant"; "mixed" is significant by ranks while
            the mean does not point the way they do.
    """

    policy: str
    reference: str
    metric: str
    n: int
    mean: float | None
    interval: Interval | None
    p_value: float | None
    p_holm: float | None
    significant: bool
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class ParetoFront:
    """Which policies no other dominates, by means of goodput, p99 latency and cost.

    A policy that completed nothing has no latency and is left out.

    Attributes:
        members: policies on the front.
        reference_point: (goodput, p99 latency, cost), for the hypervolume: the worst value of
            each over these policies, worsened by a tenth of the range.
        hypervolume: of the front, as a share of the box between the best values and the
            reference point; 0 where all policies are alike.
    """

    members: tuple[str, ...]
    reference_point: tuple[float, float, float]
    hypervolume: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """A whole comparison.

    Attributes:
        metrics: those that the records have, in the order of tables.
    """

    policies: tuple[str, ...]
    reference: str
    metrics: tuple[Metric, ...]
    estimates: tuple[Estimate, ...]
    differences: tuple[Difference, ...]
    pareto: ParetoFront | None

    def estimate(self, policy: str, metric: str) -> Estimate:
        """The estimate of one metric of one policy."""
        return next(e for e in self.estimates if (e.policy, e.metric) == (policy, metric))

    def difference(self, policy: str, metric: str) -> Difference | None:
        """The difference to the reference; None for the reference or an untested metric."""
        found = [d for d in self.differences if (d.policy, d.metric) == (policy, metric)]
        return found[0] if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "policies": list(self.policies),
            "reference": self.reference,
            "estimates": [estimate.to_dict() for estimate in self.estimates],
            "differences": [difference.to_dict() for difference in self.differences],
            "pareto": self.pareto.to_dict() if self.pareto else None,
        }


def summarize(records: Sequence[EpisodeRecord], reference: str) -> Summary:
    """Compare all policies of the records with the reference.

    Args:
        records: of one scenario.
        reference: the label of one of their policies.

    Raises:
        ValueError: no records, records of several scenarios or of several versions of a policy,
            an episode twice, or an unknown reference.
    """
    policies = _policies(records)
    if len({record.scenario for record in records}) != 1:
        names = sorted({record.scenario for record in records})
        raise ValueError(f"records: got scenarios {names}; accepted are records of one")
    seen: dict[str, str] = {}
    keys = set()
    for record in records:
        if seen.setdefault(record.policy, record.scenario_digest) != record.scenario_digest:
            raise ValueError(
                f"records: policy '{record.policy}' has digests {seen[record.policy]} and "
                f"{record.scenario_digest}; accepted are records of one version of it"
            )
        if record.key in keys:
            raise ValueError(
                f"records: policy '{record.policy}' has seed {record.seed} twice; accepted is "
                "each seed once"
            )
        keys.add(record.key)
    if reference not in policies:
        raise ValueError(f"reference: got '{reference}'; accepted are {', '.join(policies)}")
    shown = METRICS + tuple(
        metric
        for metric in TOKEN_METRICS
        if any(getattr(record, metric.field) is not None for record in records)
    )
    return Summary(
        policies=policies,
        reference=reference,
        metrics=shown,
        estimates=tuple(
            estimate(records, policy, metric.field) for policy in policies for metric in shown
        ),
        differences=tuple(paired_differences(records, reference, TESTED)),
        pareto=pareto_front(records),
    )


def estimate(records: Sequence[EpisodeRecord], policy: str, metric: str) -> Estimate:
    """Mean, deviation and interquartile mean of a metric, with intervals."""
    values = np.array([*_by_seed(records, policy, metric).values()])
    n = values.size
    return Estimate(
        policy=policy,
        metric=metric,
        n=n,
        mean=float(values.mean()) if n else None,
        sd=float(values.std(ddof=1)) if n > 1 else None,
        iqm=float(_iqm(values)) if n else None,
        mean_interval=_interval(values, _mean),
        iqm_interval=_interval(values, _iqm),
    )


def paired_differences(
    records: Sequence[EpisodeRecord], reference: str, metrics: Sequence[str]
) -> list[Difference]:
    """Each other policy minus the reference, metric by metric, tested together.

    Args:
        records: of one scenario.
        reference: the label of one of their policies.
        metrics: fields of `EpisodeRecord`; each must be in `METRICS`.
    """
    others = [policy for policy in _policies(records) if policy != reference]
    return paired_tests(records, [(policy, reference) for policy in others], metrics)


def paired_tests(
    records: Sequence[EpisodeRecord], pairs: Sequence[tuple[str, str]], metrics: Sequence[str]
) -> list[Difference]:
    """For each pair the first minus the second, metric by metric, all tested together.

    Args:
        records: of one scenario.
        pairs: labels of their policies.
        metrics: fields of `EpisodeRecord`; each must be in `METRICS`.
    """
    better = {metric.field: metric.better for metric in METRICS + TOKEN_METRICS}
    drafts: list[tuple[str, str, str, FloatArray, float | None]] = []
    for policy, reference in pairs:
        for metric in metrics:
            ours = _by_seed(records, policy, metric)
            theirs = _by_seed(records, reference, metric)
            common = sorted(ours.keys() & theirs.keys())
            differences = np.array([ours[seed] - theirs[seed] for seed in common])
            drafts.append((policy, reference, metric, differences, _wilcoxon(differences)))
    tested = [p for *_, p in drafts if p is not None]
    corrected = iter(multipletests(tested, method="holm")[1].tolist() if tested else [])
    result = []
    for policy, reference, metric, differences, p_value in drafts:
        p_holm = next(corrected) if p_value is not None else None
        mean = float(differences.mean()) if differences.size else None
        significant = p_holm is not None and p_holm < SIGNIFICANCE
        verdict: Verdict = "not significant"
        if significant and mean is not None:
            verdict = _direction(differences, mean, better[metric])
        result.append(
            Difference(
                policy=policy,
                reference=reference,
                metric=metric,
                n=differences.size,
                mean=mean,
                interval=_interval(differences, _mean),
                p_value=p_value,
                p_holm=p_holm,
                significant=significant,
                verdict=verdict,
            )
        )
    return result


def pareto_front(records: Sequence[EpisodeRecord]) -> ParetoFront | None:
    """The front of goodput (higher), p99 latency and cost (lower).

    None if no policy completed anything.
    """
    points = {}
    for policy in _policies(records):
        goodput_rps, latency_p99_s, cost = (
            [*_by_seed(records, policy, field).values()]
            for field in ("goodput_rps", "latency_p99_s", "cost")
        )
        if latency_p99_s:
            points[policy] = [-np.mean(goodput_rps), np.mean(latency_p99_s), np.mean(cost)]
    if not points:
        return None
    policies, losses = tuple(points), np.array([*points.values()])
    best, worst = losses.min(axis=0), losses.max(axis=0)
    span = worst - best
    point = worst + 0.1 * span
    front = moocore.is_nondominated(losses, keep_weakly=True)
    # An objective in which all are alike decides nothing and would make every volume 0.
    counted = span > 0
    volume = 0.0
    if counted.any():
        scaled = (losses[:, counted] - best[counted]) / (point - best)[counted]
        if counted.sum() == 1:
            volume = float(1 - scaled.min())
        else:
            volume = float(moocore.hypervolume(scaled, ref=np.ones(scaled.shape[1])))
    return ParetoFront(
        members=tuple(p for p, on_front in zip(policies, front, strict=True) if on_front),
        reference_point=(float(-point[0]), float(point[1]), float(point[2])),
        hypervolume=volume,
    )


def _policies(records: Sequence[EpisodeRecord]) -> tuple[str, ...]:
    if not records:
        raise ValueError("records: got none; at least one is needed")
    return tuple(dict.fromkeys(record.policy for record in records))


def _by_seed(records: Sequence[EpisodeRecord], policy: str, metric: str) -> dict[int, float]:
    return {
        record.seed: float(value)
        for record in records
        if record.policy == policy and (value := getattr(record, metric)) is not None
    }


def _mean(values: FloatArray, axis: int = -1) -> Any:
    return np.mean(values, axis=axis)


def _iqm(values: FloatArray, axis: int = -1) -> Any:
    return stats.trim_mean(values, TRIMMED, axis=axis)


def _interval(values: FloatArray, statistic: Any) -> Interval | None:
    if values.size < 2:
        return None
    if np.ptp(values) == 0:
        return (float(values[0]), float(values[0]))
    with warnings.catch_warnings():
        # BCa cannot correct where the jackknife is constant; the percentile interval can.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        for method in ("BCa", "percentile"):
            low, high = stats.bootstrap(
                (values,),
                statistic,
                n_resamples=RESAMPLES,
                confidence_level=CONFIDENCE,
                method=method,
                vectorized=True,
                rng=np.random.default_rng(0),
            ).confidence_interval
            if np.isfinite([low, high]).all():
                break
    return (float(low), float(high))


def _wilcoxon(differences: FloatArray) -> float | None:
    if differences.size < 2:
        return None
    if not differences.any():
        return 1.0
    return float(stats.wilcoxon(differences, zero_method="pratt").pvalue)


def _direction(differences: FloatArray, mean: float, better: str) -> Verdict:
    """What a significant difference says: the way of the ranks, if the mean goes it too.

    The signed-rank test knows nothing of the mean: many small gains can be significant while a
    few great losses make the mean a loss.
    """
    greater = stats.wilcoxon(differences, zero_method="pratt", alternative="greater").pvalue < 0.5
    if np.sign(mean) != (1 if greater else -1):
        return "mixed"
    return "better" if greater == (better == "higher") else "worse"
