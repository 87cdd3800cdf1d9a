"""Assigns blocks and activation policies to the stages of one layout, within its memory.

Not for choosing the layout: see search.py. Not for optimizing the numbers of blocks: see
policy_mixture.py.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap

from steelyard.ir.model_blocks import ActivationPolicy
from steelyard.ir.rule import CallSite
from steelyard.predict.analytic.sections import Section
from steelyard.predict.analytic.step import LayoutCost, StageBlocks
from steelyard.predict.pipeline.duration import (
    Passes,
    least_interleaved_seconds,
    least_pipeline_seconds,
    path_weights,
    pipeline_seconds,
)
from steelyard.search.cluster.policy_mixture import (
    BlockKind,
    Mix,
    fastest_mix,
    improve_counts,
    least_seconds,
    minimize_slowest_stage,
    minimize_total,
)

_NEVER = float("inf")
# The recomputed calls of a block, by module path inside the block.
RecomputeSet = tuple[CallSite, ...]


class StageAssignment:
    """Finds the fastest assignment of blocks and activation policies to stages within memory
    limits.
    """

    def __init__(
        self,
        stage_costs: Sequence[LayoutCost],
        limits_bytes: Sequence[float],
        num_blocks: int,
        kinds_on: Callable[[LayoutCost], Sequence[tuple[ActivationPolicy, Section]]],
        hosts_bytes: Sequence[int],
    ) -> None:
        """Prepare the assignment. The sequences have one entry per stage.

        ``stage_costs`` are the cost models on the stages' devices, ``limits_bytes`` the device
        memory allowed and ``hosts_bytes`` the host memory per device. ``kinds_on`` returns the
        policies to choose from, with their sections.
        """
        self._stage_costs, self._limits_bytes, self._num_blocks = (
            stage_costs,
            limits_bytes,
            num_blocks,
        )
        self._hosts_bytes = hosts_bytes
        self._layout = stage_costs[0].layout
        self._sections = {
            cost: _undominated(cost, kinds_on(cost)) for cost in dict.fromkeys(stage_costs)
        }
        self._kind_passes = {
            cost: [cost.passes(section) for _, section in kinds]
            for cost, kinds in self._sections.items()
        }
        self._representative = self._first_equal_stages()
        self._least: dict[tuple[int, int, Passes], float] = {}
        self._kinds_of: dict[tuple[int, Passes], list[BlockKind]] = {}
        self._passes_of: dict[tuple[int, int], Passes] = {}

    def _first_equal_stages(self) -> list[int]:
        """Return, for each stage, the first stage that has equal costs and limits for equal
        blocks.
        """
        first: dict[tuple[LayoutCost, bool, bool, float, float], int] = {}
        found, last_stage = [], len(self._stage_costs) - 1
        for stage, (cost, limit) in enumerate(
            zip(self._stage_costs, self._limits_bytes, strict=True)
        ):
            # Without a memory limit, the number of micro-batches in flight makes no difference.
            alive = cost.alive(stage) if limit < _NEVER else 0.0
            key = cost, stage == 0, stage == last_stage, alive, limit
            found.append(first.setdefault(key, stage))
        return found

    def fit(self, limits_bytes: Sequence[int]) -> bool:
        """True if each stage peaks within these limits, which may be tighter than its own."""
        stages = self.stages()
        if stages is None:
            return False  # there is not enough host memory
        stage_blocks = [
            StageBlocks(blocks=tuple((s, n) for (_, s), n in stage if n)) for stage in stages
        ]
        numbered = enumerate(zip(self._stage_costs, stage_blocks, limits_bytes, strict=True))
        return all(cost.memory(n, stage).nbytes <= most for n, (cost, stage, most) in numbered)

    def stages(self) -> list[list[tuple[tuple[ActivationPolicy, Section], int]]] | None:
        counts = self._best_counts()
        if counts is None:
            return None
        found = []
        for stage, count in enumerate(counts):
            mix = self._best_mix(stage, count)
            assert mix is not None, "an assignment of this cost fits"
            found.append(
                list(zip(self._sections[self._stage_costs[stage]], mix.counts, strict=True))
            )
        return found

    def least_seconds(self) -> float:
        """Return a lower bound on the pipeline seconds of the step, over all assignments."""
        of, stages = self._least_seconds, self._layout.pipeline
        if self._fixed:
            return self._least_fixed_seconds()
        fast = minimize_slowest_stage(self._num_blocks, stages, of)
        lean = minimize_total(self._num_blocks, stages, of)
        assert fast is not None, "a feasible assignment is found"
        assert lean is not None, "the same stages fit"
        slowest = max(of(s, n) for s, n in enumerate(fast))
        total = sum(of(s, n) for s, n in enumerate(lean))
        least = least_pipeline_seconds(self._layout, slowest=slowest, total=total)
        is_short = 1 < self._layout.micro_batches <= stages
        return max(least, self._least_path_seconds()) if is_short else least

    def _least_path_seconds(self) -> float:
        """Return a lower bound on the weighted sum of passes that no pipeline goes below."""
        cost = self._stage_costs[0]
        share = cost.passes(cost.block)[1] / cost.in_turn(cost.block)
        weights = path_weights(self._layout, backward_share=share)

        def of(stage: int, count: int) -> float:
            return self._least_seconds(stage, count, weights[stage])

        lean = minimize_total(self._num_blocks, self._layout.pipeline, of)
        assert lean is not None, "the same stages fit"
        return sum(of(s, n) for s, n in enumerate(lean))

    def _least_fixed_seconds(self) -> float:
        seconds = [self._least_seconds(s, n) for s, n in enumerate(self._fixed)]
        if self._layout.virtual == 1:
            return least_pipeline_seconds(self._layout, slowest=max(seconds), total=sum(seconds))
        first_runs = sum(
            n / self._layout.virtual * min(map(sum, self._kind_passes[self._stage_costs[s]]))
            for s, n in enumerate(self._fixed[:-1])
        )
        return least_interleaved_seconds(
            self._layout, slowest=max(seconds), last=seconds[-1], first_runs=first_runs
        )

    @property
    def _fixed(self) -> tuple[int, ...]:
        """The blocks of each stage if all stages must have the same number; otherwise ()."""
        stages = self._layout.pipeline
        if self._num_blocks and self._layout.virtual == 1:
            return ()
        return (self._num_blocks // stages,) * stages

    def _best_counts(self) -> tuple[int, ...] | None:
        seconds_of = self._fitted_seconds
        if self._fixed:
            fit = all(seconds_of(s, n) < _NEVER for s, n in enumerate(self._fixed))
            return self._fixed if fit else None
        stages = self._layout.pipeline
        fast = minimize_slowest_stage(self._num_blocks, stages, seconds_of)
        lean = minimize_total(self._num_blocks, stages, seconds_of)
        if fast is None or lean is None:
            return None
        if stages == 1:
            return fast
        total_of = partial(pipeline_seconds, self._layout)
        start = min(
            (fast, lean), key=lambda counts: total_of([*starmap(self._passes, enumerate(counts))])
        )
        return improve_counts(start, self._passes, total_of)

    def _passes(self, stage: int, count: int) -> Passes:
        """Return the passes of the fastest mix of this many blocks; infinite if they do not fit."""
        stage = self._representative[stage]
        if (stage, count) not in self._passes_of:
            cost, mix = self._stage_costs[stage], self._best_mix(stage, count)
            passes = _NEVER, _NEVER
            if mix is not None:
                kinds = zip(self._sections[cost], mix.counts, strict=True)
                chosen = StageBlocks(blocks=tuple((s, n) for (_, s), n in kinds if n))
                passes = cost.stage_passes(stage, chosen)
            self._passes_of[stage, count] = passes
        return self._passes_of[stage, count]

    def _fitted_seconds(self, stage: int, count: int) -> float:
        return sum(self._passes(stage, count))

    def _least_seconds(self, stage: int, count: int, weights: Passes = (1.0, 1.0)) -> float:
        """Return a lower bound on the weighted passes of the mixes that fit."""
        stage = self._representative[stage]
        key = stage, count, weights
        if key not in self._least:
            kinds, room = self._kinds(stage, weights), self._room_bytes(stage, count)
            ends = self._stage_costs[stage].stage_passes(stage, StageBlocks(blocks=()))
            self._least[key] = least_seconds(kinds, count, room) + _weighted(ends, weights)
        return self._least[key]

    def _best_mix(self, stage: int, count: int) -> Mix | None:
        room, offload_room = self._room_bytes(stage, count), self._offload_room_bytes(stage, count)
        return fastest_mix(self._kinds(stage), count, room, offload_room)

    def _offload_room_bytes(self, stage: int, count: int) -> float:
        """Return the host memory that the optimizer state of the stage leaves free."""
        cost = self._stage_costs[stage]
        return self._hosts_bytes[stage] - cost.offloaded_bytes(
            stage, StageBlocks(blocks=((cost.block, count),))
        )

    def _room_bytes(self, stage: int, count: int) -> float:
        model = self._stage_costs[stage].model_memory(stage, count).nbytes
        return self._limits_bytes[stage] - model - self._stage_costs[stage].around_bytes(stage)

    def _kinds(self, stage: int, weights: Passes = (1.0, 1.0)) -> Sequence[BlockKind]:
        """Return the kinds of blocks on a stage, with the weighted seconds of their passes."""
        if (stage, weights) not in self._kinds_of:
            cost = self._stage_costs[stage]
            alive, ending = cost.alive(stage), cost.ending_bytes(stage)
            known = zip(self._sections[cost], self._kind_passes[cost], strict=True)
            self._kinds_of[stage, weights] = [
                BlockKind(
                    seconds=_weighted(passes, weights),
                    saved_bytes=alive * section.saved_bytes,
                    recompute_bytes=max(section.recompute_bytes, ending),
                    offloaded_bytes=alive * section.offloaded_bytes,
                    num_recomputed_calls=len(policy.recomputed),
                )
                for (policy, section), passes in known
            ]
        return self._kinds_of[stage, weights]


def _weighted(passes: Passes, weights: Passes) -> float:
    return weights[0] * passes[0] + weights[1] * passes[1]


def _undominated(
    cost: LayoutCost, kinds: Sequence[tuple[ActivationPolicy, Section]]
) -> list[tuple[ActivationPolicy, Section]]:
    """Return the policies for which no earlier one is as good or better in both passes and in
    memory.
    """
    found: list[tuple[tuple[float, ...], tuple[ActivationPolicy, Section]]] = []
    for policy, section in kinds:
        costs = *cost.passes(section), section.saved_bytes, section.recompute_bytes
        if not any(
            all(a <= b for a, b in zip(earlier, costs, strict=True)) for earlier, _ in found
        ):
            found.append((costs, (policy, section)))
    return [kind for _, kind in found]
