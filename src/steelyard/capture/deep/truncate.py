"""Plan a deep model from three of its blocks: cut each run of alike siblings, trace, multiply.

Sound only because it is checked three times: before tracing, that all siblings agree in every
attribute; after it, that first, middle and last block agree operator by operator; and that the
forward pass of the whole makes no other calls (see capture/step.py). Where one fails the caller
traces the whole. Not for running: that takes the whole trace.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from steelyard.capture.deep.equal_blocks import sketch
from steelyard.ir.graph import Argument, BlockRun, Graph, Node, Output, Ref, Storage, Tensor

_KEPT = 3  # first, middle, last


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """``count`` alike siblings from index ``first`` to the end; what stands before is kept."""

    first: int
    count: int

    def kept(self, blocks: list[nn.Module], number: int) -> list[nn.Module]:
        return [*blocks[: self.first + number - 1], blocks[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """A model with its runs of alike blocks shortened to three; shares all tensors."""

    model: nn.Module
    stretches: Mapping[str, BlockRange]


def cut(model: nn.Module, *, at_least: int = 6) -> Truncation | None:
    """None where no run is long enough or its siblings are not provably alike."""
    stretches = _stretches(model, at_least)
    if not stretches:
        return None
    return Truncation(model=cut_to(model, stretches), stretches=stretches)


def cut_to(model: nn.Module, stretches: Mapping[str, BlockRange]) -> nn.Module:
    """With three blocks in these runs alone."""
    return _shortened(model, stretches, {})


def with_one_more(model: nn.Module, stretches: Mapping[str, BlockRange], prefix: str) -> nn.Module:
    """The same, but with four blocks in the run ``prefix``: to see what a block adds."""
    return _shortened(model, stretches, {prefix: _KEPT + 1})


def _stretches(model: nn.Module, at_least: int) -> dict[str, BlockRange]:
    stretches: dict[str, BlockRange] = {}
    lengths: set[int] = set()
    for name, children in _sibling_lists(model):
        stretch = _alike_to_the_end(children)
        if stretch.count >= at_least and not any(name.startswith(f"{n}.") for n in stretches):
            stretches[name] = stretch
            lengths.add(len(children))
    return {} if _told_apart_elsewhere(model, lengths) else stretches


def multiplied(graph: Graph, stretches: Mapping[str, BlockRange]) -> Graph | None:
    """The graph of the whole model; None where the three blocks are not equal after all."""
    graph = replace(graph, runs=())
    for prefix, stretch in stretches.items():
        grown = _GrowingRun(graph, prefix, stretch).grown()
        if grown is None or grown.problems():
            return None
        graph = grown
    return graph


def _sibling_lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield name, list(module)


def _alike_to_the_end(blocks: list[nn.Module]) -> BlockRange:
    """The longest stretch that ends with the last sibling; the first ones often differ."""
    last = len(blocks) - 1
    first = last
    while first > 0 and _same(blocks[first - 1], blocks[last], first - 1, last):
        first -= 1
    return BlockRange(first=first, count=last + 1 - first)


def _same(a: Any, b: Any, at_a: int, at_b: int) -> bool:
    """Equal in class and every attribute; a number may differ if it is the block's own index."""
    if type(a) is not type(b):
        return False
    if isinstance(a, nn.Module):
        tensors_agree = _layouts(a) == _layouts(b)
        mine, theirs = _attributes(a), _attributes(b)
        return (
            tensors_agree
            and mine.keys() == theirs.keys()
            and a._modules.keys() == b._modules.keys()
            and all(_same(mine[k], theirs[k], at_a, at_b) for k in mine)
            and all(_same(a._modules[k], b._modules[k], at_a, at_b) for k in a._modules)
        )
    if a is b:
        return True
    if isinstance(a, bool) or not isinstance(a, int):
        return isinstance(a, (bool, float, str, tuple, type(None))) and bool(a == b)
    return a == b or (a == at_a and b == at_b)


def _attributes(module: nn.Module) -> dict[str, Any]:
    hidden = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    kept = {k: v for k, v in vars(module).items() if k not in hidden}
    # Empty hook tables are new objects in every module.
    return {
        k: v
        for k, v in kept.items()
        if v is not None and not (hasattr(v, "__len__") and not len(v))
    }


def _layouts(module: nn.Module) -> list[tuple[Any, ...]]:
    held = [*module._parameters.items(), *module._buffers.items()]
    return [
        (name, None) if t is None else (name, tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
        for name, t in held
    ]


def _told_apart_elsewhere(model: nn.Module, counts: set[int]) -> bool:
    """Whether some list as long as a run gives its blocks different settings (layer types)."""
    seen: set[int] = set()
    for module in model.modules():
        for value in vars(module).values():
            settings = vars(value) if hasattr(value, "to_dict") else {"": value}
            if id(value) in seen:
                continue
            seen.add(id(value))
            for setting in settings.values():
                if (
                    isinstance(setting, (list, tuple))
                    and len(setting) in counts
                    and any(repr(x) != repr(setting[0]) for x in setting)
                ):
                    return True
    return False


def _shortened(
    model: nn.Module, stretches: Mapping[str, BlockRange], more: Mapping[str, int], prefix: str = ""
) -> nn.Module:
    """A copy of the module tree, not of its tensors, with only three blocks of each run.

    ``more`` says of which run there are to be more.
    """
    twin = copy.copy(model)
    twin.__dict__ = dict(model.__dict__)
    children = dict(model._modules)
    if prefix in stretches:
        blocks = [b for b in children.values() if b is not None]
        kept = stretches[prefix].kept(blocks, more.get(prefix, _KEPT))
        children = {str(i): b for i, b in enumerate(kept)}
    head = f"{prefix}." if prefix else ""
    twin.__dict__["_modules"] = {
        name: None if child is None else _shortened(child, stretches, more, f"{head}{name}")
        for name, child in children.items()
    }
    return twin


class _GrowingRun:
    """One run of three equal blocks in a graph, about to be grown to its full length.

    Blocks are counted from the first of the run: 0, 1 and 2 in the graph at hand.
    """

    def __init__(self, graph: Graph, prefix: str, stretch: BlockRange) -> None:
        self._graph = graph
        self._prefix = prefix
        self._first = stretch.first
        self._count = stretch.count
        self._block: dict[str, int] = {}
        self._members: dict[int, dict[str, list[Node]]] = {k: {} for k in range(_KEPT)}
        for node in graph.nodes:
            block = self._block_of(node)
            if block is not None:
                self._block[node.name] = block
                kind = "input" if node.is_input else str(node.phase)
                self._members[block].setdefault(kind, []).append(node)
        # Each block's nodes by the name of the middle block's node at the same place.
        self._middle: dict[str, str] = {}
        self._owner: dict[int, str] = {}
        for node in graph.nodes:
            for tensor in node.outputs:
                self._owner.setdefault(tensor.storage, node.name)
        self._storages = list(graph.storages)
        self._copied: dict[tuple[int, int], int] = {}

    def grown(self) -> Graph | None:
        if not self._equal():
            return None
        nodes: list[Node] = []
        done: set[str] = set()
        for node in self._graph.nodes:
            block = self._block.get(node.name)
            if block is None:
                if any(self._block.get(i) == 1 for i in node.inputs):
                    return None  # something outside looks into the middle of the run
                nodes.append(self._outside(node))
                continue
            kind = "input" if node.is_input else str(node.phase)
            if kind in done:
                continue
            done.add(kind)
            order = range(self._count)
            for k in reversed(order) if kind == "backward" else order:
                nodes += [self._copy(n, k) for n in self._members[self._template(k)][kind]]
        return replace(
            self._graph,
            nodes=tuple(nodes),
            storages=tuple(self._storages),
            outputs=tuple(self._outputs()),
            runs=(
                *self._graph.runs,
                BlockRun(prefix=self._prefix, first=self._first, count=self._count),
            ),
            unused=tuple(self._unused()),
        )

    def _block_of(self, node: Node) -> int | None:
        path = node.name.partition(":")[2] if node.is_input else node.path
        head = f"{self._prefix}."
        if not path.startswith(head):
            return None
        index = path[len(head) :].partition(".")[0]
        if not index.isdigit() or not 0 <= int(index) - self._first < _KEPT:
            return None
        return int(index) - self._first

    def _equal(self) -> bool:
        for kind, middle in self._members[1].items():
            for block in (0, 2):
                others = self._members[block].get(kind, [])
                if [self._sketch(n) for n in others] != [self._sketch(n) for n in middle]:
                    return False
                self._middle.update(zip((n.name for n in others), (n.name for n in middle)))
            self._middle.update({n.name: n.name for n in middle})
        return (
            all(set(m) == set(self._members[1]) for m in self._members.values()) and self._wired()
        )

    def _sketch(self, node: Node) -> str:
        inside = node.path[len(self._prefix) + 1 :].partition(".")[2]
        if node.is_input:
            inside = node.name.partition(":")[2][len(self._prefix) + 1 :].partition(".")[2]
        return sketch(node, inside)

    def _wired(self) -> bool:
        """Whether the blocks read from themselves and their neighbours at the same places."""
        twins = {
            (block, self._middle[n.name]): n
            for block in (0, 2)
            for members in self._members[block].values()
            for n in members
        }
        for members in self._members[1].values():
            for node in members:
                for block in (0, 2):
                    twin = twins[block, node.name]
                    for ours, theirs in zip(node.inputs, twin.inputs, strict=False):
                        if not self._same_place(ours, theirs, block - 1):
                            return False
        return True

    def _same_place(self, ours: str, theirs: str, shift: int) -> bool:
        mine, other = self._block.get(ours), self._block.get(theirs)
        if mine is None:
            return ours == theirs
        if other is None:
            # At the ends of the run a neighbour is replaced by what comes before or after it.
            return not 0 <= mine + shift < _KEPT
        return other == mine + shift and self._middle[ours] == self._middle[theirs]

    def _template(self, k: int) -> int:
        return 0 if k == 0 else 2 if k == self._count - 1 else 1

    def _at(self, name: str, k: int) -> str:
        """The name of copy ``k`` of the node that is ``name`` in its own block."""
        middle = self._middle[name]
        if ":" not in middle:
            return f"{middle}@{k}"
        head = f"{self._prefix}."
        kind, _, rest = middle.partition(":")
        inside = rest[len(head) :].partition(".")[2]
        return f"{kind}:{head}{self._first + k}.{inside}"

    def _index(self, name: str, reader: int | None, k: int) -> int:
        """Which copy a reference means: the ends for outside readers, else the neighbour's."""
        block = self._block[name]
        if reader is None:
            return 0 if block == 0 else self._count - 1
        return k + (block - reader)

    def _name(self, name: str, reader: int | None, k: int) -> str:
        if name not in self._block:
            return name
        return self._at(name, self._index(name, reader, k))

    def _storage(self, storage: int, reader: int | None, k: int) -> int:
        owner = self._owner[storage]
        if owner not in self._block:
            return storage
        index = self._index(owner, reader, k)
        nth = [t.storage for t in self._graph.by_name[owner].outputs].index(storage)
        base = self._graph.by_name[self._middle[owner]].outputs[nth].storage
        if index == 1:
            return base
        copied = self._copied.get((base, index))
        if copied is None:
            copied = self._copied[base, index] = len(self._storages)
            self._storages.append(
                Storage(nbytes=self._storages[base].nbytes, role=self._storages[base].role)
            )
        return copied

    def _outside(self, node: Node) -> Node:
        return self._moved(node, node.name, node.path, None, 0)

    def _copy(self, node: Node, k: int) -> Node:
        reader = self._block[node.name]
        head = f"{self._prefix}."
        path = node.path
        if path:
            rest = path[len(head) :].partition(".")
            path = f"{head}{self._first + k}{rest[1]}{rest[2]}"
        return self._moved(node, self._at(node.name, k), path, reader, k)

    def _moved(self, node: Node, name: str, path: str, reader: int | None, k: int) -> Node:
        def moved(argument: Argument) -> Argument:
            if isinstance(argument, Ref):
                return Ref(self._name(argument.name, reader, k))
            if isinstance(argument, tuple):
                return tuple(moved(a) for a in argument)
            return argument

        def tensor(t: Tensor) -> Tensor:
            storage = self._storage(t.storage, reader, k)
            return t if storage == t.storage else replace(t, storage=storage)

        return replace(
            node,
            name=name,
            path=path,
            args=tuple(moved(a) for a in node.args),
            kwargs=tuple((key, moved(a)) for key, a in node.kwargs),
            inputs=tuple(self._name(i, reader, k) for i in node.inputs),
            outputs=tuple(tensor(t) for t in node.outputs),
        )

    def _outputs(self) -> Iterator[Output]:
        for output in self._graph.outputs:
            block = self._block.get(output.target)
            if block is None:
                yield replace(output, node=self._name(output.node, None, 0))
            elif block == 1:
                for k in range(self._count):
                    yield replace(
                        output, node=self._at(output.node, k), target=self._at(output.target, k)
                    )

    def _unused(self) -> Iterator[str]:
        head = f"{self._prefix}."
        for name in self._graph.unused:
            index, _, inside = name.removeprefix(head).partition(".")
            if not name.startswith(head):
                yield name
            elif index == str(self._first + 1):
                yield from (f"{head}{self._first + k}.{inside}" for k in range(self._count))
            elif not index.isdigit() or int(index) < self._first:
                yield name
