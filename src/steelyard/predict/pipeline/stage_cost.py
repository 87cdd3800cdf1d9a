"""What a stage of a pipeline takes and keeps for one micro-batch, from its graphs.

Not for a whole step: see replay.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from steelyard.ir.graph import Graph, OutputKind
from steelyard.ir.pipeline_schedule import ActionKind
from steelyard.ir.pipeline_stages import PipelineStage
from steelyard.ir.program import Program
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import liveness
from steelyard.predict.pipeline.replay import GIVE_GRADIENTS, StageCost

# Of what a stage does in one action.
Seconds = Callable[[Graph], float]
# Of values of these sizes that go from one rank to the next.
Handing = Callable[[Sequence[int]], float]


def parts_of(stage: PipelineStage) -> dict[ActionKind, Graph]:
    return {
        ActionKind.FORWARD: stage.forward,
        ActionKind.BACKWARD: stage.backward,
        ActionKind.BACK_TO_INPUTS: stage.back_to_inputs,
        ActionKind.BACK_TO_WEIGHTS: stage.back_to_weights,
    }


def timed(
    cost: StageCost, stage: PipelineStage, graph: Graph, *, seconds: Seconds, handing: Handing
) -> StageCost:
    """The same stage on another device, or between others."""
    return replace(
        cost,
        seconds={work: seconds(part) for work, part in parts_of(stage).items()},
        send_seconds=handing(_sizes(graph, stage.sends)),
        send_back_seconds=handing(_sizes(graph, stage.sends_back)),
    )


def stage_cost(stage: PipelineStage, graph: Graph, costs: CostTable) -> StageCost:
    """``graph`` is the one that was cut. What is handed on takes no time, see ``timed``."""
    parts = parts_of(stage)
    trained = {o.target for o in stage.backward.outputs if o.kind is OutputKind.GRADIENT}
    cost = StageCost(
        seconds={},
        receives=_on(graph, stage.receives),
        receives_back=_on(graph, stage.receives_back),
        sends=_sent(graph, stage.sends),
        sends_back=_sent(graph, stage.sends_back),
        kept=_on(graph, stage.kept),
        kept_between=_on(graph, stage.kept_between),
        working_bytes={
            work: liveness(Program.plain(part), costs, accumulating=True).peak_bytes
            for work, part in parts.items()
        },
        first_bytes={
            work: liveness(Program.plain(parts[work]), costs).peak_bytes for work in GIVE_GRADIENTS
        },
        gradient_bytes=sum(graph.storages[s].nbytes for n in trained for s in graph.storages_of(n)),
    )
    return timed(
        cost, stage, graph, handing=lambda _: 0.0,
        seconds=lambda part: sum(costs.seconds(n).value for n in part.nodes if not n.is_input),
    )  # fmt: skip


def _on(graph: Graph, names: Iterable[str]) -> dict[int | str, int]:
    """The storages of these values, without those of the model and the batch."""
    resident = {t.storage for node in graph.inputs() for t in node.outputs}
    storages = {s for name in names for s in graph.storages_of(name)} - resident
    return {s: graph.storages[s].nbytes for s in storages}


def _sent(graph: Graph, names: Iterable[str]) -> dict[int | str, int]:
    """As they are; of what is not contiguous a copy is sent, which is."""
    sent: dict[int | str, int] = {}
    for name in names:
        outputs = graph.by_name[name].outputs
        if all(t.is_contiguous for t in outputs):
            sent |= _on(graph, [name])
        else:
            sent[name] = sum(t.nbytes for t in outputs)
    return sent


def _sizes(graph: Graph, names: Iterable[str]) -> list[int]:
    return [sum(t.nbytes for t in graph.by_name[n].outputs) for n in names]
