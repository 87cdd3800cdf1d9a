"""The blocks of one layout of a deep model put into its stages, within what a rank may hold.

Not for which layout: see deep.py. Not for the divisions themselves: see mixing.py.
"""

from steelyard.core.deep_layout import DeepLayout
from steelyard.core.rules import Spot
from steelyard.predict.deep import DeepLaid, Stage
from steelyard.predict.sections import Section
from steelyard.search.mixing import (
    Kind,
    bettered,
    fastest_slowest,
    least_in_all,
    least_seconds,
    mixed,
)

_NEVER = float("inf")
# Calls of a block that are computed again, by modules inside it.
Again = tuple[Spot, ...]


class Stages:
    """The blocks of one layout, of some kinds, put into stages that hold what is allowed."""

    def __init__(
        self,
        laid: DeepLaid,
        layout: DeepLayout,
        limit_bytes: int,
        num_blocks: int,
        *kinds: tuple[Again, Section],
    ) -> None:
        self._laid, self._layout, self._limit_bytes = laid, layout, limit_bytes
        self._num_blocks, self._sections = num_blocks, kinds
        self._seconds = [laid.in_turn(section) for _, section in kinds]
        self._fitted: dict[tuple[int, int], float] = {}
        self._least: dict[tuple[int, int], float] = {}

    def fits(self, limit_bytes: int) -> bool:
        """Whether these stages hold no more than so much, less than they may."""
        stages = self.stages()
        assert stages is not None, "anything may be held"
        held = [Stage(blocks=tuple((s, n) for (_, s), n in stage if n)) for stage in stages]
        return self._laid.step(held).peak_bytes <= limit_bytes

    def stages(self) -> list[list[tuple[tuple[Again, Section], int]]] | None:
        counts = self._best_counts()
        if counts is None:
            return None
        found = []
        for stage, count in enumerate(counts):
            mix = mixed(self._kinds(stage), count, self._room_bytes(stage, count))
            assert mix is not None, "what was counted fits"
            found.append(list(zip(self._sections, mix.counts, strict=True)))
        return found

    def least_seconds(self) -> float:
        """Of all micro-batches, whatever whole numbers of blocks are of which kind."""
        through = self._laid.through
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
        through, stages = self._laid.through, self._layout.pipeline
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
        if (stage, count) not in self._fitted:
            room, ends = self._room_bytes(stage, count), self._laid.ends_seconds(stage)
            mix = mixed(self._kinds(stage), count, room)
            self._fitted[stage, count] = _NEVER if mix is None else mix.seconds + ends
        return self._fitted[stage, count]

    def _least_seconds(self, stage: int, count: int) -> float:
        if (stage, count) not in self._least:
            room, ends = self._room_bytes(stage, count), self._laid.ends_seconds(stage)
            self._least[stage, count] = least_seconds(self._kinds(stage), count, room) + ends
        return self._least[stage, count]

    def _room_bytes(self, stage: int, count: int) -> float:
        model = self._laid.model_memory(stage, count).nbytes
        return self._limit_bytes - model - self._laid.around_bytes(stage)

    def _kinds(self, stage: int) -> list[Kind]:
        alive, ending = self._laid.alive(stage), self._laid.ending_bytes(stage)
        return [
            Kind(
                seconds=seconds,
                kept_bytes=alive * section.kept_bytes,
                again_bytes=max(section.again_bytes, ending),
            )
            for (_, section), seconds in zip(self._sections, self._seconds, strict=True)
        ]
