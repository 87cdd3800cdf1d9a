"""Truncated deep models that provably represent the full model, with their eager baseline.

Not for truncating (see truncate.py), nor for tracing (see capture/tracing/joint_graph.py).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from steelyard.capture.deep.truncate import Truncation, cut, with_one_more_block
from steelyard.capture.eager_baseline import Call, EagerBaseline, forward_calls, run_eager_baseline
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.errors import CaptureRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedModel:
    """``baseline`` is the extrapolated eager baseline of the full model; None if it is unknown."""

    truncation: Truncation
    baseline: EagerBaseline | None


def truncated_model(model: nn.Module, loss: Loss, batch: Any) -> TruncatedModel | None:
    """Truncate a model and extrapolate its eager baseline; None unless the calls confirm it.

    The full model must make the calls of three blocks and, for each further block, those that a
    fourth block adds. Otherwise it may, for example, count its blocks and treat one of them
    differently.
    """
    truncation = cut(model)
    if truncation is None:
        return None
    try:
        full = forward_calls(model, loss, batch)
        three = run_eager_baseline(truncation.model, loss, batch)
        fours = {
            prefix: run_eager_baseline(
                with_one_more_block(model, truncation.runs, prefix), loss, batch
            )
            for prefix in truncation.runs
        }
    except CaptureRefused:
        return None  # the model does not run with fewer blocks, or on fake tensors
    added = {prefix: four.calls for prefix, four in fours.items()}
    if full != _expected(truncation, three.calls, added):
        return None
    held_bytes = dict(three.held_bytes)
    for prefix, four in fours.items():
        more = truncation.runs[prefix].count - 3
        for call, nbytes in four.held_bytes.items():
            held_bytes[call] = held_bytes.get(call, nbytes) + more * (
                nbytes - three.held_bytes.get(call, nbytes)
            )
    # With two runs, it is unknown which of them holds more memory at the peak.
    baseline = replace(three, held_bytes=held_bytes) if len(fours) == 1 else None
    return TruncatedModel(truncation=truncation, baseline=baseline)


def proven_truncation(model: nn.Module, loss: Loss, batch: Any) -> Truncation | None:
    """Like ``truncated_model``, without the eager baseline."""
    truncation = cut(model)
    if truncation is None:
        return None
    try:
        full, three = (forward_calls(m, loss, batch) for m in (model, truncation.model))
        added = {
            prefix: forward_calls(with_one_more_block(model, truncation.runs, prefix), loss, batch)
            for prefix in truncation.runs
        }
    except CaptureRefused:
        return None
    return truncation if full == _expected(truncation, three, added) else None


def _expected(
    truncation: Truncation, three: Mapping[Call, int], fours: Mapping[str, Mapping[Call, int]]
) -> Counter[Call]:
    """Return the calls expected of the full model: those of three blocks and of each further
    block.
    """
    expected = Counter(three)
    for prefix, four in fours.items():
        more = truncation.runs[prefix].count - 3
        added = Counter(four)
        added.subtract(three)
        expected.update({call: times * more for call, times in added.items()})
    return expected
