"""A step that is cut into pipeline stages: the graphs, saved values and messages of each stage.

All of it is plain data. Not for cutting (capture/pipeline_stages.py) or for schedules
(pipeline_schedule.py).
"""

from dataclasses import dataclass

from steelyard.ir.graph import Graph, OutputKind


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStage:
    """One stage, for one micro-batch; a value has the name of the node that made it.

    ``backward`` is the full backward pass. ``back_to_inputs`` computes the gradients that the
    previous stage waits for, ``back_to_weights`` the rest, using the values ``kept_between``.
    ``kept`` are the activations saved from the forward pass for either. A value that a later stage
    needs is passed on by all stages in between.
    """

    index: int
    forward: Graph
    backward: Graph
    back_to_inputs: Graph
    back_to_weights: Graph
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    receives_back: tuple[str, ...]
    sends_back: tuple[str, ...]
    kept: tuple[str, ...]
    kept_between: tuple[str, ...]

    @property
    def held(self) -> tuple[str, ...]:
        """The model's tensors that the stage reads, or whose gradients it computes."""
        parts = (self.forward, self.backward)
        named = [node.name for part in parts for node in part.inputs()]
        named += [o.target for part in parts for o in part.outputs if o.target]
        return tuple(n for n in dict.fromkeys(named) if n.startswith(("parameter:", "buffer:")))

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters whose gradients the stage computes."""
        targets = (o.target for o in self.backward.outputs if o.kind is OutputKind.GRADIENT)
        return tuple(dict.fromkeys(targets))


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStages:
    """All stages; ``graph`` is the original graph, which contains the nodes of all stages.

    ``shared`` lists each trained parameter that several stages read, with these stages. Its
    gradient is the sum of their gradients.
    """

    graph: Graph
    stages: tuple[PipelineStage, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...]
