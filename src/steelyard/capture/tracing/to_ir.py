"""Converts a traced fx graph to a torch-free Graph: names, bytes, flops, paths, aliases.

Not for tracing (see joint_graph.py), nor for assigning nodes without a path (see source_lines.py).
"""

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from steelyard import _torch
from steelyard.capture.tracing.joint_graph import Trace
from steelyard.capture.tracing.source_lines import line_of, path_of, with_paths
from steelyard.errors import CaptureRefused
from steelyard.ir.graph import (
    Argument,
    Graph,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    Role,
    Storage,
    Symbol,
    Tensor,
)
from steelyard.operators.flops import flops_of_call, format_of_call
from steelyard.operators.missing_flops import may_multiply_uncounted

_REDUCED_IN_PLACE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}
# Identities that only autograd needs; they are dropped, so that they cost nothing to run.
_IDENTITIES = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


def to_graph(trace: Trace, *, decomposition: str) -> Graph:
    reader = _Reader(trace)
    for node in trace.joint.graph.nodes:
        reader.read(node)
    outputs = tuple(replace(o, node=reader.name(o.node)) for o in trace.outputs)
    nodes, outputs = _own_gradients(reader, outputs)
    return Graph(
        nodes=with_paths(_numbered(nodes)),
        storages=tuple(reader.storages),
        outputs=outputs,
        decomposition=decomposition,
        unused=tuple(name.partition(":")[2] for name in trace.missing),
    )


class _Reader:
    """Converts fx nodes one by one, numbering the fake storages."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._storage_numbers: dict[int, int] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # a freed fake storage's key could be reused
        self._renamed: dict[str, str] = {}
        self._is_backward = False
        self.storages: list[Storage] = []
        self.nodes: list[Node] = []

    def name(self, fx_name: str) -> str:
        return self._renamed.get(fx_name, fx_name)

    def read(self, node: torch.fx.Node) -> None:
        if node.op == "placeholder":
            self._read_placeholder(node)
        elif node.op == "get_attr":
            self._read_attribute(node)
        elif node.op == "call_function":
            if node.target in _IDENTITIES and isinstance(node.args[0], torch.fx.Node):
                self._share_storages(node)
                self._renamed[node.name] = self.name(node.args[0].name)
            else:
                self._read_call(node)

    def _read_placeholder(self, node: torch.fx.Node) -> None:
        placeholder = self._trace.placeholders[node.name]
        if placeholder.name in (n.name for n in self.nodes if n.is_input):
            # A tied weight has one placeholder for each of its names, but is one tensor.
            self._renamed[node.name] = placeholder.name
            return
        self._renamed[node.name] = placeholder.name
        self.nodes.append(
            Node(
                name=placeholder.name,
                op="input",
                outputs=self._tensors(node.meta.get("val"), role=placeholder.role),
            )
        )

    def _read_attribute(self, node: torch.fx.Node) -> None:
        value = getattr(self._trace.joint, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise CaptureRefused(
                f"the step contains a control-flow operator ({node.target})",
                expected="straight-line operators",
                remedy="replace cond, while_loop or scan by plain operators in the model",
            )
        name = f"constant:{node.target}"
        self._renamed[node.name] = name
        meta = node.meta.get("val", value)
        if name in self._constants:
            # A constant has one attribute node for each of its readers, but is one tensor.
            self._share_storage(meta, self._storage(self._constants[name], Role.CONSTANT))
            return
        self._trace.constants[name] = value
        self._constants[name] = meta
        self.nodes.append(
            Node(name=name, op="input", outputs=self._tensors(meta, role=Role.CONSTANT))
        )

    def _read_call(self, node: torch.fx.Node) -> None:
        self._share_storages(node)
        outputs = self._tensors(node.meta.get("val"), role=Role.ACTIVATION)
        inputs = tuple(self.name(i.name) for i in node.all_input_nodes)
        own, read = _tensors_in(node), [t for i in node.all_input_nodes for t in _tensors_in(i)]
        adjusted = adjusted_storage(node.target, own, read)
        if adjusted is not None:
            number = outputs[adjusted[0]].storage
            self.storages[number] = replace(self.storages[number], nbytes=adjusted[1])
        known = {self._number(t) for t in read}
        is_view = bool(own) and all(self._number(t) in known for t in own)
        # Not all of the backward pass is tagged (a custom autograd.Function is not), but it is
        # traced after the forward pass.
        self._is_backward |= node.meta.get("partitioner_tag") == "is_backward"
        call = Node(
            name=node.name,
            op="getitem",
            args=tuple(plain_argument(a, self._ref) for a in node.args),
            kwargs=tuple((k, plain_argument(v, self._ref)) for k, v in node.kwargs.items()),
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=outputs,
            phase=Phase.BACKWARD if self._is_backward else Phase.FORWARD,
            path=path_of(node),
            line=line_of(node),
            is_view=is_view,
        )
        if node.target is operator.getitem:
            self.nodes.append(call)
            return
        target = node.target
        if not isinstance(target, _torch.OpOverload):
            raise CaptureRefused(
                f"the step calls {getattr(target, '__name__', target)}, which is not an operator "
                "of torch.ops" + (f" at {line_of(node)}" if line_of(node) else ""),
                expected="operators of torch.ops",
                remedy="replace it in the model by plain operators",
            )
        mutated = _torch.mutates(target)
        moved = sum(map(_nbytes, read))
        self.nodes.append(
            replace(
                call,
                op=str(target),
                signature=signature_of_call(
                    target,
                    node.args,
                    node.kwargs,
                    layout_of=_layouts,
                    name_of=lambda n: self.name(n.name),
                ),
                **_work(node),
                moved_bytes=0 if is_view else moved + sum(_nbytes(t) for t in own),
                is_view=is_view and not mutated,
                is_random=_torch.draws(target, node.args, node.kwargs),
                mutates=inputs[:1] if mutated else (),
            )
        )

    def _share_storages(self, node: torch.fx.Node) -> None:
        """Let a view share its source's storage.

        Tracing gives views of frozen weights and constants a storage of their own.
        """
        target = node.target
        if not isinstance(target, _torch.OpOverload) or not _torch.is_view(target):
            return
        source = next((t for i in node.all_input_nodes for t in _tensors_in(i)), None)
        if source is not None:
            number = self._storage(source, Role.ACTIVATION)
            for tensor in _tensors_in(node):
                self._share_storage(tensor, number)

    def _share_storage(self, tensor: torch.Tensor, number: int) -> None:
        self._storage_numbers.setdefault(_torch.storage_key(tensor), number)
        self._alive.append(tensor)

    def _tensors(self, value: Any, *, role: Role) -> tuple[Tensor, ...]:
        found = []
        for leaf in _torch.tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.layout is not torch.strided:
                raise CaptureRefused(
                    f"the step makes a tensor of layout {leaf.layout}",
                    expected="strided tensors",
                    remedy="use dense gradients, for example nn.Embedding(..., sparse=False)",
                )
            found.append(
                Tensor(
                    shape=tuple(int(s) for s in leaf.shape),
                    stride=tuple(int(s) for s in leaf.stride()),
                    dtype=str(leaf.dtype).removeprefix("torch."),
                    storage=self._storage(leaf, role),
                    offset=int(leaf.storage_offset()),
                    pending=_pending(leaf),
                )
            )
        return tuple(found)

    def _storage(self, tensor: torch.Tensor, role: Role) -> int:
        key = _torch.storage_key(tensor)
        number = self._storage_numbers.get(key)
        if number is None:
            number = len(self.storages)
            self._storage_numbers[key] = number
            self._alive.append(tensor)
            nbytes = int(tensor.untyped_storage().nbytes())
            if role is Role.BATCH and not tensor.storage_offset():
                # From torch 2.14 on, a micro-batch has the storage of the whole batch here.
                nbytes = min(nbytes, _bytes_in(tensor))
            self.storages.append(Storage(nbytes=nbytes, role=role))
        return number

    def _number(self, tensor: torch.Tensor) -> int:
        return self._storage_numbers[_torch.storage_key(tensor)]

    def new_storage(self, nbytes: int) -> int:
        self.storages.append(Storage(nbytes=nbytes, role=Role.ACTIVATION))
        return len(self.storages) - 1

    def _ref(self, node: torch.fx.Node) -> Ref:
        return Ref(self.name(node.name))


def adjusted_storage(
    target: Any, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[int, int] | None:
    """Return a result whose storage is larger than its fake, by its number, and the bytes of it."""
    if target in _REDUCED_IN_PLACE and not results[0].dim():
        # The mean shares the storage of the elementwise differences it is computed from.
        return 0, max(map(_nbytes, inputs))
    if target is torch.ops.aten._embedding_bag.default:
        # This result is the bag of each index, for which the kernel (torch 2.13, CPU) allocates one
        # element more.
        return 1, int(results[1].untyped_storage().nbytes()) + torch.int64.itemsize
    return None


def _bytes_in(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element."""
    return covered_elements(tensor.shape, tensor.stride()) * tensor.element_size()


def covered_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((int(n) - 1) * int(step) for n, step in zip(shape, stride, strict=True))


def plain_argument(value: Any, ref: Callable[[Any], Ref]) -> Argument:
    """Convert an operator's argument to plain data; ``ref`` names its tensors."""
    match value:
        case torch.fx.Node() | torch.Tensor():
            return ref(value)
        case list() | tuple():
            return tuple(plain_argument(v, ref) for v in value)
        case None | bool() | int() | float() | complex() | str():
            return value
        case torch.dtype() | torch.layout() | torch.memory_format():
            return Symbol(str(value))
        case torch.device():
            return symbol_of(value)
    raise CaptureRefused(
        f"an operator has an argument that is not a plain value: {str(value)[:80]}",
        expected="tensors, numbers, strings and dtypes",
        remedy="use fixed sizes in the model; shapes must not depend on tensor values",
    )


def symbol_of(device: torch.device) -> Symbol:
    """Return a device as a symbol, without the index of the current GPU, which differs between
    ranks.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda") if device.index == torch.cuda.current_device() else device
    return Symbol(f"torch.device({str(device)!r})")


def signature_of_call(
    target: Any,
    args: Any,
    kwargs: Any,
    *,
    layout_of: Callable[[Any], str],
    name_of: Callable[[Any], str],
) -> str:
    """Return the key for measured costs: operator, layouts of tensors and plain arguments.

    A repeated tensor is marked: ``x * x`` reads half of what ``x * y`` reads.
    """
    position_of: dict[str, int] = {}

    def describe(value: Any) -> str:
        if isinstance(value, (torch.fx.Node, torch.Tensor)):
            name = name_of(value)
            repeated = f"={position_of[name]}" if name in position_of else ""
            position_of.setdefault(name, len(position_of))
            return f"{layout_of(value)}{repeated}"
        if isinstance(value, (list, tuple)):
            return f"[{','.join(describe(v) for v in value)}]"
        return str(value)

    parts = [describe(a) for a in args]
    parts += [f"{k}={describe(v)}" for k, v in kwargs.items()]
    return f"{target}({';'.join(parts)})"


def _layouts(node: torch.fx.Node) -> str:
    return "+".join(layout(t) for t in _tensors_in(node))


def layout(tensor: torch.Tensor) -> str:
    return (
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{_stride_note(tensor)}"
        f"{_pending(tensor)}"
    )


def _pending(tensor: torch.Tensor) -> str:
    return "conj" * tensor.is_conj() + "neg" * tensor.is_neg()


def _stride_note(tensor: torch.Tensor) -> str:
    return "" if tensor.is_contiguous() else f"~{list(tensor.stride())}"


def _tensors_in(node: torch.fx.Node) -> list[torch.Tensor]:
    leaves = _torch.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def work_of_call(target: Any, args: Any, kwargs: Any, result: Any) -> dict[str, Any]:
    """Return the node fields for a call's flops and their dtype, and a flag if the flops are
    unknown.
    """
    flops = flops_of_call(target, args, kwargs, result)
    return {
        "flops": flops,
        "multiplies_in": format_of_call(args) if flops else "",
        "is_uncounted": may_multiply_uncounted(target, args, kwargs, result),
    }


def _work(node: torch.fx.Node) -> dict[str, Any]:
    def value(n: torch.fx.Node) -> Any:
        return n.meta.get("val")

    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    return work_of_call(node.target, args, kwargs, node.meta.get("val"))


def _numbered(nodes: list[Node]) -> list[Node]:
    """Number the forward calls of each operator within each module."""
    calls: Counter[tuple[str, str]] = Counter()
    numbered = []
    for node in nodes:
        if node.phase is Phase.FORWARD and not node.is_input:
            nth = calls[node.path, node.op]
            calls[node.path, node.op] += 1
            node = replace(node, nth=nth)
        numbered.append(node)
    return numbered


def _own_gradients(
    reader: _Reader, outputs: tuple[Output, ...]
) -> tuple[list[Node], tuple[Output, ...]]:
    """Give each gradient its own storage with the strides of its parameter, as autograd would.

    Two parameters may get the same tensor (``a + b``), or an expanded or transposed view. Without
    the copy, clipping one gradient in place would change the other.
    """
    nodes = list(reader.nodes)
    by_name = {node.name: node for node in nodes}
    taken = {t.storage for n in nodes if n.is_input for t in n.outputs}
    owned: list[Output] = []
    for output in outputs:
        if output.kind is not OutputKind.GRADIENT:
            owned.append(output)
            continue
        gradient, parameter = by_name[output.node].outputs[0], by_name[output.target].outputs[0]
        if gradient.stride == parameter.stride and gradient.storage not in taken:
            taken.add(gradient.storage)
            owned.append(output)
            continue
        source = by_name[output.node]
        clone = _clone(reader, source, parameter, len(owned))
        # The copy belongs to the backward pass, although its source may belong to the forward pass:
        # the tangent is itself the gradient of a scalar that is added to the loss.
        backward_indices = (i for i, n in enumerate(nodes) if n.phase is Phase.BACKWARD)
        nodes.insert(max(nodes.index(source) + 1, next(backward_indices, len(nodes))), clone)
        owned.append(replace(output, node=clone.name))
    return nodes, tuple(owned)


def _clone(reader: _Reader, source: Node, parameter: Tensor, number: int) -> Node:
    size = getattr(torch, parameter.dtype).itemsize * parameter.numel
    shape = f"{parameter.dtype}{list(parameter.shape)}~{list(source.outputs[0].stride)}"
    return Node(
        name=f"own_gradient_{number}",
        op="steelyard.copy_strided",
        args=(Ref(source.name), parameter.shape, parameter.stride),
        inputs=(source.name,),
        outputs=(replace(parameter, storage=reader.new_storage(size), offset=0),),
        phase=Phase.BACKWARD,
        path=source.path,
        line=source.line,
        signature=f"copy_strided({shape};{list(parameter.stride)})",
        moved_bytes=2 * size,
    )
