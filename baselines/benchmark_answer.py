"""What a benchmark answers, computed from its comparisons: a matrix of verdicts and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vllm_tenant_tuning.baselines.benchmark_tables import Table
from vllm_tenant_tuning.baselines.metrics import METRICS
from vllm_tenant_tuning.baselines.report import signed
from vllm_tenant_tuning.baselines.statistics import Difference, Verdict
from vllm_tenant_tuning.baselines.suite import REFERENCE, Suite
from vllm_tenant_tuning.baselines.suite_statistics import ScenarioResult

WON = ("goodput_rps", "weighted_drops")
"""What a controller is for; winning it with a worse p99 latency does not count."""

NAMED = 4
"""Policies that a sentence names."""

WORDS: dict[Verdict, str] = {
    "better": "better",
    "worse": "worse",
    "mixed": "mixed",
    "not significant": "no different",
}
"""How the matrix calls a verdict."""

_METRICS = {metric.field: metric for metric in METRICS}


def answer_table(suite: Suite, results: Sequence[ScenarioResult]) -> Table:
    """Policies by scenarios: the verdict on the return and its relative mean difference."""
    rows = []
    for text in suite.policies:
        if text == REFERENCE:
            continue
        row = [text]
        for result in results:
            found = _difference(result, text, "return_")
            if found is None or found.mean is None:
                row.append("not played")
            elif found.p_value is None:
                row.append(f"not tested {_relative(result, found)}")
            else:
                row.append(f"{WORDS[found.verdict]} {_relative(result, found)}")
        rows.append(row)
    return Table(
        "Return against the best static caps: the verdict after Holm's correction, and the mean "
        "difference relative to their mean return",
        ["policy", *(result.name for result in results)],
        rows,
    )


def answer_sentences(suite: Suite, results: Sequence[ScenarioResult]) -> list[str]:
    """How often the return is better or worse, and where goodput or weighted drops are won."""
    texts = [text for text in suite.policies if text != REFERENCE]
    found = [_difference(result, text, "return_") for result in results for text in texts]
    tested = [one for one in found if one is not None and one.p_value is not None]
    counts = Counter(one.verdict for one in tested)
    sentences = [
        f"Return: of {len(tested)} pairs of a policy and a scenario, {counts['better']} are better "
        f"than the best static caps, {counts['worse']} worse, {counts['mixed']} mixed and "
        f"{counts['not significant']} no different."
    ]
    sentences += _standing(results, texts)
    without = []
    for result in results:
        lines = [line for metric in WON if (line := _wins(result, texts, metric))]
        sentences += lines
        if not lines:
            without.append(result.name)
    if without:
        sentences.append(
            "No policy is better in goodput or weighted drops without a worse p99 latency in "
            f"{', '.join(without)}."
        )
    return sentences


def _standing(results: Sequence[ScenarioResult], texts: Sequence[str]) -> list[str]:
    """In how many scenarios the return of each policy is better and worse, the best first."""
    standing = []
    for text in texts:
        found = (_difference(result, text, "return_") for result in results)
        counts = Counter(
            one.verdict for one in found if one is not None and one.p_value is not None
        )
        if counts["better"]:
            line = f"{text} (better in {counts['better']}, worse in {counts['worse']})"
            standing.append((-counts["better"], counts["worse"], line))
    standing.sort(key=lambda one: one[:2])
    names = ", ".join(line for *_, line in standing)
    return [f"Policies whose return is better in at least one scenario: {names or 'none'}."]


def _wins(result: ScenarioResult, texts: Sequence[str], metric: str) -> str:
    """Who is better in a metric without a worse p99 latency, the largest difference first."""
    won = []
    for text in texts:
        found, latency = (_difference(result, text, m) for m in (metric, "latency_p99_s"))
        if found is None or found.mean is None or found.interval is None:
            continue
        # a latency that is worse by ranks alone is not believed either
        held = latency is not None and latency.verdict in ("better", "not significant")
        if found.verdict == "better" and held:
            low, high = map(signed, found.interval)
            line = f"{text} {signed(found.mean)} [{low}, {high}], {_relative(result, found)}"
            won.append((abs(found.mean), line + _asides(result, text)))
    if not won:
        return ""
    won.sort(key=lambda one: -one[0])
    shown = "; ".join(line for _, line in won[:NAMED])
    more = f"; and {len(won) - NAMED} more" if len(won) > NAMED else ""
    return (
        f"{result.name}: better in {_METRICS[metric].title} without a worse p99 latency: "
        f"{shown}{more}."
    )


def _asides(result: ScenarioResult, text: str) -> str:
    """What must be known of a win: a worse return, or that nothing was re-tuned."""
    found = _difference(result, text, "return_")
    said = []
    if found is not None and found.verdict in ("worse", "mixed"):
        said.append(f"return {WORDS[found.verdict]} {_relative(result, found)}")
    if not any(episode.cap_changes for episode in result.recorded.of([text])):
        said.append("its caps never moved")
    return f" ({', '.join(said)})" if said else ""


def _difference(result: ScenarioResult, text: str, metric: str) -> Difference | None:
    label = result.recorded.label(text)
    return None if label is None else result.summary.difference(label, metric)


def _relative(result: ScenarioResult, found: Difference) -> str:
    """The mean difference in percent of the reference's mean; absolute where that is 0."""
    mean = result.summary.estimate(found.reference, found.metric).mean
    assert found.mean is not None
    if not mean:
        return signed(found.mean)
    return f"{signed(100 * found.mean / abs(mean))} %"
