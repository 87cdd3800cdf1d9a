"""Truncates each run of equal blocks of a deep model to three, and expands the traced graph.

Three checks make this sound. Before tracing, all siblings must agree in every attribute. After
tracing, the first, middle and last block must agree operator by operator. The forward pass of the
full model must make no other calls (see truncated_model.py). If a check fails, the caller traces
the full model. Not for running a step: that needs the full trace.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from steelyard.capture.deep.equal_blocks import describe_node
from steelyard.ir.graph import Argument, BlockRun, Graph, Node, Output, Ref, Storage, Tensor

KEPT = 3  # first, middle and last block
_CONSTANT = "constant:"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """A run of ``count`` equal siblings, from index ``first`` to the last one of the list."""

    first: int
    count: int

    def subset(self, blocks: list[nn.Module], num_blocks: int) -> list[nn.Module]:
        return [*blocks[: self.first + num_blocks - 1], blocks[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """A model whose runs of equal blocks are truncated to three; it shares the tensors of the
    original.
    """

    model: nn.Module
    runs: Mapping[str, BlockRange]


def cut(model: nn.Module, *, at_least: int = 6) -> Truncation | None:
    """Truncate the model; None if no run is long enough or its siblings may differ."""
    runs = {
        name: replace(run, first=run.first + 1, count=run.count - 1)
        if _is_frozen_before(model, name)
        else run
        for name, run in _find_runs(model, at_least).items()
    }
    if not runs:
        return None
    return Truncation(model=truncate_runs(model, runs), runs=runs)


def _is_frozen_before(model: nn.Module, run: str) -> bool:
    """True if no parameter before a run is trained, as with adapters.

    The backward pass then ends in the first block, which is unlike the others.
    """
    for name, parameter in model.named_parameters():
        if name.startswith(f"{run}."):
            return True
        if parameter.requires_grad:
            return False
    return True


def truncate_runs(model: nn.Module, runs: Mapping[str, BlockRange]) -> nn.Module:
    """Return the model with only these runs truncated to three blocks."""
    return _truncated(model, runs, {})


def with_one_more_block(model: nn.Module, runs: Mapping[str, BlockRange], prefix: str) -> nn.Module:
    """Return the truncated model with a fourth block in the run ``prefix``, to see what that
    adds.
    """
    return _truncated(model, runs, {prefix: KEPT + 1})


def _find_runs(model: nn.Module, at_least: int) -> dict[str, BlockRange]:
    runs: dict[str, BlockRange] = {}
    lengths: set[int] = set()
    for name, children in sibling_lists(model):
        run = _equal_to_the_end(children)
        if run.count >= at_least and not any(name.startswith(f"{n}.") for n in runs):
            runs[name] = run
            lengths.add(len(children))
    if _has_unequal_settings(model, lengths):
        return {}
    shared = _shared_parameters(model)
    return {n: run for n, run in runs.items() if not any(p.startswith(f"{n}.") for p in shared)}


def _shared_parameters(model: nn.Module) -> set[str]:
    """Return all names of the parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for group in names.values() if len(group) > 1 for name in group}


def expand_runs(graph: Graph, runs: Mapping[str, BlockRange]) -> Graph | None:
    """Expand the graph of a truncated model to the full model; None if the blocks differ."""
    graph = replace(graph, runs=())
    for prefix, run in runs.items():
        expanded = _GrowingRun(graph, prefix, run).expanded()
        if expanded is None or expanded.problems():
            return None
        graph = expanded
    return graph


def sibling_lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield name, list(module)


def _equal_to_the_end(blocks: list[nn.Module]) -> BlockRange:
    """Return the longest run that ends with the last sibling; the first ones often differ."""
    last = len(blocks) - 1
    first = last
    while first > 0 and _same(blocks[first - 1], blocks[last], first - 1, last):
        first -= 1
    return BlockRange(first=first, count=last + 1 - first)


def _same(a: Any, b: Any, at_a: int, at_b: int) -> bool:
    """True if the class and all attributes are equal.

    A number may be the block's own index, and a text may be a path with that index.
    """
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
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], at_a, at_b) for k in a)
    if isinstance(a, str):
        return a == b or _path_of(a, at_a) == _path_of(b, at_b)
    if isinstance(a, bool) or not isinstance(a, int):
        return isinstance(a, _PLAIN) and bool(a == b)
    return a == b or (a == at_a and b == at_b)


_PLAIN = (bool, float, tuple, type(None), torch.device, torch.dtype)


def _path_of(text: str, index: int) -> list[str]:
    """Return the parts of a path, with the block's index replaced by a star."""
    return ["*" if part == str(index) else part for part in text.split(".")]


def _attributes(module: nn.Module) -> dict[str, Any]:
    hidden = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    visible = {k: v for k, v in vars(module).items() if k not in hidden}
    # Empty hook tables are new objects in every module.
    return {
        k: v
        for k, v in visible.items()
        if v is not None and not (hasattr(v, "__len__") and not len(v))
    }


def _layouts(module: nn.Module) -> list[tuple[Any, ...]]:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [
        (name, None) if t is None else (name, tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
        for name, t in tensors
    ]


def _has_unequal_settings(model: nn.Module, counts: set[int]) -> bool:
    """True if a list of settings with a run's length (layer types, say) has different entries."""
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
                    and any(_entry(x, i) != _entry(setting[0], 0) for i, x in enumerate(setting))
                ):
                    return True
    return False


def _entry(value: Any, index: int) -> Any:
    """Return what an entry for one block says; a path to the block is equal for all blocks."""
    return _path_of(value, index) if isinstance(value, str) else repr(value)


def _truncated(
    model: nn.Module, runs: Mapping[str, BlockRange], more: Mapping[str, int], prefix: str = ""
) -> nn.Module:
    """Copy the module tree, not its tensors, with only three blocks in each run.

    ``more`` maps a run to another number of blocks.
    """
    copied = copy.copy(model)
    copied.__dict__ = dict(model.__dict__)
    children = dict(model._modules)
    if prefix in runs:
        blocks = [b for b in children.values() if b is not None]
        remaining = runs[prefix].subset(blocks, more.get(prefix, KEPT))
        children = {str(i): b for i, b in enumerate(remaining)}
    head = f"{prefix}." if prefix else ""
    copied.__dict__["_modules"] = {
        name: None if child is None else _truncated(child, runs, more, f"{head}{name}")
        for name, child in children.items()
    }
    return copied


class _GrowingRun:
    """Expands one run of three equal blocks in a graph to its full length.

    Blocks are numbered from the first one of the run: 0, 1 and 2 in the given graph.
    """

    def __init__(self, graph: Graph, prefix: str, run: BlockRange) -> None:
        self._graph = graph
        self._prefix = prefix
        self._first = run.first
        self._count = run.count
        self._block: dict[str, int] = {}
        self._members: dict[int, dict[str, list[Node]]] = {k: {} for k in range(KEPT)}
        self._readers = self._blocks_that_read_constants()
        for node in graph.nodes:
            block = self._block_of(node)
            if block is not None:
                self._block[node.name] = block
                kind = "input" if node.is_input else str(node.phase)
                self._members[block].setdefault(kind, []).append(node)
        # The corresponding node of the middle block, for each node of a block.
        self._middle: dict[str, str] = {}
        self._owner: dict[int, str] = {}
        for node in graph.nodes:
            for tensor in node.outputs:
                self._owner.setdefault(tensor.storage, node.name)
        self._storages = list(graph.storages)
        self._copied_storages: dict[tuple[int, int], int] = {}

    def expanded(self) -> Graph | None:
        if not self._equal():
            return None
        nodes: list[Node] = []
        done: set[str] = set()
        for node in self._graph.nodes:
            block = self._block.get(node.name)
            if block is None:
                if any(self._block.get(i) == 1 for i in node.inputs):
                    return None  # a node outside the run reads from the middle of it
                nodes.append(self._rewrite_outside(node))
                continue
            kind = "input" if node.is_input else str(node.phase)
            if kind in done:
                continue
            done.add(kind)
            order = range(self._count)
            for k in reversed(order) if kind == "backward" else order:
                nodes += [self._rewrite_copy(n, k) for n in self._members[self._template(k)][kind]]
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

    def _blocks_that_read_constants(self) -> dict[str, set[int | None]]:
        readers: dict[str, set[int | None]] = {}
        for node in self._graph.nodes:
            for name in node.inputs:
                if name.startswith(_CONSTANT):
                    readers.setdefault(name, set()).add(self._block_of(node))
        return readers

    def _block_of(self, node: Node) -> int | None:
        if node.name.startswith(_CONSTANT):
            # A constant that a single block reads, such as the scale of an adapter, is part of it.
            blocks = self._readers.get(node.name, {None})
            return next(iter(blocks)) if len(blocks) == 1 else None
        path = node.name.partition(":")[2] if node.is_input else node.path
        head = f"{self._prefix}."
        if not path.startswith(head):
            return None
        index = path[len(head) :].partition(".")[0]
        if not index.isdigit() or not 0 <= int(index) - self._first < KEPT:
            return None
        return int(index) - self._first

    def _equal(self) -> bool:
        for kind, middle in self._members[1].items():
            for block in (0, 2):
                others = self._members[block].get(kind, [])
                if [self._describe_node(n) for n in others] != [
                    self._describe_node(n) for n in middle
                ]:
                    return False
                self._middle.update(zip((n.name for n in others), (n.name for n in middle)))
            self._middle.update({n.name: n.name for n in middle})
        return (
            all(set(m) == set(self._members[1]) for m in self._members.values())
            and self._is_wired_equally()
        )

    def _describe_node(self, node: Node) -> str:
        inside = node.path[len(self._prefix) + 1 :].partition(".")[2]
        if node.is_input:
            inside = node.name.partition(":")[2][len(self._prefix) + 1 :].partition(".")[2]
        return describe_node(node, inside)

    def _is_wired_equally(self) -> bool:
        """True if all blocks read corresponding nodes, both their own and those of their
        neighbours.
        """
        counterparts = {
            (block, self._middle[n.name]): n
            for block in (0, 2)
            for members in self._members[block].values()
            for n in members
        }
        for members in self._members[1].values():
            for node in members:
                for block in (0, 2):
                    counterpart = counterparts[block, node.name]
                    for ours, theirs in zip(node.inputs, counterpart.inputs, strict=False):
                        if not self._corresponds(ours, theirs, block - 1):
                            return False
        return True

    def _corresponds(self, ours: str, theirs: str, shift: int) -> bool:
        mine, other = self._block.get(ours), self._block.get(theirs)
        if mine is None:
            return ours == theirs
        if other is None:
            # At the ends of the run, a node outside of it stands in for the missing neighbour.
            return not 0 <= mine + shift < KEPT
        return other == mine + shift and self._middle[ours] == self._middle[theirs]

    def _template(self, k: int) -> int:
        return 0 if k == 0 else 2 if k == self._count - 1 else 1

    def _name_in_copy(self, name: str, k: int) -> str:
        """Return the name that a block's node ``name`` has in copy ``k`` of the block."""
        middle = self._middle[name]
        if ":" not in middle or middle.startswith(_CONSTANT):
            return f"{middle}@{k}"
        head = f"{self._prefix}."
        kind, _, rest = middle.partition(":")
        inside = rest[len(head) :].partition(".")[2]
        return f"{kind}:{head}{self._first + k}.{inside}"

    def _copy_index(self, name: str, reader: int | None, k: int) -> int:
        """Return the copy that a reference means: an end of the run for outside readers, else by
        offset.
        """
        block = self._block[name]
        if reader is None:
            return 0 if block == 0 else self._count - 1
        return k + (block - reader)

    def _name(self, name: str, reader: int | None, k: int) -> str:
        if name not in self._block:
            return name
        return self._name_in_copy(name, self._copy_index(name, reader, k))

    def _storage(self, storage: int, reader: int | None, k: int) -> int:
        owner = self._owner[storage]
        if owner not in self._block:
            return storage
        index = self._copy_index(owner, reader, k)
        nth = [t.storage for t in self._graph.by_name[owner].outputs].index(storage)
        base = self._graph.by_name[self._middle[owner]].outputs[nth].storage
        if index == 1:
            return base
        copied = self._copied_storages.get((base, index))
        if copied is None:
            copied = self._copied_storages[base, index] = len(self._storages)
            self._storages.append(
                Storage(nbytes=self._storages[base].nbytes, role=self._storages[base].role)
            )
        return copied

    def _rewrite_outside(self, node: Node) -> Node:
        return self._rewritten(node, node.name, node.path, None, 0)

    def _rewrite_copy(self, node: Node, k: int) -> Node:
        reader = self._block[node.name]
        head = f"{self._prefix}."
        path = node.path
        if path:
            rest = path[len(head) :].partition(".")
            path = f"{head}{self._first + k}{rest[1]}{rest[2]}"
        return self._rewritten(node, self._name_in_copy(node.name, k), path, reader, k)

    def _rewritten(self, node: Node, name: str, path: str, reader: int | None, k: int) -> Node:
        def rewritten(argument: Argument) -> Argument:
            if isinstance(argument, Ref):
                return Ref(self._name(argument.name, reader, k))
            if isinstance(argument, tuple):
                return tuple(rewritten(a) for a in argument)
            return argument

        def tensor(t: Tensor) -> Tensor:
            storage = self._storage(t.storage, reader, k)
            return t if storage == t.storage else replace(t, storage=storage)

        return replace(
            node,
            name=name,
            path=path,
            args=tuple(rewritten(a) for a in node.args),
            kwargs=tuple((key, rewritten(a)) for key, a in node.kwargs),
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
                        output,
                        node=self._name_in_copy(output.node, k),
                        target=self._name_in_copy(output.target, k),
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
