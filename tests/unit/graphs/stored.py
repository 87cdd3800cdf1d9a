"""Captured training steps from files: sources for tests that capture nothing and do not import
torch. Not for making them: ``python -m tests.unit.graphs.record`` captures all of record.py
again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from steelyard.capture.pipeline_stages import cut_into_stages, end_of, refuse_unknown_draws
from steelyard.ir.batch_template import BatchTemplate
from steelyard.ir.collective import GLOO, Transport
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import Blocks, Formats
from steelyard.ir.optimizer_update import WEIGHT, update_of
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.pipeline_schedule import Order, actions_of
from steelyard.ir.placement import Partial, Replicate, Shard
from steelyard.ir.program import Instruction, Pipeline, Program
from steelyard.ir.rule import Rule
from steelyard.ir.sharding_choice import Region, ShardingChoice
from steelyard.measure.links.json_graph import KINDS, from_json, to_json
from steelyard.plans.trade import apply_rules
from steelyard.trades import TRADES

_FOLDER = Path(__file__).parent
_REMEDY = "add it to tests/unit/graphs/record.py, and run python -m tests.unit.graphs.record"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """The graph of ``share`` of ``micro_batches`` equal parts of the batch."""

    micro_batches: int
    share: int
    graph: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUpdate:
    """An optimizer step; ``unsliceable`` is as in a program, a reason for each parameter."""

    graph: Graph
    instructions: tuple[Instruction, ...]
    undivided: str
    unshardable: str
    unsliceable: tuple[tuple[str, str], ...]

    @property
    def program(self) -> Program:
        return Program(
            graph=self.graph, instructions=self.instructions, undivided=self.undivided,
            unshardable=self.unshardable, unsliceable=dict(self.unsliceable),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """A rank's graph of the whole batch, with all ``regions`` sharded over ``num_ranks``."""

    num_ranks: int
    rank: int
    regions: tuple[Region, ...]
    graph: Graph


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredStep:
    """A captured step as a StepSource, for the parts of the batch that were recorded."""

    parts: tuple[StoredPart, ...]
    update: StoredUpdate | None
    counts: tuple[int, ...]
    equal_counts: tuple[int, ...]
    reason_not_split: str
    reason_not_shared: str
    settings: tuple[str, ...]
    shards: tuple[StoredShard, ...] = ()

    @cached_property
    def plain(self) -> Program:
        update = None if self.update is None else self.update.program
        return Program.plain(self.graph(micro_batches=1), update=update)

    def apply_rules(self, rules: Iterable[Rule]) -> Program:
        return apply_rules(self.plain, tuple(rules), trades=TRADES, source=self)

    @property
    def transport(self) -> Transport:
        return GLOO

    def graph(self, *, micro_batches: int, share: int = 1) -> Graph:
        for part in self.parts:
            if part.micro_batches * share == micro_batches * part.share:
                return part.graph
        raise AssertionError(f"{share} of {micro_batches} parts are not stored: {_REMEDY}")

    def rewritten(self, graph: Graph) -> Graph:
        return graph

    def regions(self, graph: Graph, *, num_ranks: int) -> tuple[Region, ...]:
        return self._shard(graph, num_ranks, 0).regions

    def in_parts(self, graph: Graph, choice: ShardingChoice, *, rank: int) -> Graph:
        stored = self._shard(graph, choice.num_ranks, rank)
        inputs = {pair for region in stored.regions for pair in region.inputs}
        assert set(choice.inputs) == inputs, f"another choice is not stored: {_REMEDY}"
        return stored.graph

    def _shard(self, graph: Graph, num_ranks: int, rank: int) -> StoredShard:
        is_whole = graph == self.graph(micro_batches=1)
        for stored in self.shards:
            if is_whole and (stored.num_ranks, stored.rank) == (num_ranks, rank):
                return stored
        raise AssertionError(f"a shard on {num_ranks} ranks is not stored: {_REMEDY}")

    def update_in_parts(self, update: Program, partings: tuple[ShardingChoice, ...]) -> Program:
        raise AssertionError(f"no updates of shards are stored: {_REMEDY}")

    def in_stages(
        self, program: Program, *, ends: tuple[str, ...], schedule: str, num_ranks: int
    ) -> Pipeline:
        graph = program.as_graph()
        refuse_unknown_draws(graph)
        ordered = sorted((end_of(graph, module) for module in ends), key=graph.position.__getitem__)
        stages = cut_into_stages(graph, ordered)
        order = stored_order(
            schedule,
            num_ranks=num_ranks,
            num_stages=len(stages.stages),
            micro_batches=program.repeats,
        )
        pipeline = Pipeline(schedule=schedule, stages=stages, order=order)
        if program.update is None:
            return pipeline
        updates = []
        for rank in range(num_ranks):
            trained = {name.removeprefix(WEIGHT) for name in pipeline.held(rank)}
            update = update_of(program.update, trained)
            assert update is not None, "an update of all parameters at once has no stages here"
            updates.append(update)
        return replace(pipeline, updates=tuple(updates))

    def divisors(self) -> tuple[int, ...]:
        return self.counts

    def why_not_split(self) -> str | None:
        return self.reason_not_split or None

    def is_no_faster(self, *, micro_batches: int, than: int = 1, share: int = 1) -> bool:
        return False

    @property
    def split_doubt(self) -> float:
        return 0.0

    def is_split_calibrated(self, *, micro_batches: int, share: int = 1) -> bool:
        del micro_batches, share
        return True

    def calibrate_split(self, *, micro_batches: int, share: int = 1) -> None:
        pass

    def sharers(self) -> tuple[int, ...]:
        return self.equal_counts

    def why_not_shared(self) -> str | None:
        return self.reason_not_shared or None

    def leaner_settings(self) -> tuple[str, ...]:
        return self.settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTemplate:
    """The step on one of ``tensor`` ranks, for any number of samples."""

    tensor: int
    template: BatchTemplate
    regions: tuple[Region, ...]
    is_sequence_parallel: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTemplates:
    """A deep model truncated to three blocks, as a TemplateSource."""

    num_samples: int
    why_indivisible: str
    blocks: Blocks
    formats: Formats
    templates: tuple[StoredTemplate, ...]

    @property
    def whole(self) -> BatchTemplate:
        return self.in_parts(1)

    def in_parts(self, tensor: int) -> BatchTemplate:
        return self._stored(tensor).template

    def regions(self, tensor: int) -> tuple[Region, ...]:
        return self._stored(tensor).regions

    def is_sequence_parallel(self, tensor: int) -> bool:
        return self._stored(tensor).is_sequence_parallel

    def _stored(self, tensor: int) -> StoredTemplate:
        for stored in self.templates:
            if stored.tensor == tensor:
                return stored
        raise AssertionError(f"shards on {tensor} ranks are not stored: {_REMEDY}")


Stored = StoredStep | StoredTemplates | Graph
_KINDS: Mapping[str, type[Any]] = {
    **KINDS,
    **{
        kind.__name__: kind
        for kind in (
            BatchTemplate, Blocks, Formats, Instruction, Partial, Region, Replicate, Shard,
            StoredPart, StoredShard, StoredStep, StoredTemplate, StoredTemplates, StoredUpdate,
        )
    },
}  # fmt: skip


def encoded(stored: Stored) -> str:
    return to_json(stored, kinds=_KINDS)


def names() -> tuple[str, ...]:
    """The names of all stored steps, templates and graphs."""
    return tuple(sorted(path.name.removesuffix(".json.gz") for path in _FOLDER.glob("*.json.gz")))


def write(name: str, text: str) -> None:
    """Write a file whose bytes depend on the text alone."""
    data = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    (_FOLDER / f"{name}.json.gz").write_bytes(data)


def read(name: str) -> str:
    return gzip.decompress((_FOLDER / f"{name}.json.gz").read_bytes()).decode()


@cache
def stored(name: str) -> Any:
    """Return the step, the templates or the graph of that name."""
    return from_json(read(name), kinds=_KINDS)


def stored_graph(name: str) -> Graph:
    found = stored(name)
    assert isinstance(found, Graph)
    return found


def stored_step(name: str) -> StoredStep:
    found = stored(name)
    assert isinstance(found, StoredStep)
    return found


def stored_templates(name: str) -> StoredTemplates:
    found = stored(name)
    assert isinstance(found, StoredTemplates)
    return found


# --- the tables of torch's schedules --------------------------------------------------------------

_SCHEDULES = _FOLDER / "schedules.json"


def schedule_key(schedule: str, *, num_ranks: int, num_stages: int, micro_batches: int) -> str:
    return f"{schedule} {num_ranks} ranks {num_stages} stages {micro_batches} micro-batches"


def write_orders(orders: Mapping[str, Order]) -> None:
    tables = {
        key: {
            "holds_sends": order.holds_sends,
            "ranks": [" ".join(map(str, actions)) for actions in order.ranks],
        }
        for key, order in orders.items()
    }
    _SCHEDULES.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


@cache
def stored_orders() -> Mapping[str, Order]:
    tables = json.loads(_SCHEDULES.read_text(encoding="utf-8"))
    return {
        key: Order(
            ranks=tuple(actions_of(row.split()) for row in table["ranks"]),
            holds_sends=table["holds_sends"],
        )
        for key, table in tables.items()
    }


def stored_order(schedule: str, *, num_ranks: int, num_stages: int, micro_batches: int) -> Order:
    key = schedule_key(
        schedule, num_ranks=num_ranks, num_stages=num_stages, micro_batches=micro_batches
    )
    assert key in stored_orders(), f"the schedule {key} is not stored: {_REMEDY}"
    return stored_orders()[key]


def order_of(layout: ParallelLayout) -> Order:
    """The action table of a cluster layout, as comm/pipeline_schedules.py gives it."""
    return stored_order(
        layout.schedule,
        num_ranks=layout.pipeline,
        num_stages=layout.pipeline * layout.virtual,
        micro_batches=layout.micro_batches,
    )
