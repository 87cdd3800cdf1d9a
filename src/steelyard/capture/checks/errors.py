"""Converts tracing errors into refusals that name the line, the module and the reason.

Not for detecting problems: tracing raises errors, which are reworded here.
"""

import contextlib
import re
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steelyard.capture.tracing.source_lines import line_in_trace, line_of
from steelyard.errors import CaptureRefused


def check_scalar(value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise no_loss("None" if value is None else f"a {type(value).__name__}")
    if value.numel() != 1 or not value.dtype.is_floating_point:
        dtype = str(value.dtype).removeprefix("torch.")
        raise CaptureRefused(
            f"the loss has shape {list(value.shape)} and dtype {dtype}",
            expected="one real floating-point number",
            remedy="reduce it, for example with .mean()"
            if value.dtype.is_floating_point
            else "an integer has no gradient: use a differentiable loss, such as cross_entropy",
        )


def no_loss(what: str) -> CaptureRefused:
    return CaptureRefused(
        f"the loss function returns {what}",
        expected="one scalar tensor",
        remedy="return only the loss, for example `return model(batch).loss`",
    )


def check_trains(model: nn.Module, value: torch.Tensor | None = None) -> None:
    """Require a trainable parameter, and a loss (if given) that depends on one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise CaptureRefused(
                f"{name} has no shape yet, because its layer is lazy",
                expected="a model in which every parameter has a shape",
                remedy="run the model once on a batch before planning: loss(model, batch)",
            )
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise CaptureRefused(
            "the model has no trainable parameter",
            expected="at least one parameter with requires_grad",
            remedy="unfreeze what is to be trained, or check that the layers are registered",
        )
    if value is not None and not value.requires_grad:
        raise CaptureRefused(
            "the loss depends on no trainable parameter",
            expected=f"a loss with a gradient for {trainable[0]}"
            + (f" or any of {len(trainable) - 1} others" if len(trainable) > 1 else ""),
            remedy="look for detach(), no_grad() or a loss that does not use the model's output",
        )


@dataclass(slots=True)
class _TraceProgress:
    """The traced step so far, used to find the line of an operator that fails later."""

    step: Any = None


@contextlib.contextmanager
def reading_errors(model: nn.Module) -> Iterator[_TraceProgress]:
    """Convert exceptions raised while tracing into a CaptureRefused that names the user's line."""
    progress = _TraceProgress()
    try:
        yield progress
    except CaptureRefused:
        raise
    except Exception as error:
        reason = _first_line(error)
        where = _user_line(error) or _operator_line(error, progress.step) or _appended_line(error)
        raise CaptureRefused(
            f"the training step cannot be captured{where}{_module_of(error, model)}: {reason}",
            expected=_EXPECTED_OF.get(
                reason, "a step whose operators and shapes do not depend on tensor values"
            ),
            remedy=_VALIDATES
            if _in_distributions(error)
            else _REMEDY_OF.get(reason) or _remedy(f"{type(error).__name__} {error}"),
        ) from error


_OWN_GENERATOR = "random numbers are drawn from a separate generator (generator=...)"
_BACKWARD_HOOK = "a module that the loss calls has a backward hook"
_OF_PYTHON = "a random number drawn by Python or numpy would become a constant of the step"
_DIFFERENTIATES = "the loss function takes a gradient itself, as a gradient penalty does"
_SWITCHES = "the step switches requires_grad of a tensor, as a gradient penalty does"
_FLEX_ON_CPU = "FlexAttention has no backward pass on a CPU"
_INFERENCE = "the loss uses a tensor that was made under torch.inference_mode()"
_WRITES_OUTSIDE = "a module outside of the model, such as a teacher, writes into its own buffers"
_WRAPPED = "the loss function calls a model that is wrapped in DistributedDataParallel"
_REASON_OF = {
    "does not support changes to a Tensor's `requires_grad`": _SWITCHES,
    "setattr() on Tensor.requires_grad": _SWITCHES,
    "set_runtime_stats_and_log": _WRAPPED,
    "torch.autograd.grad`": _DIFFERENTIATES,
    "FlexAttention does not support backward on CPU": _FLEX_ON_CPU,
    "Inference tensors cannot be saved for backward": _INFERENCE,
    "mutating a non-functional tensor with a functional": _WRITES_OUTSIDE,
    "Module-level backwards hooks": _BACKWARD_HOOK,
    "random_value_": _OF_PYTHON,
    "module>.Random.": _OF_PYTHON,
    "use_numpy_random_stream": _OF_PYTHON,
    "UserDefinedObjectVariable(Generator)": _OWN_GENERATOR,
    "torch._C.Generator": _OWN_GENERATOR,
    "Generator.__new__": _OWN_GENERATOR,  # before torch 2.13
    "SparseTensorImpl": "a gradient is sparse, as nn.Embedding(sparse=True) gives it",
    "backward through the graph a second time": "the loss function runs backward() itself",
    "_local_scalar_dense": "a number is read from a tensor (.item(), float(), int())",
    "nonzero": "a shape depends on tensor values (nonzero, boolean index)",
    "backend_input must not be None": "the loss function runs no operator that could be captured",
}


# The message alone may be just a missing key, so the exception type is shown with it.
_PYTHON_ERRORS = (LookupError, AttributeError, NameError, AssertionError, ArithmeticError)


def _first_line(error: BaseException) -> str:
    """Return the most useful sentence: Dynamo wraps the operator's own message several times."""
    text = str(error)
    for mark, reason in _REASON_OF.items():
        if mark in text:
            return reason
    for pattern in (r"got (\w+\(.*)", r"Explanation: (.*)", r"RuntimeError: (.*)"):
        found = re.search(pattern, text)
        if found:
            return shortened(found[1].strip().partition(" This function is either")[0])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kind = type(error).__name__
    if not lines or isinstance(error, _PYTHON_ERRORS):
        return shortened(": ".join([kind, *lines[:1]]))
    return shortened(lines[0])


def shortened(text: str, *, most: int = 200) -> str:
    """Shorten text to one line of whole words."""
    return textwrap.shorten(text, most, placeholder=" ...")


def _operator_line(error: BaseException, step: Any) -> str:
    """Return the line at which Dynamo traced the operator that the export could not handle."""
    graph = getattr(step, "graph", None)
    marks = {"_local_scalar_dense": "item", "nonzero": "nonzero"}
    wanted = next((word for mark, word in marks.items() if mark in str(error)), None)
    if graph is None or wanted is None:
        return ""
    for node in graph.nodes:
        boolean = "getitem" in str(node.target) and wanted == "nonzero"
        if (wanted in str(node.target) or boolean) and line_of(node):
            return f" at {line_of(node)}"
    return ""


def _appended_line(error: BaseException) -> str:
    """Return the operator's line from the stack that torch.fx appends to the message."""
    line = line_in_trace(str(error))
    return f" at {line}" if line else ""


def _in_distributions(error: BaseException) -> bool:
    """True if ``torch.distributions`` read a value to validate its arguments."""
    frames = traceback.extract_tb(error.__traceback__)
    return "_local_scalar_dense" in str(error) and any(
        "/torch/distributions/" in frame.filename for frame in frames
    )


def _module_of(error: BaseException, model: nn.Module) -> str:
    """Return the innermost module that was running; lines in torch's own layers would not help."""
    names = {id(m): f"{n} ({type(m).__name__})" for n, m in model.named_modules() if n}
    found = ""
    seen: BaseException | None = error
    while seen is not None and not found:
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            found = names.get(id(frame.f_locals.get("self")), found)
        seen = seen.__cause__ or seen.__context__
    return f" in {found}" if found else ""


def _user_line(error: BaseException) -> str:
    frames: list[traceback.FrameSummary] = []
    seen: BaseException | None = error
    while seen is not None:
        stack = getattr(seen, "real_stack", None)
        frames += list(stack) if stack else []
        frames += traceback.extract_tb(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
        if any(_is_user_file(f.filename) for f in frames):
            break
    user_frames = [f for f in frames if _is_user_file(f.filename)]
    return (
        f" at {Path(user_frames[-1].filename).name}:{user_frames[-1].lineno}" if user_frames else ""
    )


def _is_user_file(filename: str) -> bool:
    here = str(Path(__file__).parents[2])
    if filename.startswith((here, "<")) or "/site-packages/torch/" in filename:
        return False
    return "/site-packages/" in filename or "/lib/python" not in filename


def _remedy(text: str) -> str:
    lowered = text.lower()
    for marks, remedy in _REMEDIES:
        if any(mark in lowered for mark in marks):
            return remedy
    return "run loss(model, batch) in plain PyTorch; if that works, remove this line"


def drawn_by_python() -> CaptureRefused:
    return CaptureRefused(
        f"the training step cannot be captured: {_OF_PYTHON}",
        expected="random numbers drawn by torch, which a captured step draws in every call",
        remedy=_REMEDY_OF[_OF_PYTHON],
    )


_VALIDATES = "pass validate_args=False: the distribution reads values to check its arguments"
_REMEDY_OF = {
    _SWITCHES: "set requires_grad before the step, or train this step in plain PyTorch",
    _DIFFERENTIATES: "remove the penalty, or train this step in plain PyTorch",
    _FLEX_ON_CPU: 'use another attention on a CPU (attn_implementation="sdpa" in transformers), or '
    "plan on a GPU",
    _INFERENCE: "call a teacher under torch.no_grad() instead of torch.inference_mode()",
    _WRAPPED: "call the model that is passed to the loss function, and plan it without the wrapper",
    _WRITES_OUTSIDE: "call .eval() on it, or make it part of the model",
    _BACKWARD_HOOK: "remove it; hooks on tensors (x.register_hook) are kept",
    _OF_PYTHON: "draw before the step and pass it with the batch, or draw with torch (torch.rand)",
    _OWN_GENERATOR: "remove generator=, or draw before the step and pass it with the batch",
}
_EXPECTED_OF = {
    _SWITCHES: "tensors whose requires_grad does not change during the step",
    _DIFFERENTIATES: "a loss without torch.autograd.grad: the step is differentiated once",
    _FLEX_ON_CPU: "operators that have a backward pass on the model's device",
    _INFERENCE: "tensors that autograd can save",
    _WRITES_OUTSIDE: "modules outside of the model without side effects, such as in eval mode",
    _WRAPPED: "the model that is passed to the loss function",
    _BACKWARD_HOOK: "no module backward hooks: the captured backward pass is one program",
    _OF_PYTHON: "random numbers drawn by torch, which a captured step draws in every call",
}
_REMEDIES = (
    (("sparseimpl", "sparsetensorimpl"), "use nn.Embedding(..., sparse=False)"),
    (
        ("random.",),
        "draw with torch (torch.rand) and choose by torch.where, or choose before the step",
    ),
    (
        ("requires_grad",),
        "do not change requires_grad inside of the step; gradients of gradients need plain PyTorch",
    ),
    (
        ("data-dependent", "datadependent", "unbacked", "dynamicoutputshape"),
        "replace the branch on tensor values by torch.where, or the changing shape by a mask",
    ),
    (("print",), "remove the print (or logging call) from the forward pass"),
    (
        ("backward",),
        "do not call backward() in the loss function; use plain PyTorch for gradients of gradients",
    ),
    (("hook",), "remove the module's backward hook; tensor hooks on parameters are kept"),
    (("lock",), "run loss(model, batch) once in plain PyTorch, then plan again"),
    (
        ("size", "shape", "mat1"),
        "run loss(model, batch) once in plain PyTorch: the shapes do not fit each other",
    ),
)
