"""The variants of the step that a search may explore, for each number of micro-batches.

Not for the levels of one kind of rule: see granularity.py. Not for exploring: see
variant_plans.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from steelyard.errors import Mismatch
from steelyard.ir.rule import Rule, Stage, of_kind
from steelyard.ir.rule_kinds import MicroBatches, SlicedComputation, StateOffload
from steelyard.predict import step_seconds
from steelyard.predict.cost_table import CostTable
from steelyard.search.single.granularity import (
    chunk_levels,
    micro_batch_counts,
    offload_levels,
    slice_counts,
)
from steelyard.search.single.traded_step import TradedStep
from steelyard.search.single.variant import Variant

# The kinds of variants that have levels of their own; all others are tried in full or not at all.
_LEVELLED = (MicroBatches, SlicedComputation, StateOffload)


class VariantLevels:
    """The variants that combine the levels of the offered rules."""

    def __init__(self, step: TradedStep, costs: CostTable, rules: Sequence[Rule]) -> None:
        self._step, self._costs = step, costs
        self.micro_batch_counts = micro_batch_counts(
            [r.micro_batches for r in of_kind(rules, MicroBatches) if r.micro_batches > 1]
        )
        self._chunk_levels = chunk_levels(of_kind(rules, SlicedComputation))
        self._state_rules = of_kind(rules, StateOffload)
        changes = {r for r in rules if r.stage is Stage.VARIANT and not isinstance(r, _LEVELLED)}
        self._applicable: dict[tuple[Rule, ...], bool] = {}
        self._change_levels = self._levels_of_changes(tuple(sorted(changes)))

    @property
    def slices_gradients(self) -> bool:
        """True if a gradient can be offloaded in slices."""
        return any(rule.what == "gradient" and rule.slices for rule in self._state_rules)

    def of(self, parts: int) -> tuple[Variant, ...]:
        """Return the variants with this many micro-batches.

        With small micro-batches, some levels of chunks are the same. Changes are left out of the
        combinations to which their rules do not apply: the calls that they name may be inside a
        sliced region there.
        """
        variants = (
            replace(self._with_chunks(parts, chunks), states=states, changes=changes)
            for changes in self._change_levels
            for states in self._state_levels
            for chunks in self._chunk_levels
        )
        distinct = {variant.rules: variant for variant in variants}.values()
        return tuple(variant for variant in distinct if self._combines(variant))

    def _levels_of_changes(self, changes: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], ...]:
        """Return no change and all changes; those of each trade if they do not apply together."""
        trades = dict.fromkeys(rule.trade for rule in changes)
        if len(trades) > 1 and not self._applies(changes):
            return ((), *(tuple(r for r in changes if r.trade == trade) for trade in trades))
        return tuple(dict.fromkeys(((), changes)))

    def _combines(self, variant: Variant) -> bool:
        """True if changes apply together with all else, and with what the explanation compares.

        The rules of one trade must apply where nothing else does, so this is not checked.
        """
        if not variant.changes or variant == Variant(changes=variant.changes):
            return True
        unoffloaded = variant.unoffloaded
        compared = (variant, unoffloaded, unoffloaded.unsplit)
        return all(self._applies(each.rules) for each in compared)

    def _applies(self, rules: tuple[Rule, ...]) -> bool:
        if rules not in self._applicable:
            try:
                self._step.apply(rules)
                self._applicable[rules] = True
            except Mismatch:
                self._applicable[rules] = False
        return self._applicable[rules]

    def _with_chunks(self, parts: int, chunks: tuple[SlicedComputation, ...]) -> Variant:
        """Return the variant with chunks if its micro-batches can be chunked, otherwise without.

        A micro-batch may have too few rows.
        """
        variant = Variant(split=self._step.split(parts), chunks=chunks)
        return variant if not chunks or self._applies(variant.rules) else variant.unchunked

    @cached_property
    def _state_levels(self) -> tuple[tuple[StateOffload, ...], ...]:
        """The levels of offloaded parameters, gradients and optimizer state to explore."""
        counts = slice_counts(self._state_rules)
        sliced = {rule: degrees for rule, degrees in counts.items() if degrees[-1]}
        chosen = self._fastest_slice_counts(sliced)
        rules = [replace(rule, slices=chosen.get(rule, 0)) for rule in counts]
        max_counts = max((len(degrees) for degrees in sliced.values()), default=0)
        finer = [
            {rule: _finer_count(degrees, chosen[rule], step) for rule, degrees in sliced.items()}
            for step in range(1, max_counts)
        ]
        return offload_levels(self._step.program, rules, finer)

    def _fastest_slice_counts(
        self, counts: Mapping[StateOffload, Sequence[int]]
    ) -> dict[StateOffload, int]:
        """Return, for each parameter, the number of slices that hides most of its transfers.

        The parameters are tried in turn, each with the current choices for the others.
        """
        chosen = {rule: degrees[-1] for rule, degrees in counts.items() if len(degrees) > 1}
        for rule in chosen:
            seconds_of = {}
            for degree in counts[rule]:
                chosen[rule] = degree
                program = self._step.apply([replace(r, slices=n) for r, n in chosen.items()])
                seconds_of[degree] = step_seconds(program, self._costs).value
            chosen[rule] = min(seconds_of, key=seconds_of.__getitem__)
        return {rule: chosen.get(rule, degrees[-1]) for rule, degrees in counts.items()}


def _finer_count(degrees: Sequence[int], degree: int, step: int) -> int:
    """Return the number of slices ``step`` positions finer, or the finest."""
    return degrees[min(degrees.index(degree) + step, len(degrees) - 1)]
