"""A step cut into the stages of a pipeline: what each computes, keeps and hands to its neighbours.

Plain data. Not for cutting (capture/pipeline_stages.py), nor for the order in which stages work.
"""

from dataclasses import dataclass

from steelyard.ir.graph import Graph, OutputKind


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStage:
    """One stage, for one micro-batch; a value goes by the name of the node that made it.

    ``backward`` is the whole of it. ``back_to_inputs`` makes what the stage before waits for,
    ``back_to_weights`` the rest, from what is ``kept_between``. ``kept`` stays from the forward
    pass to either. A value that a further stage needs is handed on by all between.
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
        """The model's tensors that it reads or gives a gradient to."""
        parts = (self.forward, self.backward)
        named = [node.name for part in parts for node in part.inputs()]
        named += [o.target for part in parts for o in part.outputs if o.target]
        return tuple(n for n in dict.fromkeys(named) if n.startswith(("parameter:", "buffer:")))

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters that it gives a gradient to."""
        targets = (o.target for o in self.backward.outputs if o.kind is OutputKind.GRADIENT)
        return tuple(dict.fromkeys(targets))


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStages:
    """``graph`` is the one that was cut; the stages' nodes are its nodes.

    ``shared`` names each trained parameter that several stages hold, and these: its gradient is
    the sum of what they find.
    """

    graph: Graph
    stages: tuple[PipelineStage, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...]
