"""Cutting the global batch into parts, and whether that would change what is trained.

Not for capturing the parts: see source.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from steelyard import _torch
from steelyard.capture.coupling import coupling
from steelyard.capture.fakes import exchanged, put_back
from steelyard.capture.trace import Loss
from steelyard.core.graph import Counted, Graph, OutputKind, Ref, same_shares
from steelyard.core.plan import BatchEntry
from steelyard.exchange.statistics import normalising, why_not_synchronised
from steelyard.operators import call

# Losses of the parts, put together, may differ from the whole by rounding only; the same of
# gradients, as a share of their norm, where a small term of the loss shows that sees many samples.
_ROUNDING = 1e-3
_GRADIENT_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
_GRADIENT_ROUNDING_LOW = 0.05  # half precision and below


class Reduction(StrEnum):
    """How the loss of the batch follows from the losses of its parts."""

    MEAN = "mean"
    SUM = "sum"
    COUNTED = "counted"  # the mean over targets that are not ignored, of which parts hold several


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """``reason`` says why the batch must stay whole; empty where it may be cut."""

    reduction: Reduction
    reason: str = ""


def entries(batch: Any) -> tuple[BatchEntry, ...]:
    leaves = _torch.tree_flatten_with_path(batch)[0]
    return tuple(
        BatchEntry(
            name=_torch.keystr(path),
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype).removeprefix("torch."),
        )
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    )


def batch_size(batch: Any) -> int | None:
    """What dim 0 of every tensor is; None where they do not agree."""
    sizes = {
        x.shape[0] if x.dim() else None
        for x in _torch.tree_leaves(batch)
        if isinstance(x, torch.Tensor)
    }
    return sizes.pop() if len(sizes) == 1 else None


def part(batch: Any, *, start: int, size: int) -> Any:
    """Rows ``start`` to ``start + size`` of every tensor; views, no copies."""

    def cut(leaf: Any) -> Any:
        return leaf.narrow(0, start, size) if isinstance(leaf, torch.Tensor) else leaf

    return _torch.tree_map(cut, batch)


def splitting(
    model: nn.Module, loss: Loss, batch: Any, graph: Graph, *, at_once: bool = False
) -> Splitting:
    """Whether the loss of the batch is the mean or the sum of its parts' losses.

    Judged by the operators, then by numbers: the live model on a few samples, together and apart,
    with its randomness held still. ``at_once``: the parts are computed at one time, by ranks, which
    can take statistics together, so that these say nothing against it.
    """
    size = batch_size(batch)
    if size is None:
        return _whole("the tensors of the batch do not share dim 0")
    if size < 2:
        return _whole("the batch is a single sample")
    reason = why_together(model, loss, batch, graph, at_once=at_once)
    if reason:
        return _whole(reason)
    leaves = (x for x in _torch.tree_leaves(batch) if isinstance(x, torch.Tensor))
    if any(t.device.type == "meta" for t in (*model.parameters(), *leaves)):
        return _whole("there are no values to check it with (meta device)")
    counted = [c for mean in graph.counted if (c := _counts(graph, mean, batch))]
    every = counted[0] if counted else [1] * size
    if any(not same_shares(every, others) for others in counted):
        return _whole("two means in the loss count their targets in different samples")
    if sum(n > 0 for n in every) < 2:
        return _whole("fewer than two samples hold a target that counts, so cutting is not checked")
    if len(set(every)) > 1 and not graph.is_counted_alone:
        return _whole("samples count unequally many targets, and the loss has a term besides them")
    rows = _looked_at(every)
    with _GivenStatistics() if at_once else contextlib.nullcontext():
        verdict = _by_numbers(model, loss, _rows(batch, rows), [every[row] for row in rows])
    if verdict.reduction is Reduction.MEAN and graph.is_counted_alone:
        return replace(verdict, reduction=Reduction.COUNTED)
    return verdict


def why_together(
    model: nn.Module, loss: Loss, batch: Any, graph: Graph, *, at_once: bool = False
) -> str:
    """Where operators show that cutting the batch changes what is trained; empty where none does:
    all that can be said where there are no values to try it with."""
    statistics = normalising(graph)
    if statistics and not at_once:
        return f"BatchNorm in {statistics[0].path} takes its statistics over the whole batch"
    if reason := why_not_synchronised(graph):
        return reason
    for output in graph.outputs:
        if output.kind is OutputKind.UPDATE and not (at_once and _is_alike(graph, output.node)):
            name = output.target.removeprefix("buffer:")
            return f"buffer {name} is written in every pass, which each part would repeat"
    for name, parameter in model.named_parameters():
        if _torch.any_hooks([parameter]):
            return f"parameter {name} has a hook, which would run once for each part"
    return (
        _counted_by_more_than_the_batch(graph)
        or _weighed_by_class(graph)
        or _scaled_by_frequency(graph)
        or coupling(model, loss, batch, graph)
    )


def _is_alike(graph: Graph, update: str) -> bool:
    """Whether all ranks find the same new value: that of statistics of all samples, or of nothing
    that the batch says."""
    taking = {node.name for node in normalising(graph)}
    pending, seen = [update], set[str]()
    while pending:
        node = graph.by_name[pending.pop()]
        # The first result is what was normalised: of a rank's own samples, as all that follows.
        is_statistic = node.is_getitem and node.inputs[0] in taking and node.args[1] != 0
        if node.name in seen or is_statistic:
            continue
        seen.add(node.name)
        if node.is_random or node.name.startswith("batch:"):
            return False
        pending += node.inputs
    return True


def _looked_at(counts: list[int]) -> list[int]:
    """Four samples; where fewer than two of them hold a target that counts, some that do."""
    rows = _spread([*range(len(counts))], 4)
    if sum(counts[row] > 0 for row in rows) >= 2:
        return rows
    without = [row for row in rows if not counts[row]]
    return sorted([*_spread([row for row, n in enumerate(counts) if n], 3), without[0]])


def _spread(rows: list[int], wanted: int) -> list[int]:
    """From the first to the last: batches are often sorted, and neighbours alike."""
    last = len(rows) - 1
    return [rows[i] for i in sorted({round(k * last / (wanted - 1)) for k in range(wanted)})]


def _rows(batch: Any, rows: list[int]) -> Any:
    def chosen(leaf: Any) -> Any:
        return leaf[rows] if isinstance(leaf, torch.Tensor) else leaf

    return _torch.tree_map(chosen, batch)


def _counted_by_more_than_the_batch(graph: Graph) -> str:
    """Targets are counted ahead of the step, where a second draw would differ from the step's own,
    and what the model says is not known yet."""
    made = [name for mean in graph.counted for name in graph.ancestors(mean.targets)]
    for node in map(graph.by_name.__getitem__, made):
        where = f" ({node.line})" if node.line else ""
        if node.is_random:
            return f"which targets the loss counts is drawn at random{where}"
        if any(name.startswith("parameter:") for name in node.inputs):
            return f"which targets the loss counts depends on what the model says{where}"
    return ""


def _weighed_by_class(graph: Graph) -> str:
    """The mean is over the weights of the targets in the batch, in one operator."""
    weighed = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
    for node in graph.forward():
        if node.op in weighed and isinstance(node.args[2], Ref) and node.args[3] == _MEAN:
            return "classes are weighed, so that the loss is divided by the weights in the batch"
    return ""


_MEAN = 1  # as ATen numbers its reductions


def _scaled_by_frequency(graph: Graph) -> str:
    """Only the gradient shows it, and of samples that share no index not even that."""
    for node in graph.forward():
        if "embedding" in node.op and node.args[3:4] == (True,):  # scale_grad_by_freq, of both
            where = node.path or node.line
            return f"{where} divides gradients by how often each index is in the batch"
    return ""


def _counts(graph: Graph, counted: Counted, batch: Any) -> list[int]:
    """Targets of each sample that the mean counts; empty where the batch does not say."""
    values: dict[str, Any] = {
        f"batch:{_torch.keystr(path)}": leaf
        for path, leaf in _torch.tree_flatten_with_path(batch)[0]
    }
    for name in graph.ancestors(counted.targets):
        node = graph.by_name[name]
        if not set(node.inputs) <= values.keys():
            return []  # the targets depend on more than the batch
        values[name] = call(node, values)
    targets = values[counted.targets]
    size = batch_size(batch)
    assert size is not None
    kept: list[int] = (targets.reshape(size, -1) != counted.ignored).sum(1).tolist()
    return kept


def _whole(reason: str) -> Splitting:
    return Splitting(reduction=Reduction.MEAN, reason=reason)


def _by_numbers(model: nn.Module, loss: Loss, samples: Any, counts: list[int]) -> Splitting:
    size = len(counts)

    def value(start: int, count: int) -> torch.Tensor:
        return loss(model, part(samples, start=start, size=count))

    try:
        with _held_still(model) as parameters:
            with torch.no_grad():
                whole, apart = (
                    float(value(0, size).double()),
                    [float(value(i, 1).double()) if counts[i] else 0.0 for i in range(size)],
                )
            shares = _shares(whole, apart, counts)
            if isinstance(shares, Splitting):
                return shares
            reduction, weights = shares
            others = _other_gradients(value, weights, parameters)
    except Exception as error:  # noqa: BLE001 - the user's own code: whatever it raises is the reason
        return _whole(f"single samples fail: {type(error).__name__}: {str(error)[:80]}")
    if others:
        others = _in_double_too(others, model, loss, samples, weights)
    if others:
        return _whole(
            f"the gradient of {others[0]} over {size} samples does not follow from theirs: "
            "samples see each other"
        )
    return Splitting(reduction=reduction)


def _shares(
    whole: float, apart: list[float], counts: list[int]
) -> tuple[Reduction, list[float]] | Splitting:
    """What the loss of each sample counts in the loss of all."""
    size, total = len(counts), sum(apart)
    if not all(map(isfinite, (whole, *apart))):
        return _whole(f"the loss is {whole:.6g}, of which nobody can tell whether it can be cut")
    seen = [x for x, n in zip(apart, counts) if n]
    if max(seen) - min(seen) <= 1e-6 * (abs(whole) + 1e-12):
        return _whole("different samples give the same loss, so cutting cannot be checked")
    candidates = {Reduction.MEAN: [1 / size] * size, Reduction.SUM: [1.0] * size}
    if len(set(counts)) > 1:
        del candidates[Reduction.MEAN]
        candidates = {Reduction.COUNTED: [n / sum(counts) for n in counts], **candidates}
    for reduction, weights in candidates.items():
        expected = sum(w * x for w, x in zip(weights, apart))
        if abs(expected - whole) <= _ROUNDING * max(abs(whole), 1e-6):
            return reduction, weights
    return _whole(
        f"the loss of {size} samples ({whole:.6g}) is neither the mean ({total / size:.6g}) nor "
        "the sum of theirs: samples are weighed unequally or see each other"
    )


def _in_double_too(
    others: list[str], model: nn.Module, loss: Loss, samples: Any, weights: list[float]
) -> list[str]:
    """Those that are still others in double precision.

    A gradient whose terms cancel (of a bias under a softmax, say) is nothing but rounding, however
    it compares with the rest. Rounding shrinks with the precision; a real difference does not.
    """

    def widened(leaf: Any) -> Any:
        return _widened(leaf) if isinstance(leaf, torch.Tensor) else leaf

    wide = _torch.tree_map(widened, samples)
    try:
        with _held_still(model, in_double=True) as parameters:
            still = _other_gradients(
                lambda start, count: loss(model, part(wide, start=start, size=count)),
                weights,
                parameters,
            )
    except Exception:  # noqa: BLE001 - code that takes no double: what was found stands
        return others
    return [name for name in others if name in still]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _other_gradients(
    value: Callable[[int, int], torch.Tensor],
    weights: list[float],
    parameters: dict[str, nn.Parameter],
) -> list[str]:
    """The parameters whose gradient is not that of the samples put together.

    Holds two gradients of each parameter at a time.
    """
    trained = {n: p for n, p in parameters.items() if p.requires_grad}

    def gradients(start: int, count: int) -> dict[str, torch.Tensor]:
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            value(start, count), [*trained.values()], allow_unused=True
        )
        return {n: g.to_dense() for n, g in zip(trained, found) if g is not None}

    rest = gradients(0, len(weights))
    norms = {name: float(g.norm()) for name, g in rest.items()}
    for index, weight in enumerate(weights):
        if weight:
            for name, gradient in gradients(index, 1).items():
                if name not in rest:
                    return [name]
                rest[name] = rest[name].sub(gradient, alpha=weight)
    largest = max(norms.values(), default=0.0)

    def is_other(name: str, off: torch.Tensor) -> bool:
        rounding = _GRADIENT_ROUNDING.get(off.dtype, _GRADIENT_ROUNDING_LOW)
        # Where a gradient is zero but for rounding, its size says nothing: hence the second term.
        return not float(off.norm()) <= rounding * (norms[name] + largest / 100)

    return [name for name, off in rest.items() if is_other(name, off)]


@contextlib.contextmanager
def _held_still(model: nn.Module, *, in_double: bool = False) -> Iterator[dict[str, nn.Parameter]]:
    """Run the live model without a trace: other buffers, generators untouched, no dropout.

    Yields parameters that have the values of the live ones and none of their hooks.
    """

    def twin_of(tensor: torch.Tensor) -> torch.Tensor:
        values = _widened(tensor.detach()) if in_double else tensor.detach()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, requires_grad=tensor.requires_grad)
        return values.clone()

    with (
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        put_back(model),
        exchanged(model, twin_of) as parameters,
        _without_chance(),
    ):
        yield parameters


def _without_chance() -> contextlib.AbstractContextManager[Any]:
    mode: contextlib.AbstractContextManager[Any] = _WithoutChance()  # type: ignore[no-untyped-call]
    return mode


class _WithoutChance(_torch.TorchDispatchMode):
    """Every random draw becomes its expectation, so that a sample alone draws as in company."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        if func in (aten.bernoulli_.float, aten.bernoulli.p):
            mean = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return result.fill_(mean if result.is_floating_point() else 1)
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor):
            return result.zero_()
        return result


class _GivenStatistics(TorchFunctionMode):
    """A BatchNorm is told mean and variance, and takes none: through these alone it lets samples
    see each other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.batch_norm:
            return func(*args, **kwargs)
        named = dict(zip(_BATCH_NORM, args)) | kwargs
        x = named["input"]
        if named.get("training") and named["running_mean"] is None:
            given = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            named["running_mean"], named["running_var"] = given
        return func(**{**named, "training": False})


_BATCH_NORM = (
    *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)
