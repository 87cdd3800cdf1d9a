"""Builds the graph of one rank: records its calls on local shards as nodes.

Each call runs on fake tensors to find its shapes, strides and aliases. Not for deciding which calls
to make: see partition.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.tracing.fake_execution import call_on_fakes
from steelyard.capture.tracing.to_ir import layout, signature_of_call, work_of_call
from steelyard.ir.collective import Exchange, Transport
from steelyard.ir.graph import Argument, Node, Phase, Ref, Role, Storage, Tensor
from steelyard.operators import live, operator_named
from steelyard.passes.graph_editor import issue, wait


class LocalGraphBuilder:
    """The nodes recorded so far, and a fake tensor for each of their values."""

    def __init__(
        self, *, axis: str, num_ranks: int, rank: int, transport: Transport, device: torch.device
    ) -> None:
        self.num_ranks = num_ranks
        self.rank = rank
        self.nodes: list[Node] = []
        self.storages: list[Storage] = []
        self.by_name: dict[str, Node] = {}
        self._axis = axis
        self._transport = transport
        # The device of all inputs; a graph does not record it.
        self._device = device
        self._mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[str, Any] = {}
        self._numbers: dict[int, int] = {}
        self._counts: Counter[str] = Counter()

    def input(self, node: Node, tensor: Tensor, storage: Storage) -> None:
        with self._mode:
            fake = torch.empty_strided(
                tensor.shape,
                tensor.stride,
                dtype=getattr(torch, tensor.dtype),
                device=self._device,
            )
        number = self._numbers[_torch.storage_key(fake)] = len(self.storages)
        self.storages.append(storage)
        self._add(replace(node, outputs=(replace(tensor, storage=number),)), fake)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.by_name[name].outputs[0].shape

    def tensor(self, name: str) -> Tensor:
        return self.by_name[name].outputs[0]

    def can_be_viewed(self, name: str, shape: Sequence[Argument]) -> bool:
        try:
            with self._mode:
                self._values[name].view(shape)
        except (RuntimeError, ValueError):  # ValueError: from torch's fake kernel (2.13)
            return False
        return True

    def getitem(self, source: str, index: Argument, *, at: Node, name: str = "") -> str:
        assert isinstance(index, int)
        value = self._values[source][index]
        made = Node(
            name=name or self._unique(f"{source}_{index}"),
            op="getitem",
            args=(Ref(source), index),
            inputs=(source,),
            outputs=self._tensors_of(value),
            phase=at.phase,
            path=at.path,
            line=at.line,
            nth=at.nth if name else -1,
            is_view=True,
        )
        return self._add(made, value)

    def like(self, node: Node, args: tuple[Argument, ...], *, kwargs: Any = None) -> str:
        """Record a captured node under its own name, with other arguments."""
        named = node.kwargs if kwargs is None else kwargs
        return self._call(node.op, args, named, at=node, name=node.name)

    def call(self, op: str, *args: Argument, at: Node, suffix: str = "", **kwargs: Argument) -> str:
        """Record an added call, attributed to the module, line and phase of the node ``at``."""
        name = self._unique(f"{at.name}_{suffix or op.split('.')[1]}")
        return self._call(op, args, tuple(kwargs.items()), at=at, name=name)

    def exchange(self, kind: Exchange, value: str, *, at: Node) -> str:
        """Issue a collective on a contiguous value and wait for it at once."""
        source = self.by_name[value]
        tensor = source.outputs[0]
        shape = list(tensor.shape)
        whole = tensor.nbytes
        if kind is Exchange.ALL_GATHER:
            shape[0] *= self.num_ranks
            whole *= self.num_ranks
        elif kind is Exchange.REDUCE_SCATTER:
            shape[0] //= self.num_ranks
        with self._mode:
            fake = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device=self._device)
        collective = self._transport.collective(
            kind, axis=self._axis, num_ranks=self.num_ranks, nbytes=whole
        )
        (output,) = self._tensors_of(fake)
        issued = issue(
            collective,
            replace(source, phase=at.phase, path=at.path, line=at.line),
            name=self._unique(f"{value}_{_NAME_SUFFIX[kind]}"),
            output=output,
            moved_bytes=0 if kind is Exchange.ALL_GATHER else 2 * tensor.nbytes,
        )
        self._add(replace(issued, nth=-1), fake)
        return self._add(replace(wait(issued, self._transport), nth=-1), fake)

    def _call(
        self,
        op: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        *,
        at: Node,
        name: str,
    ) -> str:
        target = operator_named(op)
        live_args = [live(a, self._values) for a in args]
        live_kwargs = {key: live(a, self._values) for key, a in kwargs}
        with self._mode:
            result = call_on_fakes(target, live_args, live_kwargs)
        inputs = tuple(dict.fromkeys(_names((*args, *(a for _, a in kwargs)))))
        known = {t.storage for i in inputs for t in self.by_name[i].outputs}
        outputs = self._tensors_of(result)
        is_view = bool(outputs) and all(t.storage in known for t in outputs)
        moved = sum(t.nbytes for i in inputs for t in self.by_name[i].outputs)
        operator = target if isinstance(target, _torch.OpOverload) else None
        names = {id(self._values[i]): i for i in inputs}
        node = Node(
            name=name,
            op=op,
            args=args,
            kwargs=kwargs,
            inputs=inputs,
            outputs=outputs,
            phase=at.phase,
            path=at.path,
            line=at.line,
            nth=at.nth if name == at.name else -1,
            signature=signature_of_call(
                operator or op,
                live_args,
                live_kwargs,
                layout_of=layout,
                name_of=lambda t: names.get(id(t), ""),
            ),
            **(work_of_call(operator, live_args, live_kwargs, result) if operator else {}),
            moved_bytes=0 if is_view else moved + sum(t.nbytes for t in outputs),
            is_view=is_view,
            is_random=operator is not None and _torch.draws(operator, live_args, live_kwargs),
        )
        return self._add(node, result)

    def _add(self, node: Node, value: Any) -> str:
        assert node.name not in self.by_name, node.name
        self.nodes.append(node)
        self.by_name[node.name] = node
        self._values[node.name] = value
        return node.name

    def _tensors_of(self, value: Any) -> tuple[Tensor, ...]:
        found = []
        for leaf in _torch.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                key = _torch.storage_key(leaf)
                number = self._numbers.get(key)
                if number is None:
                    number = self._numbers[key] = len(self.storages)
                    nbytes = int(leaf.untyped_storage().nbytes())
                    self.storages.append(Storage(nbytes=nbytes, role=Role.ACTIVATION))
                found.append(
                    Tensor(
                        shape=tuple(leaf.shape),
                        stride=tuple(leaf.stride()),
                        dtype=str(leaf.dtype).removeprefix("torch."),
                        storage=number,
                        offset=int(leaf.storage_offset()),
                        pending="conj" * leaf.is_conj() + "neg" * leaf.is_neg(),
                    )
                )
        return tuple(found)

    def _unique(self, name: str) -> str:
        self._counts[name] += 1
        count = self._counts[name]
        return f"{name}_{count}" if count > 1 else name


_NAME_SUFFIX = {
    Exchange.ALL_REDUCE: "summed",
    Exchange.ALL_GATHER: "gathered",
    Exchange.REDUCE_SCATTER: "scattered",
}


def _names(arguments: Iterable[Argument]) -> list[str]:
    found: list[str] = []
    for argument in arguments:
        if isinstance(argument, Ref):
            found.append(argument.name)
        elif isinstance(argument, tuple):
            found += _names(argument)
    return found


def number_calls(nodes: Iterable[Node]) -> list[Node]:
    """Number the calls that were added; captured calls keep their ``nth``, and added ones come
    after them.
    """
    nodes = list(nodes)
    taken: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.phase is Phase.FORWARD:
            taken[node.path, node.op] = max(taken[node.path, node.op], node.nth + 1)
    result = []
    for node in nodes:
        if node.nth < 0:
            nth = 0
            if node.phase is Phase.FORWARD:
                nth = taken[node.path, node.op]
                taken[node.path, node.op] += 1
            node = replace(node, nth=nth)
        result.append(node)
    return result
