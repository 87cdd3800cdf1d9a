"""The seconds and bytes of a pipeline stage for one micro-batch, from its graphs.

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

# The seconds of one action, from its graph.
Seconds = Callable[[Graph], float]
# The seconds to send values of these sizes from one rank to the next.
SendSeconds = Callable[[Sequence[int]], float]


def graphs_by_action(stage: PipelineStage) -> dict[ActionKind, Graph]:
    return {
        ActionKind.FORWARD: stage.forward,
        ActionKind.BACKWARD: stage.backward,
        ActionKind.BACK_TO_INPUTS: stage.back_to_inputs,
        ActionKind.BACK_TO_WEIGHTS: stage.back_to_weights,
    }


def with_seconds(
    cost: StageCost,
    stage: PipelineStage,
    graph: Graph,
    *,
    seconds: Seconds,
    send_seconds_of: SendSeconds,
) -> StageCost:
    """Return the cost of the same stage with other times, for other devices or links."""
    return replace(
        cost,
        seconds={work: seconds(part) for work, part in graphs_by_action(stage).items()},
        send_seconds=send_seconds_of(_sizes(graph, stage.sends)),
        send_back_seconds=send_seconds_of(_sizes(graph, stage.sends_back)),
    )


def stage_cost(stage: PipelineStage, graph: Graph, costs: CostTable) -> StageCost:
    """Return the cost of a stage with this ``graph``, with free sends; see ``with_seconds``."""
    parts = graphs_by_action(stage)
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
    return with_seconds(
        cost, stage, graph, send_seconds_of=lambda _: 0.0,
        seconds=lambda part: sum(costs.seconds(n).value for n in part.nodes if not n.is_input),
    )  # fmt: skip


def _on(graph: Graph, names: Iterable[str]) -> dict[int | str, int]:
    """Return the storages of these values, without those of the model and of the batch."""
    resident = {t.storage for node in graph.inputs() for t in node.outputs}
    storages = {s for name in names for s in graph.storages_of(name)} - resident
    return {s: graph.storages[s].nbytes for s in storages}


def _sent(graph: Graph, names: Iterable[str]) -> dict[int | str, int]:
    """Return the bytes of these values when sent; a non-contiguous value is copied first."""
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
