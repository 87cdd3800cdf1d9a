"""What a stage of a pipeline takes and keeps for one micro-batch, from its graphs.

Not for a whole step: see schedule.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from steelyard.core.costs import Costs
from steelyard.core.graph import Graph, OutputKind
from steelyard.core.program import Program
from steelyard.core.schedule import Work
from steelyard.core.stages import Stage
from steelyard.predict.liveness import liveness
from steelyard.predict.schedule import GIVE_GRADIENTS, Common, StageCost

# Of what a stage does in one action.
Seconds = Callable[[Graph], float]
# Of values of these sizes that go from one rank to the next.
Handing = Callable[[Sequence[int]], float]


def parts_of(stage: Stage) -> dict[Work, Graph]:
    return {
        Work.FORWARD: stage.forward,
        Work.BACKWARD: stage.backward,
        Work.BACK_TO_INPUTS: stage.back_to_inputs,
        Work.BACK_TO_WEIGHTS: stage.back_to_weights,
    }


def timed(
    cost: StageCost, stage: Stage, graph: Graph, *, seconds: Seconds, handing: Handing
) -> StageCost:
    """The same stage on another device, or between others."""
    return replace(
        cost,
        seconds={work: seconds(part) for work, part in parts_of(stage).items()},
        send_seconds=handing(_sizes(graph, stage.sends)),
        send_back_seconds=handing(_sizes(graph, stage.sends_back)),
    )


def stage_cost(stage: Stage, graph: Graph, costs: Costs) -> StageCost:
    """``graph`` is the one that was cut. What is handed on takes no time, see ``timed``."""
    parts = parts_of(stage)
    kept, between = _on(graph, stage.kept), _on(graph, stage.kept_between)
    came, back = _on(graph, stage.receives), _on(graph, stage.receives_back)
    # What comes in and does not stay is there while it is read, beside what the part makes.
    beside = {
        Work.FORWARD: _nbytes(graph, came - kept) - _nbytes(graph, kept - came),
        Work.BACKWARD: _nbytes(graph, back),
        Work.BACK_TO_INPUTS: _nbytes(graph, back - between) - _nbytes(graph, between - kept - back),
        Work.BACK_TO_WEIGHTS: 0,
    }
    trained = {o.target for o in stage.backward.outputs if o.kind is OutputKind.GRADIENT}
    sent, sent_back = (_nbytes(graph, _on(graph, n)) for n in (stage.sends, stage.sends_back))
    cost = StageCost(
        seconds={},
        send_bytes=sent,
        send_back_bytes=sent_back,
        send_kept_bytes=_nbytes(graph, _on(graph, _sent_as_is(graph, stage.sends)) & kept),
        send_kept_on_bytes=_nbytes(
            graph, _on(graph, _sent_as_is(graph, stage.sends)) & kept & between
        ),
        send_back_kept_bytes=_nbytes(
            graph, _on(graph, _sent_as_is(graph, stage.sends_back)) & between
        ),
        kept_bytes=_nbytes(graph, kept),
        kept_between_bytes=_nbytes(graph, between),
        kept_on_bytes=_nbytes(graph, kept & between),
        working_bytes={
            work: beside[work] + liveness(Program.plain(part), costs, accumulating=True).peak_bytes
            for work, part in parts.items()
        },
        first_bytes={
            work: beside[work] + liveness(Program.plain(parts[work]), costs).peak_bytes
            for work in GIVE_GRADIENTS
        },
        gradient_bytes=sum(graph.storages[s].nbytes for n in trained for s in graph.storages_of(n)),
    )
    return timed(
        cost, stage, graph, handing=lambda _: 0.0,
        seconds=lambda part: sum(costs.seconds(n).value for n in part.nodes if not n.is_input),
    )  # fmt: skip


def in_common(graph: Graph, before: Stage, stage: Stage) -> tuple[Common, ...]:
    """What both keep of the forward pass."""
    between, between_before = _on(graph, stage.kept_between), _on(graph, before.kept_between)
    return tuple(
        Common(
            nbytes=graph.storages[storage].nbytes,
            for_weights=storage in between,
            for_weights_before=storage in between_before,
        )
        for storage in sorted(_on(graph, stage.kept) & _on(graph, before.kept))
    )


def _on(graph: Graph, names: Iterable[str]) -> set[int]:
    """The storages of these values, without those of the model and the batch."""
    resident = {t.storage for node in graph.inputs() for t in node.outputs}
    return {s for name in names for s in graph.storages_of(name)} - resident


def _sent_as_is(graph: Graph, names: Iterable[str]) -> list[str]:
    """Of the others a copy is sent, which is contiguous."""
    return [n for n in names if all(t.is_contiguous for t in graph.by_name[n].outputs)]


def _nbytes(graph: Graph, storages: Iterable[int]) -> int:
    return sum(graph.storages[s].nbytes for s in storages)


def _sizes(graph: Graph, names: Iterable[str]) -> list[int]:
    return [sum(t.nbytes for t in graph.by_name[n].outputs) for n in names]
