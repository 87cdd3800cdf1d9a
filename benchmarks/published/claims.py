"""Claims of publications about steps besides their times: which of them is quicker.

Not for errors of time: see scoring.py.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import mean
from typing import Any

from benchmarks.published.megatron import figure_rows
from benchmarks.published.rows import Row, predicted, reaching
from benchmarks.published.sailor import alternatives, ordered_wrongly, regret
from benchmarks.published.scoring import figure, fitted, half


def ordering_figures(plans: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the figures of claims about plans that were all measured."""
    found = fitted(half(plans))
    seconds = {plan: predicted(plan, reaching(plan, *found)).step_seconds for plan in plans}
    groups = list(alternatives(plans))
    pairs = sum(len(group) * (len(group) - 1) // 2 for group in groups)
    wrong = [pair for group in groups for pair in ordered_wrongly(group, seconds)]
    for a, b in wrong:
        print(f"ordered wrongly: {a.name} and {b.name}")
    regrets = [regret(group, seconds) for group in groups]
    yield figure(f"OPT-350M plans ordered wrongly, of {pairs} pairs", len(wrong) / pairs, 0.05)
    yield figure("OPT-350M plans: mean regret", mean(regrets), 0.01)
    yield figure("OPT-350M plans: worst regret", max(regrets), 0.05)


def claim_figures() -> Iterator[dict[str, Any]]:
    """Yield the figures of Narayanan et al., SC 2021, sections 5.3.1 and 5.3.2."""
    rates: dict[str, list[tuple[Row, float]]] = {"11": [], "12": []}
    for name, row in figure_rows():
        seconds = predicted(row, reaching(row, 0.8, row.cluster.device.call_seconds)).step_seconds
        rates[name].append((row, row.model_flops / row.layout.num_ranks / seconds))
    wrong = [*_stages_wrong(rates["11"]), *_interleaving_wrong(rates["12"])]
    print(*(f"not borne out: {claim}" for claim in wrong), sep="\n")
    yield figure("SC21 figures 11 and 12: claims not borne out", len(wrong), 0)


def _stages_wrong(rates: Sequence[tuple[Row, float]]) -> Iterator[str]:
    """Yield the claims that predictions contradict on stages and batch size.

    More stages reduce throughput, and less so with a larger batch.
    """
    by_batch: dict[int, list[float]] = {}
    for row, rate in sorted(rates, key=lambda pair: pair[0].layout.pipeline):
        by_batch.setdefault(row.layout.micro_batches, []).append(rate)
    small, large = (by_batch[batch] for batch in sorted(by_batch))
    if not all(a > b for a, b in pairwise(small)):
        yield "throughput falls with the stages at a batch of 8"
    if not 1 - large[-1] / large[0] < (1 - small[-1] / small[0]) / 3:
        yield "it is nearly flat at a batch of 128"


def _interleaving_wrong(rates: Sequence[tuple[Row, float]]) -> Iterator[str]:
    """Yield the claims that predictions contradict on interleaved stages.

    Virtual stages are faster, and less so with a larger batch.
    """

    def batch(pair: tuple[Row, float]) -> int:
        return pair[0].layout.micro_batches

    gains = []
    for _, pairs in groupby(sorted(rates, key=batch), key=batch):
        plain, virtual = sorted(pairs, key=lambda pair: pair[0].layout.virtual)
        gains.append(virtual[1] / plain[1])
    if min(gains) <= 1:
        yield "interleaved stages are quicker"
    if gains != sorted(gains, reverse=True):
        yield "the gap closes as the batch grows"
