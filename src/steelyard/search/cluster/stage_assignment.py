"""The blocks of one layout of a deep model put into its stages, within what a rank may hold.

Not for which layout: see search.py. Not for the divisions themselves: see policy_mixture.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.ir.rule import CallSite
from steelyard.predict.analytic.sections import Section
from steelyard.predict.analytic.step import LayoutCost, StageBlocks
from steelyard.search.cluster.policy_mixture import (
    BlockKind,
    Mix,
    bettered,
    fastest_slowest,
    least_in_all,
    least_seconds,
    mixed,
)

_NEVER = float("inf")
# Calls of a block that are computed again, by modules inside it.
RecomputeSet = tuple[CallSite, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPolicy:
    """What becomes of what a block makes: calls that are computed again, and whether all else that
    the backward pass reads waits in the memory of the host."""

    again: RecomputeSet = ()
    moved: bool = False


KEPT = ActivationPolicy()


class StageAssignment:
    """The blocks of one layout, of some kinds, put into stages that hold what is allowed."""

    def __init__(
        self,
        laid: Sequence[LayoutCost],
        limits_bytes: Sequence[float],
        num_blocks: int,
        kinds_on: Callable[[LayoutCost], Sequence[tuple[ActivationPolicy, Section]]],
        hosts_bytes: Sequence[int],
    ) -> None:
        """Of each stage, what says what it takes where it lies, and what it may hold there, and in
        the memory of the host behind it."""
        self._laid, self._limits_bytes, self._num_blocks = laid, limits_bytes, num_blocks
        self._hosts_bytes = hosts_bytes
        self._layout = laid[0].layout
        self._sections = {on: _worth_having(on, kinds_on(on)) for on in dict.fromkeys(laid)}
        self._seconds = {
            on: [on.in_turn(section) for _, section in kinds]
            for on, kinds in self._sections.items()
        }
        self._like = self._first_alike()
        self._fitted: dict[tuple[int, int], float] = {}
        self._least: dict[tuple[int, int], float] = {}

    def _first_alike(self) -> list[int]:
        """Of each stage the first that takes and may hold the same with as many blocks."""
        first: dict[tuple[LayoutCost, bool, bool, float, float], int] = {}
        found, last = [], len(self._laid) - 1
        for stage, (on, limit) in enumerate(zip(self._laid, self._limits_bytes, strict=True)):
            # How often what is kept is there counts for nothing where anything may be.
            alive = on.alive(stage) if limit < _NEVER else 0.0
            key = on, stage == 0, stage == last, alive, limit
            found.append(first.setdefault(key, stage))
        return found

    def fit(self, limits_bytes: Sequence[int]) -> bool:
        """Whether these stages hold no more than so much, less than they may."""
        stages = self.stages()
        if stages is None:
            return False  # the hosts are too small
        held = [StageBlocks(blocks=tuple((s, n) for (_, s), n in stage if n)) for stage in stages]
        numbered = enumerate(zip(self._laid, held, limits_bytes, strict=True))
        return all(on.memory(n, stage).nbytes <= most for n, (on, stage, most) in numbered)

    def stages(self) -> list[list[tuple[tuple[ActivationPolicy, Section], int]]] | None:
        counts = self._best_counts()
        if counts is None:
            return None
        found = []
        for stage, count in enumerate(counts):
            mix = self._mixed(stage, count)
            assert mix is not None, "what was counted fits"
            found.append(list(zip(self._sections[self._laid[stage]], mix.counts, strict=True)))
        return found

    def least_seconds(self) -> float:
        """Of all micro-batches, whatever whole numbers of blocks are of which kind."""
        through = self._laid[0].through
        if self._fixed:
            return through([self._least_seconds(s, n) for s, n in enumerate(self._fixed)])
        of, stages = self._least_seconds, self._layout.pipeline
        quick = fastest_slowest(self._num_blocks, stages, of)
        lean = least_in_all(self._num_blocks, stages, of)
        assert quick is not None, "what fits in whole numbers fits"
        assert lean is not None, "the same stages fit"
        slowest = max(of(s, n) for s, n in enumerate(quick))
        total = sum(of(s, n) for s, n in enumerate(lean))
        rest = max(0.0, total - slowest) / self._layout.virtual
        return self._layout.micro_batches * slowest + rest

    @property
    def _fixed(self) -> tuple[int, ...]:
        """Equally many each, where there is no choice."""
        stages = self._layout.pipeline
        if self._num_blocks and self._layout.virtual == 1:
            return ()
        return (self._num_blocks // stages,) * stages

    def _best_counts(self) -> tuple[int, ...] | None:
        seconds_of = self._fitted_seconds
        if self._fixed:
            fit = all(seconds_of(s, n) < _NEVER for s, n in enumerate(self._fixed))
            return self._fixed if fit else None
        through, stages = self._laid[0].through, self._layout.pipeline
        quick = fastest_slowest(self._num_blocks, stages, seconds_of)
        lean = least_in_all(self._num_blocks, stages, seconds_of)
        if quick is None or lean is None:
            return None
        start = min(
            (quick, lean),
            key=lambda counts: through([seconds_of(s, n) for s, n in enumerate(counts)]),
        )
        return bettered(start, seconds_of, through)

    def _fitted_seconds(self, stage: int, count: int) -> float:
        stage = self._like[stage]
        if (stage, count) not in self._fitted:
            ends, mix = self._laid[stage].ends_seconds(stage), self._mixed(stage, count)
            self._fitted[stage, count] = _NEVER if mix is None else mix.seconds + ends
        return self._fitted[stage, count]

    def _least_seconds(self, stage: int, count: int) -> float:
        stage = self._like[stage]
        if (stage, count) not in self._least:
            room, ends = self._room_bytes(stage, count), self._laid[stage].ends_seconds(stage)
            self._least[stage, count] = least_seconds(self._kinds(stage), count, room) + ends
        return self._least[stage, count]

    def _mixed(self, stage: int, count: int) -> Mix | None:
        room, offload_room = self._room_bytes(stage, count), self._far_room_bytes(stage, count)
        return mixed(self._kinds(stage), count, room, offload_room)

    def _far_room_bytes(self, stage: int, count: int) -> float:
        """Of the memory of the host, what the optimizer's state leaves."""
        on = self._laid[stage]
        return self._hosts_bytes[stage] - on.far_bytes(
            stage, StageBlocks(blocks=((on.block, count),))
        )

    def _room_bytes(self, stage: int, count: int) -> float:
        model = self._laid[stage].model_memory(stage, count).nbytes
        return self._limits_bytes[stage] - model - self._laid[stage].around_bytes(stage)

    def _kinds(self, stage: int) -> list[BlockKind]:
        on = self._laid[stage]
        alive, ending = on.alive(stage), on.ending_bytes(stage)
        known = zip(self._sections[on], self._seconds[on], strict=True)
        return [
            BlockKind(
                seconds=seconds,
                kept_bytes=alive * section.kept_bytes,
                again_bytes=max(section.again_bytes, ending),
                far_bytes=alive * section.far_bytes,
                num_again=len(fate.again),
            )
            for (fate, section), seconds in known
        ]


def _worth_having(
    on: LayoutCost, kinds: Sequence[tuple[ActivationPolicy, Section]]
) -> list[tuple[ActivationPolicy, Section]]:
    """Without those that take and hold no less of anything than one before them."""
    found: list[tuple[tuple[float, int, int], tuple[ActivationPolicy, Section]]] = []
    for fate, section in kinds:
        own = on.in_turn(section), section.kept_bytes, section.again_bytes
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in found):
            found.append((own, (fate, section)))
    return [kind for _, kind in found]
