"""Programs in which weights, gradients and what an optimizer keeps lie in far memory.

A pass fetches each weight for the lines that read it, and sends each gradient once it is complete;
the update fetches what it needs of one parameter after another and sends back what it changed. Not
for which of them, nor how far ahead: see trades/. Not for carrying them out: see exchange/.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from steelyard.core.cluster import FAR_IN, FAR_OUT, FAR_PAGE_BYTES
from steelyard.core.collective import Collective, Exchange
from steelyard.core.graph import (
    FAR_CALLS,
    FAR_PRODUCTS,
    Graph,
    Node,
    OutputKind,
    Phase,
    Ref,
    Role,
    Storage,
    Tensor,
)
from steelyard.core.program import Instruction, Program
from steelyard.core.updates import GRADIENT, WEIGHT, owners, portions


def with_states_far(
    update: Program, moved: Mapping[str, Sequence[str]], leads: Mapping[str, int]
) -> Program:
    """One parameter after another: fetch, update, send.

    ``moved`` are the names of what comes and goes of each. ``leads``: so many parameters earlier
    fetching begins, and so many later what was sent is let go. Gradients are not sent back.
    """
    owner = owners(update.graph)
    assert owner is not None
    calls = _Calls(update.graph, Phase.UPDATE)
    groups = list(portions(update, owner, moved))
    order = [portion for portion, _ in groups if portion]
    back = {p: [name for name in moved[p] if not name.startswith(GRADIENT)] for p in order}
    lines: list[Instruction] = []
    for place, (portion, own) in enumerate(groups):
        for later, parameter in enumerate(order):
            if max(0, later - leads[parameter]) == place:
                lines += [calls.fetch(name) for name in moved[parameter]]
        lines += [calls.fetched(name) for name in moved.get(portion, ())]
        # What is only read is there until the optimizer returns.
        read = [name for name in moved.get(portion, ()) if name not in back[portion]]
        lines += [*own[:-1], replace(own[-1], inputs=(*own[-1].inputs, *read))]
        lines += [calls.send(name, name) for name in back.get(portion, ())]
        for earlier, parameter in enumerate(order):
            if min(earlier + leads[parameter], len(order) - 1) == place:
                lines += [calls.sent(name, name) for name in back[parameter]]
    result = replace(update, graph=calls.graph(), instructions=tuple(lines))
    assert not result.problems(), result.problems()
    return result


def with_weights_far(
    program: Program, leads: Mapping[str, int], slices: Mapping[str, int]
) -> Program:
    """Each of these parameters is fetched for the lines that read it, and let go behind them.

    Fetching begins ``lead`` operators before the first of them. Where that would be before the
    weight was last read, it stays instead. Those with more than one slice are never here whole:
    each product that reads one does so slice by slice, two of them near at a time.
    """
    if not leads:
        return program
    if parted := {p: count for p, count in slices.items() if count > 1}:
        program = _with_products_far(program, parted, leads)
        leads = {parameter: lead for parameter, lead in leads.items() if parameter not in parted}
    calls = _Calls(program.graph, Phase.BACKWARD)
    looks = _Looks(program, [WEIGHT + parameter for parameter in leads])
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    running = _Running(program.graph, lines)
    fetching: dict[int, list[Instruction]] = {}
    arriving: dict[int, list[tuple[str, int]]] = {}
    for weight, reads in looks.reads(lines).items():
        lead = leads[weight.removeprefix(WEIGHT)]
        for number, first in enumerate(running.apart(reads, lead)):
            begin = running.before(first, lead)
            fetch = replace(calls.fetch(weight, number), phase=lines[begin].phase)
            fetching.setdefault(begin, []).append(fetch)
            arriving.setdefault(first, []).append((weight, number))
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += fetching.get(number, [])
        for weight, copy in arriving.get(number, []):
            ordered.append(replace(calls.fetched(weight, copy), phase=line.phase))
            looks.begin_anew(weight, copy)
        ordered += looks.rewritten(line)
    result = Program.of(calls.graph(), ordered, repeats=program.repeats, update=program.update)
    assert not result.problems(), result.problems()
    return result


def sliceable(program: Program, parameter: str) -> bool:
    """Whether nothing reads this weight but products of which it is the right side."""
    looks = _Looks(program, [WEIGHT + parameter])
    nodes = program.graph.by_name
    (tensor,) = nodes[WEIGHT + parameter].outputs
    row_major = tensor.stride == (*(tensor.shape[1:]), 1) and len(tensor.shape) == 2
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    reads = looks.reads(lines).get(WEIGHT + parameter, ())
    products = (_Product.of(nodes[lines[k].node], program.graph, looks) for k in reads)
    return row_major and bool(reads) and all(products)


def _with_products_far(
    program: Program, slices: Mapping[str, int], leads: Mapping[str, int]
) -> Program:
    """Around each product: begin to fetch slices, let the last two go."""
    graph = program.graph
    calls = _Calls(graph, Phase.BACKWARD)
    looks = _Looks(program, [WEIGHT + parameter for parameter in slices])
    calls.drop(looks.names)
    lines = [i for i in program.instructions if i.sink is None and i.value not in looks.of]
    running = _Running(graph, lines)
    beginning: dict[int, list[Instruction]] = {}
    products: dict[int, tuple[_Product, Instruction]] = {}
    for weight, reads in looks.reads(lines).items():
        parameter = weight.removeprefix(WEIGHT)
        for number, read in enumerate(reads):
            product = _Product.of(graph.by_name[lines[read].node], graph, looks)
            assert product is not None
            begin, end = calls.slices(weight, number, slices[parameter])
            place = running.before(read, leads[parameter])
            beginning.setdefault(place, []).append(replace(begin, phase=lines[place].phase))
            products[read] = product, replace(end, phase=lines[read].phase)
    ordered: list[Instruction] = []
    for number, line in enumerate(lines):
        ordered += beginning.get(number, [])
        if number in products:
            product, end = products[number]
            own = calls.product(product)
            ordered += [replace(own, value=line.value, inputs=product.without(line.inputs)), end]
        else:
            ordered.append(line)
    result = Program.of(calls.graph(), ordered, repeats=program.repeats, update=program.update)
    assert not result.problems(), result.problems()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """``mm`` or ``addmm`` whose right side is a weight (a sum over its rows), or that weight
    transposed (its rows are the columns of the result)."""

    node: Node
    weight: str
    place: int
    by_columns: bool

    @classmethod
    def of(cls, node: Node, graph: Graph, looks: "_Looks") -> "_Product | None":
        place = {"aten.mm.default": 1, "aten.addmm.default": 2}.get(node.op)
        if place is None or node.kwargs or len(set(node.inputs)) != len(node.args):
            return None
        *others, right = node.inputs
        weight = looks.weight_of(right)
        if not weight or any(looks.weight_of(name) for name in others):
            return None
        (own,), (seen,) = graph.by_name[weight].outputs, graph.by_name[right].outputs
        by_columns = (seen.shape, seen.stride) == (own.shape[::-1], own.stride[::-1])
        if not by_columns and ((seen.shape, seen.stride) != (own.shape, own.stride) or place == 2):
            return None
        return cls(node=node, weight=weight, place=place, by_columns=by_columns)

    def without(self, inputs: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for place, name in enumerate(inputs) if place != self.place)


def with_gradients_far(program: Program, lags: Mapping[str, int]) -> Program:
    """The gradients of these parameters are sent once they are complete, and let go ``lag``
    operators later. In micro-batches what was sent before is fetched as early, and added to."""
    if not lags:
        return program
    calls = _Calls(program.graph, Phase.BACKWARD)
    lines = program.instructions
    running = _Running(program.graph, lines)
    before: dict[int, list[Instruction]] = {}
    instead: dict[int, list[Instruction]] = {}
    behind: dict[int, list[Instruction]] = {}
    for number, line in enumerate(lines):
        sink = line.sink
        parameter = "" if sink is None else sink.target.removeprefix(WEIGHT)
        if sink is None or sink.kind is not OutputKind.GRADIENT or parameter not in lags:
            continue
        lag, name, (value,) = lags[parameter], GRADIENT + parameter, line.inputs
        taken = replace(line, sink=replace(sink, kind=OutputKind.FAR_GRADIENT))
        if program.repeats == 1:
            instead[number] = [taken, calls.send(name, value)]
            sent = calls.sent(name, value)
        else:
            fetch, old = calls.before(name, value)
            before.setdefault(running.before(number, lag), []).append(fetch)
            instead[number] = [old, taken, calls.send(name, value, old.value)]
            sent = calls.sent(name, old.value)
        behind.setdefault(running.behind(number, lag), []).append(sent)
    placed: list[Instruction] = []
    for number, line in enumerate(lines):
        placed += before.get(number, [])
        placed += instead.get(number, [line])
        placed += behind.get(number, [])
    result = replace(program, graph=calls.graph(), instructions=tuple(placed))
    assert not result.problems(), result.problems()
    return result


class _Calls:
    """The calls by which each of these comes and goes. What is fetched first has the name of what
    was there before, so that whatever reads it need not change."""

    def __init__(self, graph: Graph, phase: Phase) -> None:
        self._graph = graph
        self._phase = phase
        self._first: dict[str, Node] = {}
        self._last: dict[str, Node] = {}
        self._products: dict[str, Node] = {}
        self._gone: frozenset[str] = frozenset()
        self._storages = list(graph.storages)

    def fetch(self, name: str, number: int = 0) -> Instruction:
        return self._fetch(name, self._graph.by_name[name].outputs[0], number)

    def fetched(self, name: str, number: int = 0) -> Instruction:
        return self._fetched(name, self._graph.by_name[name].outputs[0], number)

    def drop(self, names: frozenset[str]) -> None:
        """Of these there is nothing any more."""
        self._gone = names

    def slices(self, weight: str, number: int, count: int) -> tuple[Instruction, Instruction]:
        """Begin to fetch, in room for two slices; let them go."""
        (tensor,) = self._graph.by_name[weight].outputs
        rows = rows_of_slice(tensor.shape[0], tensor.nbytes // tensor.shape[0], count)
        room = replace(tensor, shape=(2, rows, tensor.shape[1]), stride=(0, 0, 0))
        self._storages.append(Storage(nbytes=room.nbytes, role=Role.ACTIVATION))
        room = replace(room, storage=len(self._storages) - 1)
        begin = self._call("begin", weight, _fetch_of(weight, number), (), (room,))
        begin = replace(
            begin,
            args=(weight, count),
            collective=_over(FAR_IN, Exchange.FETCH, tensor.nbytes),
        )
        end = self._call("end", weight, _numbered(f"{weight}.end", number), (begin.name,))
        return self._first_line(begin), self._last_line(replace(end, waits_for=begin.name))

    def product(self, product: _Product) -> Instruction:
        node = product.node
        args = [a for place, a in enumerate(node.args) if place != product.place]
        how = "columns" if product.by_columns else "sum"
        self._products[node.name] = replace(
            node,
            op=f"{FAR_PRODUCTS}{how}",
            args=(product.weight, *args),
            inputs=product.without(node.inputs),
        )
        return _line(self._products[node.name])

    def before(self, name: str, value: str) -> tuple[Instruction, Instruction]:
        """Fetch what this value is added to, in room of its own."""
        (tensor,) = self._graph.by_name[value].outputs
        self._storages.append(Storage(nbytes=tensor.nbytes, role=Role.ACTIVATION))
        tensor = replace(tensor, storage=len(self._storages) - 1)
        return self._fetch(name, tensor, 0), self._fetched(name, tensor, 0)

    def send(self, name: str, value: str, *held: str) -> Instruction:
        nbytes = self._graph.by_name[value].outputs[0].nbytes
        link = _over(FAR_OUT, Exchange.SEND, nbytes)
        node = self._call("send", name, f"{name}.send", (value, *held))
        return self._last_line(replace(node, collective=link))

    def sent(self, name: str, value: str) -> Instruction:
        send = f"{name}.send"
        node = self._call("sent", name, f"{name}.sent", (send, value))
        return self._last_line(replace(node, waits_for=send))

    def _fetch(self, name: str, tensor: Tensor, number: int) -> Instruction:
        link = _over(FAR_IN, Exchange.FETCH, tensor.nbytes)
        node = self._call("fetch", name, _fetch_of(name, number), (), (tensor,))
        return self._first_line(replace(node, collective=link))

    def _fetched(self, name: str, tensor: Tensor, number: int) -> Instruction:
        fetch = _fetch_of(name, number)
        node = self._call("fetched", name, _numbered(name, number), (fetch,), (tensor,))
        return self._first_line(replace(node, waits_for=fetch))

    def _call(
        self,
        what: str,
        name: str,
        called: str,
        reads: tuple[str, ...],
        outputs: tuple[Tensor, ...] = (),
    ) -> Node:
        # Not of the forward pass: whatever names or counts that sees the step as captured.
        return Node(
            name=called,
            op=f"{FAR_CALLS}{what}_{_KINDS.get(name.partition(':')[0], 'state')}",
            args=(name, *(Ref(read) for read in reads)),
            inputs=reads,
            outputs=outputs,
            phase=self._phase,
            path="optimizer" if self._phase is Phase.UPDATE else name.partition(":")[2],
            signature=f"{FAR_CALLS}{what}",
        )

    def _first_line(self, node: Node) -> Instruction:
        self._first[node.name] = node
        return _line(node)

    def _last_line(self, node: Node) -> Instruction:
        self._last[node.name] = node
        return _line(node)

    def graph(self) -> Graph:
        """With what is fetched no longer there from the start."""
        inputs = {node.name: node for node in self._graph.inputs()}
        gone = {
            t.storage
            for name in {*self._first, *self._gone}
            if name in inputs
            for t in inputs[name].outputs
        }
        rest = (
            self._products.get(n.name, n)
            for n in self._graph.nodes
            if n.name not in self._first and n.name not in self._gone
        )
        return replace(
            self._graph,
            nodes=(*self._first.values(), *rest, *self._last.values()),
            storages=tuple(
                replace(s, role=Role.ACTIVATION) if number in gone else s
                for number, s in enumerate(self._storages)
            ),
        )


_KINDS = {"parameter": "weight", "gradient": "gradient"}


def rows_of_slice(rows: int, row_bytes: int, count: int) -> int:
    """Of each slice but the last: so many that each begins on a page of far memory."""
    step = FAR_PAGE_BYTES // gcd(row_bytes, FAR_PAGE_BYTES)
    return min(rows, -(-rows // (count * step)) * step)


def _over(axis: str, kind: Exchange, nbytes: int) -> Collective:
    return Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)


def _line(node: Node) -> Instruction:
    return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=node.phase)


def _numbered(name: str, number: int) -> str:
    return f"{name}@{number}" if number else name


def _fetch_of(name: str, number: int) -> str:
    return _numbered(f"{name}.fetch", number)


class _Running:
    """Lines counted in operators that run."""

    def __init__(self, graph: Graph, lines: Sequence[Instruction]) -> None:
        self._at: list[int] = []
        self._so_far: list[int] = []
        self._end = len(lines) - 1
        for number, line in enumerate(lines):
            self._so_far.append(len(self._at))
            node = graph.by_name[line.node]
            if line.sink is None and not node.is_free and not node.is_far:
                self._at.append(number)

    def before(self, number: int, count: int) -> int:
        """The line so many operators before this one."""
        place = self._so_far[number] - count
        return number if not count else self._at[max(0, place)] if self._at else number

    def behind(self, number: int, count: int) -> int:
        """The last line behind this one with no more than so many operators between."""
        place = self._so_far[number] + count
        return self._at[place] - 1 if place < len(self._at) else self._end

    def apart(self, reads: Sequence[int], lead: int) -> Iterator[int]:
        """The first of each run of lines that are less than ``lead`` operators apart."""
        last = None
        for number in reads:
            if last is None or self.before(number, lead) > last:
                yield number
            last = number


class _Looks:
    """Values that look at some weights; they look anew at each copy that is fetched."""

    def __init__(self, program: Program, weights: Sequence[str]) -> None:
        graph = program.graph
        self._graph = graph
        self._weight = {name: name for name in weights}
        for node in graph.nodes:
            if node.inputs and graph.is_look(node) and node.inputs[0] in self._weight:
                self._weight[node.name] = self._weight[node.inputs[0]]
        # By value: of copies too, which stand for the same.
        self.of = {i.value: i.node for i in program.instructions if i.node in self._weight}
        self._number: dict[str, int] = {}
        self._made: dict[str, str] = {}

    def reads(self, lines: Sequence[Instruction]) -> dict[str, list[int]]:
        """The lines that read each weight, or a look at it."""
        found: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            for weight in dict.fromkeys(map(self.weight_of, line.inputs)):
                if weight:
                    found.setdefault(weight, []).append(number)
        return found

    def weight_of(self, value: str) -> str:
        return self._weight.get(self.of.get(value, value), "")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._weight)

    def begin_anew(self, weight: str, number: int) -> None:
        """From here on it is this copy that is read."""
        self._number[weight] = number
        self._made = {n: v for n, v in self._made.items() if self._weight[n] != weight}
        self._made[weight] = _numbered(weight, number)

    def rewritten(self, line: Instruction) -> list[Instruction]:
        added: list[Instruction] = []
        inputs = tuple(self._now(self.of.get(i, i), line.phase, added) for i in line.inputs)
        return [*added, replace(line, inputs=inputs)]

    def _now(self, name: str, phase: Phase, added: list[Instruction]) -> str:
        weight = self._weight.get(name)
        if weight is None:
            return name
        if name not in self._made:
            node = self._graph.by_name[name]
            inputs = tuple(self._now(i, phase, added) for i in node.inputs)
            self._made[name] = _numbered(name, self._number[weight])
            added.append(Instruction(node=name, value=self._made[name], inputs=inputs, phase=phase))
        return self._made[name]
