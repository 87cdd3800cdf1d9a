"""Rules for calls on a slice of rows, so that a region of a step can be sliced.

A value in rows is row-major. Its leading dims, which together make whole rows, are treated as one
dim. Not for finding regions (see region.py) or for executing them (see operators/).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from steelyard.ir.graph import Argument, Graph, Node, Ref, Symbol

IsPointwise = Callable[[str], bool]
RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


class SliceKind(StrEnum):
    """The part of a value in one slice: all of it, its rows, its columns, or a term of a sum."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    SUM = "sum"


class Unsliceable(Exception):
    """The error if a call cannot run on a slice of rows; the message is shown to users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acts:
    """The slice kinds of a call's inputs and of its result."""

    inputs: Mapping[str, SliceKind]
    output: SliceKind


def unusual_layout(node: Node) -> str:
    """Return the memory format that a call asks for, or '' if it keeps rows in order."""
    layout = dict(node.kwargs).get("memory_format")
    plain = ("torch.preserve_format", "torch.contiguous_format")
    return layout.text if isinstance(layout, Symbol) and layout.text not in plain else ""


def leading(shape: tuple[int, ...], rows: int) -> int:
    """Return the smallest number of leading dims that together make whole rows."""
    for count in range(1, len(shape) + 1):
        if prod(shape[:count]) % rows == 0:
            return count
    raise Unsliceable(f"a value of shape {list(shape)} does not consist of {rows} rows")


def on_rows(shape: tuple[int, ...], rows: int, count: int) -> tuple[int, ...]:
    """Return the shape of ``count`` of the rows, with the leading dims flattened."""
    dims = leading(shape, rows)
    return (prod(shape[:dims]) // rows * count, *shape[dims:])


def acts(
    graph: Graph,
    node: Node,
    known: Mapping[str, SliceKind],
    *,
    rows: int,
    is_pointwise: IsPointwise,
) -> Acts:
    """Return the slice kinds of a call; raise Unsliceable if it cannot run on slices.

    ``known`` are the kinds of inputs that are themselves computed slice by slice.
    """
    rule = _RULES.get(node.op)
    if rule is None and is_pointwise(node.op):
        rule = _pointwise
    if node.is_random:
        raise Unsliceable(f"{node.op} draws random numbers")
    if rule is None or node.mutates or len(node.outputs) != 1:
        raise Unsliceable(f"{node.op} is not known to work row by row")
    if layout := unusual_layout(node):
        raise Unsliceable(f"{node.op} returns its result in another memory format: {layout}")
    found = rule(_Call(graph=graph, node=node, known=known, rows=rows))
    for name, kind in known.items():
        if found.inputs[name] is not kind:
            raise Unsliceable(
                f"{node.op} needs {found.inputs[name]} of a value that is available in {kind}"
            )
    for name, kind in found.inputs.items():
        shape = graph.by_name[name].outputs[0].shape
        if kind is SliceKind.ROWS:
            leading(shape, rows)
        elif kind is SliceKind.COLUMNS and shape[-1] % rows:
            raise Unsliceable(f"a value of shape {list(shape)} does not consist of {rows} columns")
    if found.output is SliceKind.ROWS:
        leading(node.outputs[0].shape, rows)
    return found


def arguments(
    graph: Graph, node: Node, found: Acts, *, rows: int, count: int
) -> tuple[Argument, ...]:
    """Return the arguments for ``count`` rows, with sizes and dims adjusted to the slice."""
    resized = _RESIZED.get(node.op)
    if resized is None:
        return node.args
    return resized(_Call(graph=graph, node=node, known=found.inputs, rows=rows), count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    graph: Graph
    node: Node
    known: Mapping[str, SliceKind]
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.node.outputs[0].shape

    def name(self, position: int) -> str:
        argument = self.node.args[position] if position < len(self.node.args) else None
        if not isinstance(argument, Ref):
            raise Unsliceable(f"{self.node.op} is called without a tensor")
        return argument.name

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.graph.by_name[name].outputs[0].shape

    def kind(self, position: int) -> SliceKind | None:
        return self.known.get(self.name(position))

    def number(self, position: int) -> int:
        argument = self.node.args[position]
        assert isinstance(argument, int), argument
        return argument

    def dims(self, position: int) -> tuple[int, ...]:
        argument = self.node.args[position] if position < len(self.node.args) else None
        rank = len(self.shape_of(self.name(0)))
        if argument is None or argument == ():
            return tuple(range(rank))
        given = argument if isinstance(argument, tuple) else (argument,)
        return tuple(d % rank for d in given if isinstance(d, int))

    def one_dim(self, name: str) -> None:
        """Raise Unsliceable unless the rows of a matrix are those of its first dim."""
        if leading(self.shape_of(name), self.rows) != 1:
            raise Unsliceable(f"{self.node.op} needs whole rows of its matrix")

    def within(self, dim: int) -> int:
        """Return the index in a slice of ``dim`` of the first argument; the dim must be within
        rows.
        """
        shape = self.shape_of(self.name(0))
        dims = leading(shape, self.rows)
        if dim % len(shape) < dims:
            raise Unsliceable(f"{self.node.op} works across rows")
        return dim % len(shape) - dims + 1

    def with_args(self, changed: Mapping[int, Argument]) -> tuple[Argument, ...]:
        return tuple(changed.get(place, a) for place, a in enumerate(self.node.args))


_Rule = Callable[[_Call], Acts]
_Resized = Callable[[_Call, int], tuple[Argument, ...]]


def _pointwise(call: _Call) -> Acts:
    """The rule for arguments with the rows of the result (in rows) and broadcast ones (whole)."""
    shape, rank = call.shape, len(call.shape)
    dims = leading(shape, call.rows)
    kinds = {}
    for name in call.node.inputs:
        given = call.shape_of(name)
        if len(given) == rank and given[:dims] == shape[:dims]:
            kinds[name] = SliceKind.ROWS
        elif len(given) <= rank - dims or (dims == 1 and len(given) == rank and given[0] == 1):
            kinds[name] = SliceKind.WHOLE
        else:
            raise Unsliceable(f"{call.node.op} broadcasts {list(given)} over rows of {list(shape)}")
    return Acts(inputs=kinds, output=SliceKind.ROWS)


def _row_by_row(call: _Call) -> Acts:
    """The rule for calls along a dim within rows; all arguments are in rows."""
    place = next((p for p, a in enumerate(call.node.args) if isinstance(a, int)), None)
    if place is None:
        raise Unsliceable(f"{call.node.op} is called along its first dim")
    call.within(call.number(place))
    dims = leading(call.shape_of(call.name(0)), call.rows)
    if len({call.shape_of(name)[:dims] for name in call.node.inputs}) > 1:
        raise Unsliceable(f"{call.node.op} reads fewer rows of one value than of another")
    return Acts(inputs=dict.fromkeys(call.node.inputs, SliceKind.ROWS), output=SliceKind.ROWS)


def _row_by_row_resized(call: _Call, _: int) -> tuple[Argument, ...]:
    place = next(p for p, a in enumerate(call.node.args) if isinstance(a, int))
    return call.with_args({place: call.within(call.number(place))})


def _reshaped(call: _Call) -> Acts:
    """The rule for a reshape, which keeps elements in the same order, so that rows stay rows."""
    return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.ROWS)


def _reshaped_resized(call: _Call, count: int) -> tuple[Argument, ...]:
    return call.with_args({1: on_rows(call.shape, call.rows, count)})


def _expanded(call: _Call) -> Acts:
    """The rule for an expand of one value to all rows, or of each row within itself."""
    given, shape = call.shape_of(call.name(0)), call.shape
    dims = leading(shape, call.rows)
    if len(given) == len(shape) and given[:dims] == shape[:dims]:
        return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.ROWS)
    if len(given) <= len(shape) - dims:
        return Acts(inputs={call.name(0): SliceKind.WHOLE}, output=SliceKind.ROWS)
    raise Unsliceable(f"{call.node.op} broadcasts {list(given)} over rows of {list(shape)}")


def _transposed(call: _Call) -> Acts:
    """The rule for a transpose: rows of a matrix are columns of its transpose."""
    if len(call.shape) != 2:
        raise Unsliceable(f"{call.node.op} moves rows")
    order = call.node.args[1] if call.node.op == "aten.permute.default" else call.node.args[1:]
    dims = [d % 2 for d in order if isinstance(d, int)] if isinstance(order, tuple) else []
    if dims and dims != [1, 0] and (dims != [0, 1] or call.node.op == "aten.permute.default"):
        raise Unsliceable(f"{call.node.op} does not move rows")
    if call.kind(0) is SliceKind.COLUMNS:
        return Acts(inputs={call.name(0): SliceKind.COLUMNS}, output=SliceKind.ROWS)
    leading(call.shape_of(call.name(0)), call.rows)
    return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.COLUMNS)


def _product(call: _Call) -> Acts:
    left, right = call.name(0), call.name(1)
    if call.kind(0) is SliceKind.COLUMNS or call.kind(1) is SliceKind.ROWS:
        if call.kind(1) is SliceKind.COLUMNS or call.kind(0) is SliceKind.ROWS:
            raise Unsliceable(f"{call.node.op} multiplies rows by rows")
        call.one_dim(right)
        return Acts(inputs={left: SliceKind.COLUMNS, right: SliceKind.ROWS}, output=SliceKind.SUM)
    call.one_dim(left)
    return Acts(inputs={left: SliceKind.ROWS, right: SliceKind.WHOLE}, output=SliceKind.ROWS)


def _added_product(call: _Call) -> Acts:
    added, left, right = (call.name(place) for place in range(3))
    call.one_dim(left)
    given = call.shape_of(added)
    is_spread = len(given) < 2 or given[0] == 1
    kind = SliceKind.WHOLE if is_spread else SliceKind.ROWS
    return Acts(
        inputs={added: kind, left: SliceKind.ROWS, right: SliceKind.WHOLE}, output=SliceKind.ROWS
    )


def _summed(call: _Call) -> Acts:
    """The rule for a sum over dims within each row (rows), or over all rows and perhaps more dims
    (a sum).
    """
    shape = call.shape_of(call.name(0))
    dims = leading(shape, call.rows)
    over = [d for d in call.dims(1) if d < dims]
    if not over:
        return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.ROWS)
    if len(over) < dims:
        raise Unsliceable(f"{call.node.op} works across some of the rows")
    return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.SUM)


def _summed_resized(call: _Call, _: int) -> tuple[Argument, ...]:
    if len(call.node.args) < 2:
        return call.node.args
    dims = leading(call.shape_of(call.name(0)), call.rows)
    return call.with_args({1: tuple(sorted({max(0, d - dims + 1) for d in call.dims(1)}))})


def _loss_terms(call: _Call) -> Acts:
    """The rule for the loss summed over rows, as nll_loss_sum returns it."""
    if call.node.args[3] != 2:
        raise Unsliceable("a mean is not a sum over rows")
    weight = call.node.args[2]
    kinds = {call.name(0): SliceKind.ROWS, call.name(1): SliceKind.ROWS}
    if isinstance(weight, Ref):
        kinds[weight.name] = SliceKind.WHOLE
    return Acts(inputs=kinds, output=SliceKind.SUM)


def _loss_backward(call: _Call) -> Acts:
    """The rule for the backward of a mean or sum; all rows share its gradient and total weight."""
    if call.node.args[4] == 0:
        raise Unsliceable("each row has a separate loss")
    kinds = dict.fromkeys(call.node.inputs, SliceKind.WHOLE)
    kinds[call.name(1)] = kinds[call.name(2)] = SliceKind.ROWS
    return Acts(inputs=kinds, output=SliceKind.ROWS)


def _filled(_: _Call) -> Acts:
    return Acts(inputs={}, output=SliceKind.ROWS)


def _filled_resized(call: _Call, count: int) -> tuple[Argument, ...]:
    return call.with_args({0: on_rows(call.shape, call.rows, count)})


def _filled_like(call: _Call) -> Acts:
    """The rule for a fill in the dtype of the argument, whose elements are not read."""
    name = call.name(0)
    kind = call.known.get(name)
    if kind is None:
        kind = SliceKind.ROWS if call.shape_of(name)[:1] == call.shape[:1] else SliceKind.WHOLE
    return Acts(inputs={name: kind}, output=SliceKind.ROWS)


def _put_within(call: _Call) -> Acts:
    """The rule for the backward of a slice within rows, which puts the gradient into its position
    in each row.
    """
    if call.number(2) % len(call.shape) < leading(call.shape, call.rows):
        raise Unsliceable(f"{call.node.op} works across rows")
    return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.ROWS)


def _put_within_resized(call: _Call, count: int) -> tuple[Argument, ...]:
    dim = call.number(2) % len(call.shape) - leading(call.shape, call.rows) + 1
    return call.with_args({1: on_rows(call.shape, call.rows, count), 2: dim})


def _padded(call: _Call) -> Acts:
    """The rule for padding within rows; pads are listed from the last dim on."""
    pads = call.node.args[1]
    assert isinstance(pads, tuple)
    if len(pads) // 2 > len(call.shape) - leading(call.shape, call.rows):
        raise Unsliceable(f"{call.node.op} works across rows")
    return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.ROWS)


def _unsqueezed(call: _Call) -> Acts:
    if call.number(1) % len(call.shape) < leading(call.shape_of(call.name(0)), call.rows):
        raise Unsliceable(f"{call.node.op} works across rows")
    return Acts(inputs={call.name(0): SliceKind.ROWS}, output=SliceKind.ROWS)


def _unsqueezed_resized(call: _Call, _: int) -> tuple[Argument, ...]:
    dims = leading(call.shape_of(call.name(0)), call.rows)
    return call.with_args({1: call.number(1) % len(call.shape) - dims + 1})


_ROW_OPS = (
    "aten._log_softmax.default", "aten._softmax.default", "aten._log_softmax_backward_data.default",
    "aten._softmax_backward_data.default", "aten.gather.default", "aten.scatter.src",
    "aten.scatter.value", "aten.scatter_add.default", "aten.select.int", "aten.slice.Tensor",
    "aten.squeeze.dim",
)  # fmt: skip
_LIKE = (
    "aten.clone.default", "aten._to_copy.default", "aten.zeros_like.default",
    "aten.ones_like.default", "aten.full_like.default", "aten.empty_like.default",
)  # fmt: skip
_PUT_WITHIN = ("aten.slice_backward.default", "aten.select_backward.default")
_TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_SUMS = ("aten.sum.dim_IntList", "aten.sum.default")
_WITHIN = (*_SUMS, "aten.amax.default", "aten.amin.default", "aten.logsumexp.default",
           "aten.mean.dim")  # fmt: skip


def _within_only(call: _Call) -> Acts:
    found = _summed(call)
    if found.output is not SliceKind.ROWS:
        raise Unsliceable(f"{call.node.op} works across rows")
    return found


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_ROW_OPS, _row_by_row),
    **dict.fromkeys(RESHAPES, _reshaped),
    **dict.fromkeys(_TRANSPOSES, _transposed),
    **dict.fromkeys(_WITHIN, _within_only),
    **dict.fromkeys(_SUMS, _summed),
    **dict.fromkeys(_LIKE, _pointwise),
    **dict.fromkeys(_PUT_WITHIN, _put_within),
    "aten.constant_pad_nd.default": _padded,
    "aten.new_zeros.default": _filled_like,
    "aten.unsqueeze.default": _unsqueezed,
    "aten.expand.default": _expanded,
    "aten.mm.default": _product,
    "aten.addmm.default": _added_product,
    "aten.full.default": _filled,
    "aten.zeros.default": _filled,
    "steelyard.nll_loss_sum": _loss_terms,
    "aten.nll_loss_backward.default": _loss_backward,
}
_RESIZED: Mapping[str, _Resized] = {
    **dict.fromkeys(_ROW_OPS, _row_by_row_resized),
    **dict.fromkeys(RESHAPES, _reshaped_resized),
    **dict.fromkeys(_WITHIN, _summed_resized),
    **dict.fromkeys(_PUT_WITHIN, _put_within_resized),
    "aten.expand.default": _reshaped_resized,
    "aten.new_zeros.default": _reshaped_resized,
    "aten.unsqueeze.default": _unsqueezed_resized,
    "aten.full.default": _filled_resized,
    "aten.zeros.default": _filled_resized,
}
