"""Proof by numbers that the loss of a batch is the mean, or the sum, of the losses of its samples.

A few samples are run together and one by one on copies of the model's parameters: the losses have
to agree, then the gradient of each parameter. Not for what operators show: see
capture/checks/batch_independence.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from steelyard import _torch
from steelyard.capture.tracing.fake_execution import exchanged, put_back
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.hardware.host_os import available_bytes

# Relative rounding that losses and gradients may differ by, by the precision they are computed in.
# A small term that couples samples shows in the gradients, where it hardly does in the loss.
_DOUBLE = torch.float64, torch.complex128
_LOSS_ROUNDING, _LOSS_ROUNDING_DOUBLE = 1e-3, 1e-9
_GRADIENT_ROUNDING = {torch.float32: 1e-5, torch.complex64: 1e-5}
_GRADIENT_ROUNDING_DOUBLE = 1e-9
_GRADIENT_ROUNDING_LOW = 0.05  # half precision and below
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
# Added to each parameter, as a share of its root mean square; and to one that is all zeros.
_NOISE_SHARE, _NOISE = 0.1, 0.02


class Reduction(StrEnum):
    """The way in which the losses of the parts add up to the loss of the batch."""

    MEAN = "mean"
    SUM = "sum"
    COUNTED = "counted"  # the mean over targets that are not ignored, of which parts hold several


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """``reason`` says why the batch must stay whole; empty where it may be cut."""

    reduction: Reduction
    reason: str = ""


def whole(reason: str) -> Splitting:
    return Splitting(reduction=Reduction.MEAN, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A batch of one, and how many targets the loss counts in it."""

    batch: Any
    count: int


def proven(
    model: nn.Module, loss: Loss, together: Any, apart: Sequence[Sample], *, is_low: bool
) -> Splitting:
    """Compare a batch of samples, ``together``, with the same samples one by one, ``apart``.

    ``is_low`` says that the step computes in half precision somewhere.

    What does not agree in the step's own precision is looked at again in float64, where rounding is
    gone and a real difference is not. Half precision is only trusted where float64 cannot be had.
    Trained parameters are perturbed, so that zeros among them, of a head or a gate, hide nothing.
    """

    def compared(is_double: bool) -> _Verdict:
        run = partial(_compared, model, loss, together, apart, is_double=is_double)
        verdict = run(is_perturbed=True)
        # Noise may leave what the code takes, a root of a parameter that is zero say.
        return verdict if verdict.is_judged else run(is_perturbed=False)

    found: list[_Verdict] = []
    for is_double in (True, False) if is_low else (False, True):
        if is_double and not _fits_in_double(model):
            continue
        found.append(compared(is_double))
        if found[-1].is_judged and (is_double or not found[-1].splitting.reason):
            break
    return next((v for v in reversed(found) if v.is_judged), found[0]).splitting


@dataclass(frozen=True, slots=True)
class _Verdict:
    """``is_judged`` is not so where the samples could not be run, or gave no finite loss."""

    splitting: Splitting
    is_judged: bool = True


def _fits_in_double(model: nn.Module) -> bool:
    """True if copies of all weights in float64 leave room for running them."""
    return 2 * 8 * sum(p.numel() for p in model.parameters()) <= available_bytes()


def _compared(
    model: nn.Module,
    loss: Loss,
    together: Any,
    apart: Sequence[Sample],
    *,
    is_double: bool,
    is_perturbed: bool,
) -> _Verdict:
    def value(batch: Any) -> torch.Tensor:
        return loss(model, _torch.tree_map(_widened, batch) if is_double else batch)

    try:
        with _stand_ins(model, is_double=is_double, is_perturbed=is_perturbed) as parameters:
            with torch.no_grad():
                of_all, of_each = (
                    float(value(together).double()),
                    [float(value(x.batch).double()) if x.count else 0.0 for x in apart],
                )
            if not all(map(isfinite, (of_all, *of_each))):
                why = f"the loss is {of_all:.6g}, of which nobody can tell whether it can be cut"
                return _Verdict(whole(why), is_judged=False)
            counts = [sample.count for sample in apart]
            weighed = _weights(of_all, of_each, counts)
            if isinstance(weighed, Splitting):
                return _Verdict(weighed)
            reduction, weights = weighed
            put_together = sum(w * x for w, x in zip(weights, of_each))
            others = _other_gradients(
                lambda: value(together),
                [(w, partial(value, x.batch)) for w, x in zip(weights, apart) if w],
                parameters,
            )
    except Exception as error:  # noqa: BLE001 - the user's own code: whatever it raises is the reason
        why = f"single samples fail: {type(error).__name__}: {str(error)[:80]}"
        return _Verdict(whole(why), is_judged=False)
    if others:
        return _Verdict(
            whole(
                f"the gradient of {others[0]} over {len(apart)} samples does not follow from "
                "theirs: samples see each other"
            )
        )
    if is_double and not _agree(put_together, of_all, _LOSS_ROUNDING_DOUBLE):
        return _Verdict(
            whole(
                f"the loss of {len(apart)} samples differs from that of each put together by "
                f"{of_all - put_together:.2g}: samples see each other"
            )
        )
    return _Verdict(Splitting(reduction=reduction))


def _agree(loss: float, other: float, rounding: float) -> bool:
    return abs(loss - other) <= rounding * max(abs(other), 1e-6)


def _weights(
    of_all: float, of_each: list[float], counts: list[int]
) -> tuple[Reduction, list[float]] | Splitting:
    """The share that the loss of each sample has in the loss of all."""
    size, total = len(counts), sum(of_each)
    seen = [x for x, n in zip(of_each, counts) if n]
    if max(seen) - min(seen) <= 1e-6 * (abs(of_all) + 1e-12):
        return whole(
            f"the {len(seen)} samples looked at give the same loss, so cutting cannot be checked: "
            "give a batch whose samples differ"
        )
    candidates = {Reduction.MEAN: [1 / size] * size, Reduction.SUM: [1.0] * size}
    if len(set(counts)) > 1:
        del candidates[Reduction.MEAN]
        candidates = {Reduction.COUNTED: [n / sum(counts) for n in counts], **candidates}
    for reduction, weights in candidates.items():
        expected = sum(w * x for w, x in zip(weights, of_each))
        if _agree(expected, of_all, _LOSS_ROUNDING):
            return reduction, weights
    return whole(
        f"the loss of {size} samples ({of_all:.6g}) is neither the mean ({total / size:.6g}) nor "
        "the sum of theirs: samples are weighed unequally or see each other"
    )


# --- gradients ------------------------------------------------------------------------------------


def _other_gradients(
    together: Callable[[], torch.Tensor],
    apart: Sequence[tuple[float, Callable[[], torch.Tensor]]],
    parameters: dict[str, nn.Parameter],
) -> list[str]:
    """The parameters whose gradient is not that of the samples, each of some weight, put together.

    Sketches are compared, so that no more than one gradient is held at a time.
    """
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    if not trained:
        return []

    def gradients(value: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        hooks = [
            p.register_post_accumulate_grad_hook(partial(_to_sketch, name=name, into=found))
            for name, p in trained.items()
        ]
        try:
            torch.autograd.backward(value(), inputs=[*trained.values()])
        finally:
            for hook in hooks:
                hook.remove()
        return found

    rest = gradients(together)
    norms = {name: float(g.norm()) for name, g in rest.items()}
    for weight, value in apart:
        for name, gradient in gradients(value).items():
            if name not in rest:
                return [name]
            rest[name] = rest[name].sub(gradient, alpha=weight)
    largest = max(norms.values(), default=0.0)

    def is_other(name: str, off: torch.Tensor) -> bool:
        dtype = trained[name].dtype
        rounding = (
            _GRADIENT_ROUNDING_DOUBLE
            if dtype in _DOUBLE
            else _GRADIENT_ROUNDING.get(dtype, _GRADIENT_ROUNDING_LOW)
        )
        # Where a gradient is zero but for rounding, its size says nothing: hence the second term.
        return not float(off.norm()) <= rounding * (norms[name] + largest / 100)

    return [name for name, off in rest.items() if is_other(name, off)]


def _to_sketch(parameter: nn.Parameter, *, name: str, into: dict[str, torch.Tensor]) -> None:
    assert parameter.grad is not None
    into[name] = sketch(parameter.grad)
    parameter.grad = None


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Some thousand weighted sums of a gradient: linear in it, and as large as it is on average.

    Of a small one, the gradient itself.
    """
    gradient = gradient.detach().to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    flat = gradient.reshape(-1)
    width = max(1, -(-flat.numel() // _SUMS))
    # Quasi-random: the fractions of i^2 times an irrational number are spread evenly.
    spread = torch.arange(width, dtype=torch.float64, device=flat.device).square() * math.sqrt(2)
    weights = torch.cos(2 * math.pi * spread.frac())
    whole_rows = flat[: flat.numel() // width * width].view(-1, width)
    rest = flat[whole_rows.numel() :]
    # Some rows at a time: a gradient is never there a second time in float64.
    sums = [rows.double() @ weights for rows in whole_rows.split(max(1, _AT_ONCE // width))]
    return torch.cat([*sums, (rest.double() @ weights[: len(rest)]).reshape(1)])


_SUMS, _AT_ONCE = 4096, 2**20


# --- what the samples are run on ------------------------------------------------------------------


@contextlib.contextmanager
def _stand_ins(
    model: nn.Module, *, is_double: bool, is_perturbed: bool
) -> Iterator[dict[str, nn.Parameter]]:
    """Run the live model without a trace: other parameters and buffers, generators untouched, no
    dropout. Yields the parameters by name; they have none of the hooks of the live ones."""

    def twin_of(tensor: torch.Tensor) -> torch.Tensor:
        values = _widened(tensor.detach()) if is_double else tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            return values.clone()
        if is_perturbed and tensor.requires_grad and values.dtype in (*_WIDER, *_DOUBLE):
            values = _perturbed(values)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        put_back(model),
        exchanged(model, twin_of) as parameters,
        _mode(_InDouble) if is_double else contextlib.nullcontext(),
        _mode(_WithoutChance),
    ):
        yield parameters


def _widened(leaf: Any) -> Any:
    """In double precision; what is no tensor of floating point as it is."""
    is_narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDER
    return leaf.to(_WIDER[leaf.dtype]) if is_narrow else leaf


def _perturbed(values: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(values.device).manual_seed(values.numel())
    noise = torch.empty_like(values).normal_(generator=generator)
    size = float(torch.linalg.vector_norm(values)) / max(values.numel(), 1) ** 0.5
    return noise.mul_(_NOISE_SHARE * size if size else _NOISE).add_(values)


def _mode(kind: Any) -> contextlib.AbstractContextManager[Any]:
    mode: contextlib.AbstractContextManager[Any] = kind()
    return mode


class _InDouble(_torch.TorchDispatchMode):
    """Keeps in double precision what the model's code casts to, or makes in, a narrower format."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _torch.is_view(func):  # one may read bits as another format
            return func(*args, **(kwargs or {}))
        args, kwargs = _torch.tree_map(_wide_dtype, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if _torch.mutates(func):
            return result
        return _torch.tree_map(_widened, result)


def _wide_dtype(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


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


def given_statistics() -> contextlib.AbstractContextManager[Any]:
    """A BatchNorm takes no statistics meanwhile; see the mode."""
    return _mode(_GivenStatistics)


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
