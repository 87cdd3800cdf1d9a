"""Splits the captured step of one micro-batch into pipeline stages.

The forward pass is split along its order. The values that a backward node reads and its module
determine its stage. The ancestors of each gradient determine how the backward pass of a stage is
split into input and weight gradients. Not for choosing the boundaries: a plan names them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.errors import BadInput
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Phase, Ref, Role, Storage
from steelyard.ir.pipeline_stages import PipelineStage, PipelineStages
from steelyard.ir.program import order_of
from steelyard.ir.rule import trade_name
from steelyard.ir.rule_kinds import PipelineStageEnd


def end_of(graph: Graph, module: str) -> str:
    """Return the last value that ``module`` computes in the forward pass."""
    made = [n for n in graph.forward() if n.path == module or n.path.startswith(f"{module}.")]
    if not made:
        raise BadInput(
            f"a stage would end after {module!r}, which computes nothing",
            expected="the path of a module that the forward pass calls",
            remedy="name another module; model.named_modules() lists them",
        )
    return made[-1].name


def cut_into_stages(graph: Graph, ends: Sequence[str]) -> PipelineStages:
    """Split the graph into stages that end after each forward value in ``ends``, and a last one."""
    graph = _with_terms_per_stage(_with_buffer_copies(graph), _stage_of(graph, ends))
    places = _Places(graph, _stage_of(graph, ends), last=len(ends))
    _refuse_what_cannot_be_cut(graph, places)
    stages = tuple(_stage(graph, places, index) for index in range(len(ends) + 1))
    trained = dict.fromkeys(o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT)
    holders = {name: tuple(s.index for s in stages if name in s.held) for name in trained}
    shared = tuple((name, where) for name, where in holders.items() if len(where) > 1)
    return PipelineStages(graph=graph, stages=stages, shared=shared)


def _stage_of(graph: Graph, ends: Sequence[str]) -> dict[str, int]:
    """Return the stage of every forward node that some output needs."""
    last = [graph.position[name] for name in ends]
    if last != sorted(set(last)):
        raise BadInput(
            f"the stages end after {', '.join(ends)}",
            expected="ends in the order of the forward pass, each after the previous one",
            remedy="sort the ends, and remove duplicates",
        )
    found: dict[str, int] = {}
    for name in order_of(graph):
        node = graph.by_name[name]
        if node.phase is Phase.FORWARD:
            # All results of one operator are in its stage; the stage that issues a collective also
            # waits for it.
            made_by = node.inputs[0] if node.is_getitem else node.waits_for
            producer = found.get(made_by)
            found[name] = bisect_left(last, graph.position[name]) if producer is None else producer
    return found


def _with_buffer_copies(graph: Graph) -> Graph:
    """Copy updated buffers that the backward pass reads, before their update.

    By the time of the backward pass, later micro-batches have updated the buffers further.
    """
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    read = {i for n in graph.nodes if n.phase is Phase.BACKWARD for i in n.inputs}
    # The name must not start with "buffer:", which would make it a tensor of the model.
    renamed = {name: f"old {name}" for name in sorted(updated & read)}
    if not renamed:
        return graph
    storages, nodes = list(graph.storages), []
    for node in graph.nodes:
        is_backward = node.phase is Phase.BACKWARD
        nodes.append(node.reading(renamed) if is_backward else node)
        for name in [i for i in node.inputs if i in renamed and not is_backward]:
            if all(n.name != renamed[name] for n in nodes):
                nodes.insert(-1, _copy_of(graph.by_name[name], renamed[name], node, len(storages)))
                storages.append(Storage(nbytes=nodes[-2].outputs[0].nbytes, role=Role.ACTIVATION))
    return replace(graph, nodes=tuple(nodes), storages=tuple(storages))


def _copy_of(node: Node, name: str, reader: Node, storage: int) -> Node:
    (planned,) = node.outputs
    return Node(
        name=name,
        op="aten.clone.default",
        args=(Ref(node.name),),
        inputs=(node.name,),
        outputs=(replace(planned, storage=storage, offset=0),),
        path=reader.path,
    )


def _with_terms_per_stage(graph: Graph, forward: Mapping[str, int]) -> Graph:
    """Split each gradient that is a sum over stages, so that each term is an output of its own."""
    readers: dict[str, set[int]] = {}
    for name, stage in forward.items():
        for i in graph.by_name[name].inputs:
            readers.setdefault(i, set()).add(stage)
    stages = _holding_stages(graph, forward)
    outputs: list[Output] = []
    for output in graph.outputs:
        is_shared = output.kind is OutputKind.GRADIENT and len(stages[output.target]) > 1
        terms = _terms(graph, output.node) if is_shared else [output.node]
        outputs += [replace(output, node=term) for term in terms]
    return replace(graph, outputs=tuple(outputs))


def _holding_stages(graph: Graph, forward: Mapping[str, int]) -> dict[str, set[int]]:
    """Return the stages whose forward nodes read each input, directly or through views."""
    sources: dict[str, set[str]] = {node.name: {node.name} for node in graph.inputs()}
    stages: dict[str, set[int]] = {name: set() for name in sources}
    for node in graph.forward():
        read = set().union(*(sources.get(i, ()) for i in node.inputs))
        if node.is_view:
            sources[node.name] = read
        elif node.name in forward:
            for name in read:
                stages[name].add(forward[node.name])
    return stages


def _terms(graph: Graph, name: str) -> list[str]:
    node = graph.by_name[name]
    is_sum = node.op == "aten.add.Tensor" and len(node.inputs) == 2 and not node.kwargs
    leaves = sum(o.node == name for o in graph.outputs)
    if not is_sum or len(graph.users[name]) + leaves > 1:
        return [name]
    return [term for i in node.inputs for term in _terms(graph, i)]


class _Places:
    """The stage of each node, and the stages that hold each input of the step."""

    def __init__(self, graph: Graph, forward: Mapping[str, int], *, last: int) -> None:
        self.local_values = _local_values(graph)
        self.forward = {n: stage for n, stage in forward.items() if n not in self.local_values}
        self.last = last
        self._graph = graph
        self._holders = self._find_holders()
        self._module_stages = self._find_module_stages()
        self.backward = self._place_backward()
        self.targets = self._find_targets()

    def _find_holders(self) -> dict[str, list[int]]:
        """Return, per input of the step, the stages whose forward nodes read it or a view of it."""
        holders: dict[str, set[int]] = {}
        for name, stage in self.forward.items():
            for i in self.roots(self._graph.by_name[name].inputs):
                holders.setdefault(i, set()).add(stage)
        return {name: sorted(stages) for name, stages in holders.items()}

    def _find_module_stages(self) -> dict[str, int]:
        """Return the stage of each module that is within a single stage."""
        stages: dict[str, set[int]] = {}
        for name, stage in self.forward.items():
            stages.setdefault(self._graph.by_name[name].path, set()).add(stage)
        return {path: min(s) for path, s in stages.items() if len(s) == 1}

    def roots(self, names: Iterable[str]) -> set[str]:
        """Return the step inputs that these values depend on, if every stage can derive these
        values.
        """
        found, pending = set(), [n for n in names if n in self.local_values]
        while pending:
            node = self._graph.by_name[pending.pop()]
            if node.is_input:
                found.add(node.name)
            pending += node.inputs
        return found

    def _place_backward(self) -> dict[str, int]:
        """Assign each backward node to the earliest stage that its inputs and readers allow.

        That is never before the stage of its module. Gradients are only sent to earlier stages,
        and forward values only to later ones.
        """
        graph, found = self._graph, dict[str, int]()
        needed = set(order_of(graph)) - self.local_values
        targets: dict[str, list[str]] = {}
        for output in graph.outputs:
            if output.kind is OutputKind.GRADIENT:
                targets.setdefault(output.node, []).append(output.target)
        for node in reversed(graph.nodes):
            if node.phase is not Phase.BACKWARD or node.name not in needed:
                continue
            floor = max(
                (
                    self._module_stages.get(node.path, 0) if node.path else 0,
                    *(found[u] for u in graph.users[node.name] if u in found),
                    *(self.forward[i] for i in node.inputs if i in self.forward),
                )
            )
            for name in (*sorted(self.roots(node.inputs)), *targets.get(node.name, ())):
                floor = self._next_holder(name, floor)
            found[node.name] = floor
            # All results of one operator are in its stage; the stage that issues a collective also
            # waits for it.
            users = (graph.by_name[u] for u in graph.users[node.name])
            found.update({u.name: floor for u in users if u.is_getitem or u.waits_for == node.name})
        return found

    def _find_targets(self) -> dict[int, int]:
        """Return the stage that accumulates each gradient, by output index."""
        return {
            index: self._target(output)
            for index, output in enumerate(self._graph.outputs)
            if output.kind is OutputKind.GRADIENT
        }

    def _next_holder(self, name: str, floor: int) -> int:
        """Return the first stage from ``floor`` on that holds the input; ``floor`` if none does."""
        return min((s for s in self._holders.get(name, ()) if s >= floor), default=floor)

    def _target(self, output: Output) -> int:
        """Return the stage that accumulates a gradient: where it is computed, or an earlier one
        with the input.

        A gradient that is computed in the forward pass may be sent to a later stage that holds the
        input.
        """
        if output.node in self.forward:
            return self._next_holder(output.target, self.forward[output.node])
        computed_in = self.backward.get(output.node, self.last)
        holders = self._holders.get(output.target, [computed_in])
        return max((s for s in holders if s <= computed_in), default=computed_in)


def _local_values(graph: Graph) -> frozenset[str]:
    """Return the values that every stage computes for itself, without matmuls.

    These are views of inputs, and values such as masks and positions.
    """
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    output_nodes = {o.node for o in graph.outputs if o.kind in (OutputKind.UPDATE, OutputKind.LOSS)}
    trained = {
        n.name
        for n in graph.inputs()
        if any(graph.storages[t.storage].role is Role.PARAMETER for t in n.outputs)
    }
    found: set[str] = set()
    parameter_views = set(trained)
    for node in graph.nodes:
        if node.is_input:
            if node.name not in updated:
                found.add(node.name)
            continue
        if node.is_random or node.mutates or node.flops or not found.issuperset(node.inputs):
            continue
        if node.collective is not None or node.waits_for:
            continue  # collectives are issued once
        if node.name in output_nodes or any(t.storage in graph.written for t in node.outputs):
            continue
        if parameter_views.isdisjoint(node.inputs):
            found.add(node.name)
        elif graph.is_alias(node):
            found.add(node.name)
            parameter_views.add(node.name)
    return frozenset(found)


def _refuse_what_cannot_be_cut(graph: Graph, places: _Places) -> None:
    for output in graph.outputs:
        if output.kind is OutputKind.UPDATE:
            _refuse_update(graph, places, output)
        if output.kind is OutputKind.LOSS and places.forward.get(output.node) != places.last:
            raise BadInput(
                "a stage would begin after the loss",
                expected="stages that all contribute to the loss, which the last one computes",
                remedy="end the stages at earlier modules",
            )
    stage_of = places.forward | places.backward
    for node in graph.nodes:
        if node.is_random and node.phase is Phase.BACKWARD:
            raise BadInput(
                f"{node.op} draws random numbers in the backward pass",
                expected="random numbers in the forward pass only",
                remedy=f"plan this model without {trade_name(PipelineStageEnd)}",
            )
        for storage in graph.written.intersection(t.storage for t in node.outputs):
            aliases = [n.name for n in graph.nodes if storage in graph.storages_of(n.name)]
            readers = [u for n in aliases for u in graph.users[n]]
            if len({stage_of[n] for n in (*aliases, *readers) if n in stage_of}) > 1:
                raise BadInput(
                    f"{node.path or 'the loss function'} writes into a value that two stages read",
                    expected="values that do not change after they are sent",
                    remedy="end the stages elsewhere",
                )


# Operators whose number of random draws depends on shapes alone, so that another rank can repeat
# the draws without the values.
_DRAWS_BY_SHAPE = frozenset({
    "aten.bernoulli.p", "aten.native_dropout.default", "aten.normal_functional.default",
    "aten.rand.default", "aten.rand_like.default", "aten.randint.default", "aten.randint.low",
    "aten.randn.default", "aten.randn_like.default", "aten.randperm.default",
    "aten.uniform.default",
})  # fmt: skip


def refuse_unknown_draws(graph: Graph) -> None:
    """Refuse random operators with a value-dependent number of draws.

    A rank repeats the draws of the stages before it, so it must know how many there are.
    """
    for node in graph.nodes:
        given = (t for i in node.inputs for t in graph.by_name[i].outputs)
        if node.is_random and not (node.op in _DRAWS_BY_SHAPE and all(t.dtype for t in given)):
            raise BadInput(
                f"{node.op} in {node.path or 'the loss function'} draws random numbers whose "
                "count may depend on tensor values",
                expected="random operators such as dropout, whose number of draws depends on "
                "shapes only",
                remedy=f"plan this model without {trade_name(PipelineStageEnd)}",
            )


def _refuse_update(graph: Graph, places: _Places, output: Output) -> None:
    stages = {places.forward[u] for u in graph.users[output.target] if u in places.forward}
    stages.add(places.forward.get(output.node, -1))
    if len(stages) > 1 or output.target.startswith("batch:"):
        raise BadInput(
            f"{output.target.replace(':', ' ', 1)} is updated in one stage and read in another",
            expected="a buffer that a single stage reads and updates",
            remedy="end the stages elsewhere, so that the modules that share it are in one stage",
        )


def _stage(graph: Graph, places: _Places, index: int) -> PipelineStage:
    reads = _Reads(graph, places)
    forward_names = [n for n, s in places.forward.items() if s == index]
    backward_names = [n for n in reads.backward_order if places.backward[n] == index]
    sends, sends_back = reads.sent_forward(index), reads.sent_backward(index - 1)
    gradients = tuple(o for i, o in enumerate(graph.outputs) if places.targets.get(i, -1) == index)
    saved = reads.saved(index)
    forward = _subgraph(
        graph,
        places,
        forward_names,
        _with_carried([*sends, *saved], forward_names, _step_outputs(graph, forward_names)),
    )
    for_inputs = _ancestors(
        graph, [n for n in sends_back if n in backward_names], within=set(backward_names)
    )
    for name in backward_names:
        # Unpack results in this part: otherwise the part for the weights would need all results of
        # the operator.
        node = graph.by_name[name]
        if node.is_getitem and for_inputs.issuperset(node.inputs):
            for_inputs.add(name)
    weight_part = [n for n in backward_names if n not in for_inputs]
    needed = {i for n in weight_part for i in graph.by_name[n].inputs} | {o.node for o in gradients}
    available = {*for_inputs, *reads.sent_backward(index), *saved}
    saved_between = tuple(n for n in reads.order if n in needed & available)
    input_part = [n for n in backward_names if n in for_inputs]
    return PipelineStage(
        index=index,
        forward=forward,
        backward=_subgraph(
            graph, places, backward_names, _with_carried(sends_back, backward_names, gradients)
        ),
        back_to_inputs=_subgraph(
            graph, places, input_part, _with_carried([*sends_back, *saved_between], input_part, ())
        ),
        back_to_weights=_subgraph(graph, places, weight_part, gradients),
        receives=reads.sent_forward(index - 1),
        sends=sends,
        receives_back=reads.sent_backward(index),
        sends_back=sends_back,
        kept=saved,
        kept_between=saved_between,
    )


class _Reads:
    """The values that cross each boundary between stages, and those saved for the backward pass."""

    def __init__(self, graph: Graph, places: _Places) -> None:
        self.order = [n.name for n in graph.nodes]
        self.backward_order = [n for n in self.order if n in places.backward]
        self._places = places
        self._last_read_stage = dict(places.forward)
        self._first_read_stage = dict(places.backward)
        self._saved: dict[int, set[str]] = {}
        for name, stage in (places.forward | places.backward).items():
            for i in graph.by_name[name].inputs:
                self._read(i, stage, is_late=name in places.backward)
        for index, stage in places.targets.items():
            self._read(graph.outputs[index].node, stage, is_late=True)

    def _read(self, name: str, stage: int, *, is_late: bool) -> None:
        if name in self._last_read_stage:
            self._last_read_stage[name] = max(self._last_read_stage[name], stage)
            if is_late:
                self._saved.setdefault(stage, set()).add(name)
        elif name in self._first_read_stage:
            self._first_read_stage[name] = min(self._first_read_stage[name], stage)

    def saved(self, stage: int) -> tuple[str, ...]:
        """Return the forward values that the backward pass of ``stage`` reads."""
        return tuple(n for n in self.order if n in self._saved.get(stage, ()))

    def sent_forward(self, stage: int) -> tuple[str, ...]:
        """Return the forward values sent from ``stage`` to the next."""
        made, read = self._places.forward, self._last_read_stage
        return tuple(n for n in self.order if n in made and made[n] <= stage < read[n])

    def sent_backward(self, stage: int) -> tuple[str, ...]:
        """Return the gradients that ``stage`` receives from the next stage."""
        made, read = self._places.backward, self._first_read_stage
        return tuple(n for n in self.order if n in made and read[n] <= stage < made[n])


def _step_outputs(graph: Graph, made: Sequence[str]) -> tuple[Output, ...]:
    """Return the step outputs (loss, buffer updates) that are among these forward nodes."""
    kinds, names = (OutputKind.LOSS, OutputKind.UPDATE), set(made)
    return tuple(o for o in graph.outputs if o.kind in kinds and o.node in names)


def _with_carried(
    wanted: Iterable[str], made: Iterable[str], others: tuple[Output, ...]
) -> tuple[Output, ...]:
    own = set(made)
    carried = [n for n in dict.fromkeys(wanted) if n in own]
    return (*others, *(Output(kind=OutputKind.CARRIED, node=n, target=n) for n in carried))


def _ancestors(graph: Graph, names: Iterable[str], *, within: set[str]) -> set[str]:
    found, pending = set[str](), list(names)
    while pending:
        name = pending.pop()
        if name in within and name not in found:
            found.add(name)
            pending += graph.by_name[name].inputs
    return found


def _subgraph(
    graph: Graph, places: _Places, names: Iterable[str], outputs: tuple[Output, ...]
) -> Graph:
    """Return the subgraph of these nodes and of locally derived values; all else becomes an
    input.
    """
    included = set(names)
    pending = [*included, *(o.node for o in outputs)]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in included or name in places.local_values:
            included.add(name)
            pending += graph.by_name[name].inputs
    # A subgraph that outputs a buffer's update has the buffer as an input.
    seen |= {o.target for o in outputs if o.kind is OutputKind.UPDATE}
    nodes = [n if n.name in included else _as_input(n) for n in graph.nodes if n.name in seen]
    ordered = sorted(nodes, key=lambda n: not n.is_input)
    return replace(graph, nodes=tuple(ordered), outputs=outputs, runs=(), counts=())


def _as_input(node: Node) -> Node:
    return node if node.is_input else Node(name=node.name, op="input", outputs=node.outputs)
