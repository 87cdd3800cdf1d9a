"""Cut the captured step of one micro-batch into the stages of a pipeline.

The forward pass is cut along its order, the backward pass follows what it reads and the modules it
belongs to; a stage's backward pass is split by ancestor sets. Not for choosing where: that is a
plan's.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from steelyard.errors import BadInput
from steelyard.ir.graph import Graph, Node, Output, OutputKind, Phase, Ref, Role, Storage
from steelyard.ir.pipeline_stages import PipelineStage, PipelineStages
from steelyard.ir.program import order_of


def end_of(graph: Graph, module: str) -> str:
    """The last value that ``module`` makes in the forward pass."""
    made = [n for n in graph.forward() if n.path == module or n.path.startswith(f"{module}.")]
    if not made:
        raise BadInput(
            f"a stage is to end behind {module!r}, which computes nothing",
            expected="the path of a module that the forward pass calls",
            remedy="name another, as model.named_modules() lists them",
        )
    return made[-1].name


def cut_into_stages(graph: Graph, ends: Sequence[str]) -> PipelineStages:
    """A stage ends behind each of the forward values ``ends``, and one with the step."""
    graph = _with_parts_apart(_with_old_buffers_kept(graph), _stage_of(graph, ends))
    places = _Places(graph, _stage_of(graph, ends), last=len(ends))
    _refuse_what_cannot_be_cut(graph, places)
    stages = tuple(_stage(graph, places, index) for index in range(len(ends) + 1))
    trained = dict.fromkeys(o.target for o in graph.outputs if o.kind is OutputKind.GRADIENT)
    held = {name: tuple(s.index for s in stages if name in s.held) for name in trained}
    shared = tuple((name, where) for name, where in held.items() if len(where) > 1)
    return PipelineStages(graph=graph, stages=stages, shared=shared)


def _stage_of(graph: Graph, ends: Sequence[str]) -> dict[str, int]:
    """The stage of every forward node that some output needs."""
    last = [graph.position[name] for name in ends]
    if last != sorted(set(last)):
        raise BadInput(
            f"the stages end behind {', '.join(ends)}",
            expected="ends in the order of the forward pass, each behind the one before",
            remedy="put them in order, and leave out what is named twice",
        )
    found: dict[str, int] = {}
    for name in order_of(graph):
        node = graph.by_name[name]
        if node.phase is Phase.FORWARD:
            # The results of one operator stay together; and what is on its way arrives here.
            made_by = node.inputs[0] if node.is_getitem else node.waits_for
            producer = found.get(made_by)
            found[name] = bisect_left(last, graph.position[name]) if producer is None else producer
    return found


def _with_old_buffers_kept(graph: Graph) -> Graph:
    """Where the backward pass reads a buffer, it reads a copy from before the update, which by
    then later micro-batches have made further."""
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    read = {i for n in graph.nodes if n.phase is Phase.BACKWARD for i in n.inputs}
    # By another beginning: what begins like the model's is held by stages.
    renamed = {name: f"old {name}" for name in sorted(updated & read)}
    if not renamed:
        return graph
    storages, nodes = list(graph.storages), []
    for node in graph.nodes:
        back = node.phase is Phase.BACKWARD
        nodes.append(node.reading(renamed) if back else node)
        for name in [i for i in node.inputs if i in renamed and not back]:
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


def _with_parts_apart(graph: Graph, forward: Mapping[str, int]) -> Graph:
    """A gradient that is a sum over stages leaves each of them as its own part."""
    readers: dict[str, set[int]] = {}
    for name, stage in forward.items():
        for i in graph.by_name[name].inputs:
            readers.setdefault(i, set()).add(stage)
    outputs: list[Output] = []
    for output in graph.outputs:
        is_shared = output.kind is OutputKind.GRADIENT and len(_held(graph, forward, output)) > 1
        parts = _parts(graph, output.node) if is_shared else [output.node]
        outputs += [replace(output, node=part) for part in parts]
    return replace(graph, outputs=tuple(outputs))


def _held(graph: Graph, forward: Mapping[str, int], output: Output) -> set[int]:
    """The stages whose forward nodes read the parameter, or look at it."""
    looks, stages = {output.target}, set()
    for node in graph.forward():
        if looks.isdisjoint(node.inputs):
            continue
        if node.is_view:
            looks.add(node.name)
        elif node.name in forward:
            stages.add(forward[node.name])
    return stages


def _parts(graph: Graph, name: str) -> list[str]:
    node = graph.by_name[name]
    is_sum = node.op == "aten.add.Tensor" and len(node.inputs) == 2 and not node.kwargs
    leaves = sum(o.node == name for o in graph.outputs)
    if not is_sum or len(graph.users[name]) + leaves > 1:
        return [name]
    return [part for i in node.inputs for part in _parts(graph, i)]


class _Places:
    """Where each node is computed, and which stages hold each input."""

    def __init__(self, graph: Graph, forward: Mapping[str, int], *, last: int) -> None:
        self.anywhere = _anywhere(graph)
        self.forward = {n: stage for n, stage in forward.items() if n not in self.anywhere}
        self.last = last
        self._graph = graph
        self._holders = self._found_holders()
        self._paths = self._found_paths()
        self.backward = self._found_backward()
        self.targets = self._found_targets()

    def _found_holders(self) -> dict[str, list[int]]:
        """The stages whose forward nodes read an input of the step, directly or by a view."""
        holders: dict[str, set[int]] = {}
        for name, stage in self.forward.items():
            for i in self.roots(self._graph.by_name[name].inputs):
                holders.setdefault(i, set()).add(stage)
        return {name: sorted(stages) for name, stages in holders.items()}

    def _found_paths(self) -> dict[str, int]:
        """The stage of each module that lies in one alone."""
        stages: dict[str, set[int]] = {}
        for name, stage in self.forward.items():
            stages.setdefault(self._graph.by_name[name].path, set()).add(stage)
        return {path: min(s) for path, s in stages.items() if len(s) == 1}

    def roots(self, names: Iterable[str]) -> set[str]:
        """The inputs of the step behind values that every stage can make for itself."""
        found, pending = set(), [n for n in names if n in self.anywhere]
        while pending:
            node = self._graph.by_name[pending.pop()]
            if node.is_input:
                found.add(node.name)
            pending += node.inputs
        return found

    def _found_backward(self) -> dict[str, int]:
        """As early a stage as all it reads, and all that reads it, allow: never before a module's
        own. Gradients travel backward only, and what was computed forward only forward."""
        graph, found = self._graph, dict[str, int]()
        needed = set(order_of(graph)) - self.anywhere
        targets: dict[str, list[str]] = {}
        for output in graph.outputs:
            if output.kind is OutputKind.GRADIENT:
                targets.setdefault(output.node, []).append(output.target)
        for node in reversed(graph.nodes):
            if node.phase is not Phase.BACKWARD or node.name not in needed:
                continue
            floor = max(
                (
                    self._paths.get(node.path, 0) if node.path else 0,
                    *(found[u] for u in graph.users[node.name] if u in found),
                    *(self.forward[i] for i in node.inputs if i in self.forward),
                )
            )
            for name in (*sorted(self.roots(node.inputs)), *targets.get(node.name, ())):
                floor = self._nearest_holder(name, floor)
            found[node.name] = floor
            # The results of one operator stay together; and what is on its way arrives here.
            users = (graph.by_name[u] for u in graph.users[node.name])
            found.update({u.name: floor for u in users if u.is_getitem or u.waits_for == node.name})
        return found

    def _found_targets(self) -> dict[int, int]:
        """The stage that takes in each gradient, by its place among the outputs."""
        return {
            index: self._target(output)
            for index, output in enumerate(self._graph.outputs)
            if output.kind is OutputKind.GRADIENT
        }

    def _nearest_holder(self, name: str, floor: int) -> int:
        """The first stage from ``floor`` on that holds the input; any can where none does."""
        return min((s for s in self._holders.get(name, ()) if s >= floor), default=floor)

    def _target(self, output: Output) -> int:
        """Where it was made, or the last holder before; one made forward may go on to a later."""
        if output.node in self.forward:
            return self._nearest_holder(output.target, self.forward[output.node])
        made = self.backward.get(output.node, self.last)
        holders = self._holders.get(output.target, [made])
        return max((s for s in holders if s <= made), default=made)


def _anywhere(graph: Graph) -> frozenset[str]:
    """What each stage makes for itself: views of inputs, and what is made of no data that changes
    (masks, positions), with no arithmetic to speak of."""
    updated = {o.target for o in graph.outputs if o.kind is OutputKind.UPDATE}
    own = {o.node for o in graph.outputs if o.kind in (OutputKind.UPDATE, OutputKind.LOSS)}
    trained = {
        n.name
        for n in graph.inputs()
        if any(graph.storages[t.storage].role is Role.PARAMETER for t in n.outputs)
    }
    found: set[str] = set()
    looks = set(trained)
    for node in graph.nodes:
        if node.is_input:
            if node.name not in updated:
                found.add(node.name)
            continue
        if node.is_random or node.mutates or node.flops or not found.issuperset(node.inputs):
            continue
        if node.collective is not None or node.waits_for:
            continue  # once is enough
        if node.name in own or any(t.storage in graph.written for t in node.outputs):
            continue
        if looks.isdisjoint(node.inputs):
            found.add(node.name)
        elif graph.is_look(node):
            found.add(node.name)
            looks.add(node.name)
    return frozenset(found)


def _refuse_what_cannot_be_cut(graph: Graph, places: _Places) -> None:
    for output in graph.outputs:
        if output.kind is OutputKind.UPDATE:
            _refuse_update(graph, places, output)
        if output.kind is OutputKind.LOSS and places.forward.get(output.node) != places.last:
            raise BadInput(
                "a stage would begin behind the loss",
                expected="stages that each lead up to the loss, which the last one gives",
                remedy="end the stages at earlier modules",
            )
    where = places.forward | places.backward
    for node in graph.nodes:
        if node.is_random and node.phase is Phase.BACKWARD:
            raise BadInput(
                f"{node.op} draws random numbers in the backward pass",
                expected="random numbers in the forward pass alone, whose order is known",
                remedy="leave this model whole, or plan it without shard_pipeline",
            )
        for storage in graph.written.intersection(t.storage for t in node.outputs):
            sharing = [n.name for n in graph.nodes if storage in graph.storages_of(n.name)]
            reading = [u for n in sharing for u in graph.users[n]]
            if len({where[n] for n in (*sharing, *reading) if n in where}) > 1:
                raise BadInput(
                    f"{node.path or 'the loss function'} writes into a value that two stages read",
                    expected="values that stay as they were sent",
                    remedy="end the stages elsewhere",
                )


# How much these draw hangs on shapes alone, so that it can be drawn again without the values.
_BY_SHAPE = frozenset({
    "aten.bernoulli.p", "aten.native_dropout.default", "aten.normal_functional.default",
    "aten.rand.default", "aten.rand_like.default", "aten.randint.default", "aten.randint.low",
    "aten.randn.default", "aten.randn_like.default", "aten.randperm.default",
    "aten.uniform.default",
})  # fmt: skip


def refuse_unknown_draws(graph: Graph) -> None:
    """Ranks draw again what others draw before them, and must know how much that is."""
    for node in graph.nodes:
        given = (t for i in node.inputs for t in graph.by_name[i].outputs)
        if node.is_random and not (node.op in _BY_SHAPE and all(t.dtype for t in given)):
            raise BadInput(
                f"{node.op} in {node.path or 'the loss function'} draws random numbers, how many "
                "may hang on values",
                expected="dropout and the like, whose draws another rank can repeat by shape",
                remedy="leave this model whole, or plan it without shard_pipeline",
            )


def _refuse_update(graph: Graph, places: _Places, output: Output) -> None:
    reading = {places.forward[u] for u in graph.users[output.target] if u in places.forward}
    reading.add(places.forward.get(output.node, -1))
    if len(reading) > 1 or output.target.startswith("batch:"):
        raise BadInput(
            f"{output.target.replace(':', ' ', 1)} is updated in one stage and read in another",
            expected="a buffer that one stage reads and updates, before its next micro-batch",
            remedy="end the stages elsewhere, so that the modules that share it lie in one",
        )


def _stage(graph: Graph, places: _Places, index: int) -> PipelineStage:
    reads = _Reads(graph, places)
    mine = [n for n, s in places.forward.items() if s == index]
    back = [n for n in reads.backward_order if places.backward[n] == index]
    sends, sends_back = reads.crossing(index), reads.crossing_back(index - 1)
    gradients = tuple(o for i, o in enumerate(graph.outputs) if places.targets.get(i, -1) == index)
    kept = reads.kept(index)
    first = _part_of(graph, places, mine, _carried([*sends, *kept], mine, _own(graph, mine)))
    hurried = _ancestors(graph, [n for n in sends_back if n in back], within=set(back))
    for name in back:
        # One result of several by itself: all of them would stay for it.
        node = graph.by_name[name]
        if node.is_getitem and hurried.issuperset(node.inputs):
            hurried.add(name)
    later = [n for n in back if n not in hurried]
    wanted = {i for n in later for i in graph.by_name[n].inputs} | {o.node for o in gradients}
    given = {*hurried, *reads.crossing_back(index), *kept}
    between = tuple(n for n in reads.order if n in wanted & given)
    hurry = [n for n in back if n in hurried]
    return PipelineStage(
        index=index,
        forward=first,
        backward=_part_of(graph, places, back, _carried(sends_back, back, gradients)),
        back_to_inputs=_part_of(graph, places, hurry, _carried([*sends_back, *between], hurry, ())),
        back_to_weights=_part_of(graph, places, later, gradients),
        receives=reads.crossing(index - 1),
        sends=sends,
        receives_back=reads.crossing_back(index),
        sends_back=sends_back,
        kept=kept,
        kept_between=between,
    )


class _Reads:
    """Which values cross which boundary between stages."""

    def __init__(self, graph: Graph, places: _Places) -> None:
        self.order = [n.name for n in graph.nodes]
        self.backward_order = [n for n in self.order if n in places.backward]
        self._places = places
        self._furthest = dict(places.forward)
        self._earliest = dict(places.backward)
        self._kept: dict[int, set[str]] = {}
        for name, stage in (places.forward | places.backward).items():
            for i in graph.by_name[name].inputs:
                self._read(i, stage, is_late=name in places.backward)
        for index, stage in places.targets.items():
            self._read(graph.outputs[index].node, stage, is_late=True)

    def _read(self, name: str, stage: int, *, is_late: bool) -> None:
        if name in self._furthest:
            self._furthest[name] = max(self._furthest[name], stage)
            if is_late:
                self._kept.setdefault(stage, set()).add(name)
        elif name in self._earliest:
            self._earliest[name] = min(self._earliest[name], stage)

    def kept(self, stage: int) -> tuple[str, ...]:
        """Of the forward pass, for this stage's backward."""
        return tuple(n for n in self.order if n in self._kept.get(stage, ()))

    def crossing(self, stage: int) -> tuple[str, ...]:
        """From ``stage`` to the next."""
        made, read = self._places.forward, self._furthest
        return tuple(n for n in self.order if n in made and made[n] <= stage < read[n])

    def crossing_back(self, stage: int) -> tuple[str, ...]:
        """To ``stage`` from the next."""
        made, read = self._places.backward, self._earliest
        return tuple(n for n in self.order if n in made and read[n] <= stage < made[n])


def _own(graph: Graph, made: Sequence[str]) -> tuple[Output, ...]:
    """The outputs of the step that a stage's forward pass gives."""
    kinds, names = (OutputKind.LOSS, OutputKind.UPDATE), set(made)
    return tuple(o for o in graph.outputs if o.kind in kinds and o.node in names)


def _carried(
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


def _part_of(
    graph: Graph, places: _Places, names: Iterable[str], outputs: tuple[Output, ...]
) -> Graph:
    """These nodes, with what they can make for themselves; all else that they read is an input."""
    wanted = set(names)
    pending = [*wanted, *(o.node for o in outputs)]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in wanted or name in places.anywhere:
            wanted.add(name)
            pending += graph.by_name[name].inputs
    # A buffer's old place is an input where its new value leaves.
    seen |= {o.target for o in outputs if o.kind is OutputKind.UPDATE}
    nodes = [n if n.name in wanted else _given(n) for n in graph.nodes if n.name in seen]
    ordered = sorted(nodes, key=lambda n: not n.is_input)
    return replace(graph, nodes=tuple(ordered), outputs=outputs, runs=(), counts=())


def _given(node: Node) -> Node:
    return node if node.is_input else Node(name=node.name, op="input", outputs=node.outputs)
