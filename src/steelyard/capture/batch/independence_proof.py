"""Numerical check that the loss of a batch is the mean, or the sum, of the losses of its samples.

Runs a few samples as one batch and one by one, on copies of the model's parameters. The losses and
the gradient of each parameter have to agree. Not for checking operators: see
capture/checks/batch_independence.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from steelyard import _torch
from steelyard.capture.tracing.fake_execution import restoring_attributes, with_swapped_tensors
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.hardware.host_os import available_bytes

# Relative tolerance for losses and gradients, by the precision of the computation. Gradients are
# compared too: they reveal a small term that couples samples but hardly changes the loss.
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
# Noise added to each parameter: relative to its root mean square, or absolute if it is all zeros.
_NOISE_SHARE, _NOISE = 0.1, 0.02


class Reduction(StrEnum):
    """The rule that combines the losses of the parts into the loss of the batch."""

    MEAN = "mean"
    SUM = "sum"
    COUNTED = "counted"  # the mean over all targets that are not ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """The verdict on splitting a batch; ``reason`` is empty if the batch may be split."""

    reduction: Reduction
    reason: str = ""


def indivisible(reason: str) -> Splitting:
    return Splitting(reduction=Reduction.MEAN, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A batch of one sample, and the number of its targets that the loss counts."""

    batch: Any
    count: int


def compare_with_samples(
    model: nn.Module, loss: Loss, together: Any, samples: Sequence[Sample], *, is_low: bool
) -> Splitting:
    """Compare a batch, ``together``, with its samples one by one, ``samples``.

    ``is_low`` means that the step computes in half precision somewhere.

    If there is a difference in the step's own precision, the comparison is repeated in float64,
    where rounding no longer matters. Half precision is only trusted if float64 is not possible.
    Trained parameters are perturbed, because zeros among them (in a head or a gate) could hide a
    difference.
    """

    def compared(is_double: bool) -> _Verdict:
        run = partial(_compare, model, loss, together, samples, is_double=is_double)
        verdict = run(is_perturbed=True)
        # Noise may leave the domain of the code, for example a root of a zero parameter.
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
    """The result of one comparison; it is not judged if samples fail or a loss is not finite."""

    splitting: Splitting
    is_judged: bool = True


def _fits_in_double(model: nn.Module) -> bool:
    """True if memory suffices for float64 copies of all weights and for running them."""
    return 2 * 8 * sum(p.numel() for p in model.parameters()) <= available_bytes()


def _compare(
    model: nn.Module,
    loss: Loss,
    together: Any,
    samples: Sequence[Sample],
    *,
    is_double: bool,
    is_perturbed: bool,
) -> _Verdict:
    def value(batch: Any) -> torch.Tensor:
        return loss(model, _torch.tree_map(_to_wider, batch) if is_double else batch)

    try:
        with _copied_parameters(
            model, is_double=is_double, is_perturbed=is_perturbed
        ) as parameters:
            trained = {n: p for n, p in parameters.items() if p.requires_grad}
            whole = _run(lambda: value(together), trained)
            runs = [
                _run(partial(value, x.batch), trained) if x.count else _SampleGradients()
                for x in samples
            ]
            of_all, of_each = whole.loss, [run.loss for run in runs]
            if not all(map(isfinite, (of_all, *of_each))):
                why = f"the loss is {of_all:.6g}, so splitting the batch cannot be checked"
                return _Verdict(indivisible(why), is_judged=False)
            counts = [sample.count for sample in samples]
            weighed = _weights(of_all, of_each, counts)
            if isinstance(weighed, Splitting):
                return _Verdict(weighed)
            reduction, weights = weighed
            expected = sum(w * x for w, x in zip(weights, of_each))
            differing = _differing_gradients(whole, [*zip(weights, runs)], trained)
    except Exception as error:  # noqa: BLE001 - the user's own code: whatever it raises is the reason
        why = f"the step fails on single samples: {type(error).__name__}: {str(error)[:80]}"
        return _Verdict(indivisible(why), is_judged=False)
    if differing:
        return _Verdict(
            indivisible(
                f"the gradient of {differing[0]} over {len(samples)} samples does not equal the "
                "combination of their own gradients: samples are not independent"
            )
        )
    if is_double and not _agree(expected, of_all, _LOSS_ROUNDING_DOUBLE):
        return _Verdict(
            indivisible(
                f"the loss of {len(samples)} samples differs from the combination of their own "
                f"losses by {of_all - expected:.2g}: samples are not independent"
            )
        )
    return _Verdict(Splitting(reduction=reduction))


def _agree(loss: float, other: float, rounding: float) -> bool:
    return abs(loss - other) <= rounding * max(abs(other), 1e-6)


def _weights(
    of_all: float, of_each: list[float], counts: list[int]
) -> tuple[Reduction, list[float]] | Splitting:
    """Return the reduction and each sample's weight in the loss, or the reason why there is
    none.
    """
    size, total = len(counts), sum(of_each)
    seen = [x for x, n in zip(of_each, counts) if n]
    if max(seen) - min(seen) <= 1e-6 * (abs(of_all) + 1e-12):
        return indivisible(
            f"the {len(seen)} samples compared give the same loss, so splitting the batch cannot "
            "be checked: give a batch whose samples differ"
        )
    candidates = {Reduction.MEAN: [1 / size] * size, Reduction.SUM: [1.0] * size}
    if len(set(counts)) > 1:
        del candidates[Reduction.MEAN]
        candidates = {Reduction.COUNTED: [n / sum(counts) for n in counts], **candidates}
    for reduction, weights in candidates.items():
        expected = sum(w * x for w, x in zip(weights, of_each))
        if _agree(expected, of_all, _LOSS_ROUNDING):
            return reduction, weights
    return indivisible(
        f"the loss of {size} samples ({of_all:.6g}) is neither the mean ({total / size:.6g}) nor "
        "the sum of their losses: samples are weighted unequally or not independent"
    )


# --- gradients ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SampleGradients:
    """The loss of some samples, and a sketch of each gradient.

    With sketches, only one full gradient is in memory at a time.
    """

    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def _run(value: Callable[[], torch.Tensor], trained: dict[str, nn.Parameter]) -> _SampleGradients:
    found: dict[str, torch.Tensor] = {}
    hooks = [
        p.register_post_accumulate_grad_hook(partial(_store_sketch, name=name, into=found))
        for name, p in trained.items()
    ]
    try:
        loss = value()
        if trained:
            torch.autograd.backward(loss, inputs=[*trained.values()])
    finally:
        for hook in hooks:
            hook.remove()
    return _SampleGradients(loss=float(loss.detach().double()), gradients=found)


def _differing_gradients(
    whole: _SampleGradients,
    samples: Sequence[tuple[float, _SampleGradients]],
    trained: dict[str, nn.Parameter],
) -> list[str]:
    """Return the parameters whose gradient is not the weighted sum of the samples' gradients."""
    difference = dict(whole.gradients)
    norms = {name: float(g.norm()) for name, g in difference.items()}
    for weight, run in samples:
        for name, gradient in run.gradients.items():
            if name not in difference:
                return [name]
            difference[name] = difference[name].sub(gradient, alpha=weight)
    largest = max(norms.values(), default=0.0)

    def is_different(name: str, residual: torch.Tensor) -> bool:
        dtype = trained[name].dtype
        rounding = (
            _GRADIENT_ROUNDING_DOUBLE
            if dtype in _DOUBLE
            else _GRADIENT_ROUNDING.get(dtype, _GRADIENT_ROUNDING_LOW)
        )
        # The second term covers gradients that are zero except for rounding.
        return not float(residual.norm()) <= rounding * (norms[name] + largest / 100)

    return [name for name, residual in difference.items() if is_different(name, residual)]


def _store_sketch(parameter: nn.Parameter, *, name: str, into: dict[str, torch.Tensor]) -> None:
    assert parameter.grad is not None
    into[name] = sketch(parameter.grad)
    parameter.grad = None


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Reduce a gradient to a few thousand weighted sums, linear in it and of the same average size.

    A small gradient is its own sketch.
    """
    gradient = gradient.detach().to_dense()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    flat = gradient.reshape(-1)
    width = max(1, -(-flat.numel() // _SUMS))
    # Quasi-random: the fractions of i^2 times an irrational number are spread evenly.
    phases = torch.arange(width, dtype=torch.float64, device=flat.device).square() * math.sqrt(2)
    weights = torch.cos(2 * math.pi * phases.frac())
    unpack_rows = flat[: flat.numel() // width * width].view(-1, width)
    rest = flat[unpack_rows.numel() :]
    # Multiply a few rows at a time, so that no full float64 copy of the gradient is made.
    sums = [rows.double() @ weights for rows in unpack_rows.split(max(1, _CHUNK_ELEMENTS // width))]
    return torch.cat([*sums, (rest.double() @ weights[: len(rest)]).reshape(1)])


_SUMS, _CHUNK_ELEMENTS = 4096, 2**20


# --- the model that samples run on ----------------------------------------------------------------


@contextlib.contextmanager
def _copied_parameters(
    model: nn.Module, *, is_double: bool, is_perturbed: bool
) -> Iterator[dict[str, nn.Parameter]]:
    """Run the live model without side effects, on copies of its parameters and buffers.

    Generators are restored and random draws disabled. Yields the copied parameters by name; they
    do not have the hooks of the live ones.
    """

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        values = _to_wider(tensor.detach()) if is_double else tensor.detach()
        if not isinstance(tensor, nn.Parameter):
            return values.clone()
        if is_perturbed and tensor.requires_grad and values.dtype in (*_WIDER, *_DOUBLE):
            values = _perturbed(values)
        return nn.Parameter(values, requires_grad=tensor.requires_grad)

    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=devices),
        torch.enable_grad(),
        restoring_attributes(model),
        with_swapped_tensors(model, copy_of) as parameters,
        _mode(_InDouble) if is_double else contextlib.nullcontext(),
        _mode(_WithoutChance),
    ):
        yield parameters


def _to_wider(leaf: Any) -> Any:
    """Convert a floating-point tensor to double precision; return anything else unchanged."""
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
    """Keeps double precision wherever the model's code would use a narrower dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _torch.is_view(func):  # view.dtype may reinterpret bits
            return func(*args, **(kwargs or {}))
        args, kwargs = _torch.tree_map(_wider_dtype, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if _torch.mutates(func):
            return result
        return _torch.tree_map(_to_wider, result)


def _wider_dtype(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


class _WithoutChance(_torch.TorchDispatchMode):
    """Replaces random draws by their expectations, equal for the batch and single samples."""

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


def fixed_batch_statistics() -> contextlib.AbstractContextManager[Any]:
    """Disable the batch statistics of BatchNorm; see ``_GivenStatistics``."""
    return _mode(_GivenStatistics)


class _GivenStatistics(TorchFunctionMode):
    """Gives each BatchNorm a fixed mean and variance, so that it cannot couple samples."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.batch_norm:
            return func(*args, **kwargs)
        named = dict(zip(_BATCH_NORM, args)) | kwargs
        x = named["input"]
        if named.get("training") and named["running_mean"] is None:
            fixed = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            named["running_mean"], named["running_var"] = fixed
        return func(**{**named, "training": False})


_BATCH_NORM = (
    *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)
