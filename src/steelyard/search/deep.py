"""How a deep model's step lies on a declared cluster: tensor, pipeline and data degrees, states,
micro-batches and what is computed again, chosen together.

Every layout there is has a time that it cannot go below; they are looked into from the least of
these on, until what was found is no slower than what is left. Not for pricing one: see
predict/deep.py. Not for clusters that are here: see layouts.py.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from steelyard.core.budget import Budget
from steelyard.core.cluster import Cluster
from steelyard.core.costs import Costs
from steelyard.core.deep_layout import Blocks, DeepLayout, Formats
from steelyard.core.graph import Graph
from steelyard.core.plan import Prediction
from steelyard.core.sampled import Sampled
from steelyard.core.scope import Scope
from steelyard.core.stack import stack_on
from steelyard.predict.deep import DeepLaid, DeepStep, Stage, tensor_costs
from steelyard.predict.deep_priced import priced
from steelyard.predict.sections import Sections, sections
from steelyard.search.deep_stages import Again, Stages

_NEVER = float("inf")
# More runs of blocks on a rank, or samples in a micro-batch, are not looked into; nor tensors in
# more parts.
_MOST_VIRTUAL, _MOST_SAMPLES, _MOST_PARTS = 8, 64, 16


class DeepSource(Protocol):
    """A step at any micro-batch, and that of one of the ranks that share its tensors."""

    @property
    def num_samples(self) -> int: ...
    @property
    def why_together(self) -> str: ...
    @property
    def blocks(self) -> Blocks: ...
    @property
    def formats(self) -> Formats: ...
    def in_parts(self, tensor: int) -> Sampled: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithSamples:
    """A source with a batch of another size."""

    source: DeepSource
    num_samples: int

    @property
    def why_together(self) -> str:
        return self.source.why_together

    @property
    def blocks(self) -> Blocks:
        return self.source.blocks

    @property
    def formats(self) -> Formats:
        return self.source.formats

    def in_parts(self, tensor: int) -> Sampled:
        return self.source.in_parts(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """One layout with its stages: of each, the sets that are computed again, and in how many of its
    blocks. ``least_seconds`` is what no plan in this layout goes below."""

    layout: DeepLayout
    micro_batch: int
    stages: tuple[tuple[tuple[Again, int], ...], ...]
    step: DeepStep
    least_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    layout: DeepLayout
    micro_batch: int
    least_seconds: float


Fits = Callable[[DeepLayout], bool]


def _any(layout: DeepLayout) -> bool:  # noqa: ARG001 - all are welcome
    return True


class DeepSearch:
    """``again_of`` gives the sets of calls that are worth computing again, of a rank's graph."""

    def __init__(
        self,
        source: DeepSource,
        cluster: Cluster,
        *,
        again_of: Callable[[Sampled, Costs], Sequence[Again]],
    ) -> None:
        self._source, self._cluster, self._again_of = source, cluster, again_of
        self._stack = stack_on(cluster.device)
        self._sections: dict[tuple[int, int, Again], Sections] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._costs: dict[int, Costs] = {}
        self._sets: dict[int, tuple[Again, ...]] = {}
        self._ways: dict[int, list[_Way]] = {}
        self._laid: dict[tuple[DeepLayout, int, int], Laid | None] = {}

    def with_samples(self, samples: int) -> "DeepSearch":
        """The same step on another global batch; what is known of parts of it is shared."""
        other = DeepSearch(
            _WithSamples(source=self._source, num_samples=samples),
            self._cluster,
            again_of=self._again_of,
        )
        other._sections, other._graphs = self._sections, self._graphs
        other._costs, other._sets = self._costs, self._sets
        return other

    def limit_bytes(self, budget: Budget) -> int:
        """No rank may hold more than its device has, whatever the budget says."""
        has = self._cluster.device.memory_bytes
        return has if budget.memory_bytes is None else min(has, budget.memory_bytes)

    def fastest(self, num_ranks: int, limit_bytes: int, *, fits: Fits = _any) -> Laid | None:
        """None where no layout of so many ranks fits."""
        best: Laid | None = None
        for way in self.ways(num_ranks):
            if best is not None and way.least_seconds >= best.step.step_seconds:
                break
            if fits(way.layout):
                laid = self.laid(way, limit_bytes)
                if laid is not None and (
                    best is None or laid.step.step_seconds < best.step.step_seconds
                ):
                    best = laid
        return best

    def least_seconds(self, num_ranks: int, limit_bytes: int, best: Laid) -> float:
        """No plan on so many ranks is faster, of all that could be offered here."""
        least = best.least_seconds
        for way in self.ways(num_ranks):
            if way.least_seconds >= least:
                break
            laid = self.laid(way, limit_bytes)
            if laid is not None:
                least = min(least, laid.least_seconds)
        return least

    def leanest_bytes(self, num_ranks: int, *, fits: Fits = _any) -> int | None:
        """The least that any layout of so many ranks holds on its fullest rank."""
        ways = [way for way in self.ways(num_ranks) if fits(way.layout)]
        held = (self._least_bytes(way) for way in ways)
        return min(held, default=None)

    def ways(self, num_ranks: int) -> list[_Way]:
        """All layouts of so many ranks, what is fastest with all kept first."""
        if num_ranks not in self._ways:
            found = [
                _Way(
                    layout=layout,
                    micro_batch=samples,
                    least_seconds=self._least_with_all_kept(layout, samples),
                )
                for layout, samples in self._layouts(num_ranks)
            ]
            self._ways[num_ranks] = sorted(found, key=lambda way: way.least_seconds)
        return self._ways[num_ranks]

    def laid(self, way: _Way, limit_bytes: int) -> Laid | None:
        """The fastest that fits of this layout, with as little computed again as can be."""
        key = way.layout, way.micro_batch, limit_bytes
        if key not in self._laid:
            self._laid[key] = self._fitted(way, limit_bytes)
        return self._laid[key]

    def prediction(self, laid: Laid) -> Prediction:
        """All that is said of a layout with its stages."""
        stages = [
            Stage(
                blocks=tuple(
                    (self._parts(laid.layout, laid.micro_batch, again).block, count)
                    for again, count in stage
                )
            )
            for stage in laid.stages
        ]
        return priced(self._laid_out(laid), stages)

    def on_one(self) -> Prediction:
        """The whole batch on one device, whether it has the memory or not."""
        alone = DeepLayout()
        parts = self._parts(alone, self._source.num_samples, ())
        laid = DeepLaid(parts, self._cluster, alone, self._source.formats, self._stack)
        return priced(laid, [Stage(blocks=((parts.block, self.num_blocks),))])

    def fewest_ranks(self, limit_bytes: int) -> int:
        """No fewer hold the model with its gradients and states, however it lies."""
        parts = self._parts(DeepLayout(), self._source.num_samples, ())
        laid = DeepLaid(parts, self._cluster, DeepLayout(), self._source.formats, self._stack)
        return max(1, -(-laid.model_memory(0, self.num_blocks).nbytes // limit_bytes))

    def with_all_kept(self, laid: Laid) -> Prediction:
        """The same with nothing computed again, on stages of about equally many blocks."""
        stages = laid.layout.pipeline
        less, more = divmod(self.num_blocks, stages)
        counts = [less + (stage < more) for stage in range(stages)]
        return self.prediction(replace(laid, stages=tuple((((), count),) for count in counts)))

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def num_blocks(self) -> int:
        return self._source.blocks.count

    @property
    def why_together(self) -> str:
        return self._source.why_together

    def tensor_degrees(self) -> list[int]:
        """Neighbours: those of one innermost scope, which are joined best."""
        size = _innermost(self._cluster.tree)
        return [n for n in range(1, min(size, _MOST_PARTS) + 1) if size % n == 0]

    def _layouts(self, num_ranks: int) -> Iterator[tuple[DeepLayout, int]]:
        blocks, samples = self.num_blocks, self._source.num_samples
        is_whole = bool(self.why_together)
        for tensor in self.tensor_degrees():
            for pipeline in _divisors(num_ranks // tensor) if num_ranks % tensor == 0 else ():
                data = num_ranks // tensor // pipeline
                if pipeline > max(1, blocks) or samples % data or (is_whole and data > 1):
                    continue
                each = samples // data
                for micro_batch in [each] if is_whole else _micro_batches(each):
                    first = DeepLayout(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        micro_batches=each // micro_batch,
                    )
                    for layout in self._variants(first):
                        yield layout, micro_batch

    def _variants(self, layout: DeepLayout) -> Iterator[DeepLayout]:
        """With states held whole or in shares, in one run of blocks on each rank or in several."""
        # Gradients in shares are exchanged for each micro-batch; where there are several, that is
        # reckoned with weights in shares alone.
        stages = (
            (0,) if layout.data == 1 else (0, 1, 2, 3) if layout.micro_batches == 1 else (0, 1, 3)
        )
        for state_stage in stages:
            for virtual in self._virtual(layout):
                yield replace(
                    layout,
                    virtual=virtual,
                    state_stage=state_stage,
                    overlaps=layout.data > 1 and state_stage < 3,
                )

    def _virtual(self, layout: DeepLayout) -> Iterator[int]:
        yield 1
        runs, rest = divmod(self.num_blocks, layout.pipeline)
        if layout.pipeline > 1 and not rest and layout.micro_batches % layout.pipeline == 0:
            yield from (v for v in range(2, _MOST_VIRTUAL + 1) if runs % v == 0)

    # --- what one layout takes

    def _least_with_all_kept(self, layout: DeepLayout, samples: int) -> float:
        """The slowest stage takes an equal share of all at least, and its share of blocks."""
        parts = self._parts(layout, samples, ())
        laid = DeepLaid(parts, self._cluster, layout, self._source.formats, self._stack)
        blocks, stages = self.num_blocks, layout.pipeline
        each = laid.in_turn(parts.block) if blocks else 0.0
        ends = [laid.ends_seconds(s) for s in _told_apart(stages)]
        around = sum(ends) + (stages - len(ends)) * laid.ends_seconds(_inner(stages))
        most = -(-blocks // stages)
        slowest = max((blocks * each + around) / stages, most * each + min(ends))
        total = blocks * each + around
        belt = layout.micro_batches * slowest + (total - slowest) / layout.virtual
        return belt + self._least_after(laid, parts, blocks)

    def _least_after(self, laid: DeepLaid, parts: Sections, blocks: int) -> float:
        """Some stage holds an equal share of the blocks, and exchanges and updates that."""
        layout = laid.layout
        inner, share = _inner(layout.pipeline), -(-blocks // layout.pipeline)
        most = blocks - layout.pipeline + 1
        exposed = min(
            laid.exposed_seconds(inner, Stage(blocks=((parts.block, n),))) for n in (share, most)
        )
        return exposed + laid.update_seconds(inner, share)

    def _fitted(self, way: _Way, limit_bytes: int) -> Laid | None:
        layout, samples = way.layout, way.micro_batch
        if self._least_bytes(way) > limit_bytes:
            return None
        plain = self._parts(layout, samples, ())
        laid = DeepLaid(plain, self._cluster, layout, self._source.formats, self._stack)
        work = Stages(laid, layout, sys.maxsize, self.num_blocks, ((), plain.block))
        if not work.fits(limit_bytes):
            sets = self._sets_of(layout.tensor)[1:]
            kinds = [(again, self._parts(layout, samples, again).block) for again in sets]
            work = Stages(laid, layout, limit_bytes, self.num_blocks, ((), plain.block), *kinds)
        stages = work.stages()
        if stages is None:
            return None
        held = [tuple((s, n) for (_, s), n in stage if n) for stage in stages]
        step = laid.step([Stage(blocks=blocks) for blocks in held])
        if step.peak_bytes > limit_bytes:
            return None
        after = self._least_after(laid, plain, self.num_blocks)
        return Laid(
            layout=layout,
            micro_batch=samples,
            stages=tuple(tuple((again, n) for (again, _), n in stage if n) for stage in stages),
            step=step,
            least_seconds=min(work.least_seconds() + after, step.step_seconds),
        )

    def _least_bytes(self, way: _Way) -> int:
        """Of either end, with as few blocks as it may hold and nothing kept of them; and of the
        stage that holds most of these."""
        laid, layout = self._laid_out(way), way.layout
        most = -(-self.num_blocks // layout.pipeline)
        fewest = most if layout.virtual > 1 else min(1, most) if layout.pipeline > 1 else most
        inner = laid.model_memory(_inner(layout.pipeline), most).nbytes
        ends = (
            laid.model_memory(s, fewest).nbytes + laid.around_bytes(s) + laid.ending_bytes(s)
            for s in _told_apart(layout.pipeline)
        )
        return max(*ends, inner if layout.pipeline > 2 else 0)

    def _laid_out(self, way: "_Way | Laid") -> DeepLaid:
        parts = self._parts(way.layout, way.micro_batch, ())
        return DeepLaid(parts, self._cluster, way.layout, self._source.formats, self._stack)

    def _parts(self, layout: DeepLayout, samples: int, again: Again) -> Sections:
        key = layout.tensor, samples, again
        if key not in self._sections:
            graph = self._graph(layout.tensor, samples)
            blocks = self._source.blocks
            alone = DeepLayout(tensor=layout.tensor, again=again)
            costs = self.costs_of(layout.tensor)
            self._sections[key] = sections(
                graph, costs, alone, blocks=blocks.path, first=blocks.first, stack=self._stack
            )
        return self._sections[key]

    def _graph(self, tensor: int, samples: int) -> Graph:
        if (tensor, samples) not in self._graphs:
            self._graphs[tensor, samples] = self._source.in_parts(tensor).at(samples)
        return self._graphs[tensor, samples]

    def costs_of(self, tensor: int) -> Costs:
        if tensor not in self._costs:
            self._costs[tensor] = tensor_costs(self._cluster, DeepLayout(tensor=tensor))
        return self._costs[tensor]

    def _sets_of(self, tensor: int) -> tuple[Again, ...]:
        if tensor not in self._sets:
            sampled = self._source.in_parts(tensor)
            self._sets[tensor] = tuple(self._again_of(sampled, self.costs_of(tensor)))
        return self._sets[tensor]


def _told_apart(stages: int) -> tuple[int, ...]:
    return (0,) if stages == 1 else (0, stages - 1)


def _inner(stages: int) -> int:
    """A stage that holds neither end, where there is one."""
    return 1 if stages > 2 else 0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _micro_batches(samples: int) -> list[int]:
    return [n for n in _divisors(samples) if n <= _MOST_SAMPLES] or [samples]


def _innermost(scope: Scope) -> int:
    """How many devices the smallest scope of the first class has."""
    member = scope.members[0]
    return _innermost(member.of) if isinstance(member.of, Scope) else member.count
