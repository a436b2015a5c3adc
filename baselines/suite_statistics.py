"""A suite's results over all of its scenarios, from episode records.

Returns of different scenarios are made comparable by a scale of each scenario: 0 is the lowest
mean return of its policies, 1 the highest. Performance profiles, interquartile means of these
scores and their stratified bootstrap intervals are those of Agarwal et al., Deep Reinforcement
Learning at the Edge of the Statistical Precipice, NeurIPS 2021 (arXiv 2108.13264).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from vllm_tenant_tuning.baselines.benchmark import ScenarioRecords
from vllm_tenant_tuning.baselines.metrics import TESTED
from vllm_tenant_tuning.baselines.records import EpisodeRecord
from vllm_tenant_tuning.baselines.statistics import (
    CONFIDENCE,
    TRIMMED,
    Difference,
    Estimate,
    FloatArray,
    Interval,
    Summary,
    Verdict,
    estimate,
    paired_tests,
    summarize,
)
from vllm_tenant_tuning.baselines.suite import REFERENCE, Ablation, Suite

RESAMPLES = 2000
"""Of the stratified bootstrap."""

THRESHOLDS = 101
"""Points of a performance profile."""


@dataclass(frozen=True)
class ScenarioResult:
    """One scenario's comparison.

    Attributes:
        recorded: what was played.
        episodes: of the suite's policies, without those that only ablations have.
        summary: of these, against the best static caps.
        scores: by the policy's text in the suite, its normalised returns seed by seed; none
            where all policies have the same mean return.
        scale: the mean returns that are 0 and 1.
    """

    recorded: ScenarioRecords
    episodes: tuple[EpisodeRecord, ...]
    summary: Summary
    scores: dict[str, FloatArray]
    scale: tuple[float, float]

    @property
    def name(self) -> str:
        """Of the scenario."""
        return self.recorded.scenario.name


@dataclass(frozen=True)
class Profile:
    """How many of a policy's episodes score above each threshold.

    Attributes:
        thresholds: (n,) normalised returns.
        share: (n,) of the episodes, the mean over scenarios of their shares.
        low, high: (n,) 95 % of the resamples, point by point.
    """

    thresholds: FloatArray
    share: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True)
class SuiteScore:
    """A policy's normalised returns over all scenarios.

    Attributes:
        iqm: interquartile mean over all episodes of all scenarios.
        interval: of its stratified bootstrap, 95 %.
        profile: see there.
    """

    policy: str
    iqm: float
    interval: Interval
    profile: Profile


@dataclass(frozen=True)
class AblationResult:
    """One ablation in one scenario.

    Attributes:
        scenario: its name.
        labels: of the cells, in order.
        estimates: by label and metric.
        differences: by label and metric, to the first cell or to the one before; tested together.
    """

    ablation: Ablation
    scenario: str
    labels: tuple[str, ...]
    estimates: dict[tuple[str, str], Estimate]
    differences: dict[tuple[str, str], Difference]


def scenario_results(
    suite: Suite,
    recorded: Sequence[ScenarioRecords],
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[ScenarioResult], list[str]]:
    """The comparison of each scenario of which there are episodes of the best static caps.

    Args:
        suite: what was to be played.
        recorded: what was.
        on_progress: called with (scenarios compared, scenarios in all).

    Returns:
        The results, and a sentence on each scenario or policy that is not complete.
    """
    seeds = suite.n_seeds
    begun = {one.asked: one for one in recorded}
    results, missing = [], []
    for asked in suite.scenarios:
        one = begun.get(asked)
        episodes = one.of(suite.policies) if one is not None else []
        reference = one.label(REFERENCE) if one is not None else None
        if one is None or all(episode.policy != reference for episode in episodes):
            missing.append(f"{asked}: not played.")
            continue
        counts = Counter(episode.policy for episode in one.episodes)
        for policy in one.policies:
            if counts[policy.label] < seeds:
                missing.append(
                    f"{asked}: {policy.label} has {counts[policy.label]} of {seeds} seeds."
                )
        assert reference is not None
        results.append(_scenario_result(suite, one, episodes, reference))
        if on_progress is not None:
            on_progress(len(results), len(suite.scenarios))
    return results, missing


def _scenario_result(
    suite: Suite, one: ScenarioRecords, episodes: Sequence[EpisodeRecord], reference: str
) -> ScenarioResult:
    summary = summarize(episodes, reference)
    returns = {
        text: np.array([episode.return_ for episode in one.of([text])]) for text in suite.policies
    }
    means = [values.mean() for values in returns.values() if values.size]
    low, high = float(min(means)), float(max(means))
    scores = {
        text: (values - low) / (high - low)
        for text, values in returns.items()
        if values.size and high > low
    }
    return ScenarioResult(one, tuple(episodes), summary, scores, (low, high))


def suite_scores(suite: Suite, results: Sequence[ScenarioResult]) -> list[SuiteScore]:
    """Scores of the policies that every scored scenario has, best first.

    Args:
        suite: whose order breaks ties.
        results: of its scenarios; those in which all mean returns are alike score nothing.
    """
    scored = [result.scores for result in results if result.scores]
    policies = [text for text in suite.policies if all(text in scores for scores in scored)]
    if not scored or not policies:
        return []
    pooled = np.concatenate([scores[text] for text in policies for scores in scored])
    # beyond these nothing is to be seen but single episodes
    low, high = np.percentile(pooled, [0.5, 99.5])
    thresholds = np.linspace(min(low, 0.0), max(high, 1.0), THRESHOLDS)
    found = [
        _suite_score(text, [scores[text] for scores in scored], thresholds) for text in policies
    ]
    return sorted(found, key=lambda score: -score.iqm)


def _suite_score(policy: str, strata: Sequence[FloatArray], thresholds: FloatArray) -> SuiteScore:
    rng = np.random.default_rng(0)
    iqms = np.empty(RESAMPLES)
    shares = np.empty((RESAMPLES, thresholds.size))
    for i in range(RESAMPLES):
        drawn = [values[rng.integers(values.size, size=values.size)] for values in strata]
        iqms[i] = _iqm(drawn)
        shares[i] = shares_above(drawn, thresholds)
    tails = [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)]
    interval = np.percentile(iqms, tails)
    low, high = np.percentile(shares, tails, axis=0)
    return SuiteScore(
        policy=policy,
        iqm=_iqm(strata),
        interval=(float(interval[0]), float(interval[1])),
        profile=Profile(thresholds, shares_above(strata, thresholds), low, high),
    )


def shares_above(strata: Sequence[FloatArray], thresholds: FloatArray) -> FloatArray:
    """The share of scores above each threshold, averaged over scenarios (run-score distribution).

    Args:
        strata: the scores of each scenario.
        thresholds: (n,) ascending.
    """
    shares = [
        1 - np.searchsorted(np.sort(values), thresholds, side="right") / values.size
        for values in strata
    ]
    mean: FloatArray = np.mean(shares, axis=0)
    return mean


def _iqm(strata: Sequence[FloatArray]) -> float:
    return float(stats.trim_mean(np.concatenate(strata), TRIMMED))


def verdicts(
    suite: Suite, results: Sequence[ScenarioResult]
) -> dict[str, dict[str, dict[str, Verdict]]]:
    """What the tests against the best static caps say: by policy, scenario and metric."""
    found: dict[str, dict[str, dict[str, Verdict]]] = {}
    for text in suite.policies:
        if text == REFERENCE:
            continue
        found[text] = {}
        for result in results:
            label = result.recorded.label(text)
            if label is None or label not in result.summary.policies:
                continue
            said = {metric: result.summary.difference(label, metric) for metric in TESTED}
            found[text][result.name] = {
                metric: difference.verdict
                for metric, difference in said.items()
                if difference is not None and difference.p_value is not None
            }
    return found


def count_verdicts(by_scenario: Mapping[str, Mapping[str, Verdict]], metric: str) -> Counter[str]:
    """In how many scenarios a metric is better, worse, mixed and not significant."""
    return Counter(said[metric] for said in by_scenario.values() if metric in said)


def ablation_results(suite: Suite, recorded: Sequence[ScenarioRecords]) -> list[AblationResult]:
    """Every ablation in each of its scenarios in which all of its cells were played."""
    found = []
    begun = {one.asked: one for one in recorded}
    for ablation in suite.ablations:
        for asked in ablation.scenarios or suite.scenarios:
            one = begun.get(asked)
            if one is None or not all(one.of([cell.policy]) for cell in ablation.cells):
                continue
            found.append(_ablation_result(ablation, one))
    return found


def _ablation_result(ablation: Ablation, one: ScenarioRecords) -> AblationResult:
    labels = {cell.policy: cell.label for cell in ablation.cells}
    # records under the names of the cells
    renamed = [
        record.model_copy(update={"policy": label})
        for text, label in labels.items()
        for record in one.of([text])
    ]
    pairs = [(labels[text], labels[other]) for text, other in ablation.pairs()]
    return AblationResult(
        ablation=ablation,
        scenario=one.scenario.name,
        labels=tuple(labels.values()),
        estimates={
            (label, metric): estimate(renamed, label, metric)
            for label in labels.values()
            for metric in TESTED
        },
        differences={
            (found.policy, found.metric): found for found in paired_tests(renamed, pairs, TESTED)
        },
    )


def as_iqm(found: Estimate) -> Estimate:
    """The estimate with the interquartile mean in the place of the mean."""
    return replace(found, mean=found.iqm, mean_interval=found.iqm_interval)
