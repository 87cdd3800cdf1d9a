"""A deep model cut short, where a few of its blocks say all of the whole; and its eager twin.

Not for cutting (truncate.py), nor for what the blocks compute: see capture/tracing/joint_graph.py.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from steelyard.capture.deep.truncate import Truncation, cut, with_one_more
from steelyard.capture.eager_baseline import Call, EagerBaseline, eager_twin, forward_calls
from steelyard.capture.tracing.joint_graph import Loss
from steelyard.errors import CaptureRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedModel:
    """``twin`` is the whole model's, extrapolated; None where that is not to be had."""

    cut: Truncation
    twin: EagerBaseline | None


def shortened(model: nn.Module, loss: Loss, batch: Any) -> TruncatedModel | None:
    """None where the whole does not make the calls of three blocks and, for each block more, those
    that a fourth one adds: a model may count its blocks, and treat one of them apart.
    """
    short = cut(model)
    if short is None:
        return None
    try:
        whole = forward_calls(model, loss, batch)
        three = eager_twin(short.model, loss, batch)
        fours = {
            prefix: eager_twin(with_one_more(model, short.stretches, prefix), loss, batch)
            for prefix in short.stretches
        }
    except CaptureRefused:
        return None  # with fewer blocks, or on what is made up, it does not even run
    added = {prefix: four.calls for prefix, four in fours.items()}
    if whole != _expected(short, three.calls, added):
        return None
    held = dict(three.held_bytes)
    for prefix, four in fours.items():
        more = short.stretches[prefix].count - 3
        for call, nbytes in four.held_bytes.items():
            held[call] = held.get(call, nbytes) + more * (
                nbytes - three.held_bytes.get(call, nbytes)
            )
    # Of two runs it is not plain which of them is at its height at the peak.
    twin = replace(three, held_bytes=held) if len(fours) == 1 else None
    return TruncatedModel(cut=short, twin=twin)


def provably_cut(model: nn.Module, loss: Loss, batch: Any) -> Truncation | None:
    """The same, for who does not ask what eager PyTorch would hold."""
    short = cut(model)
    if short is None:
        return None
    try:
        whole, three = (forward_calls(m, loss, batch) for m in (model, short.model))
        added = {
            prefix: forward_calls(with_one_more(model, short.stretches, prefix), loss, batch)
            for prefix in short.stretches
        }
    except CaptureRefused:
        return None
    return short if whole == _expected(short, three, added) else None


def _expected(
    short: Truncation, three: Mapping[Call, int], fours: Mapping[str, Mapping[Call, int]]
) -> Counter[Call]:
    """Of the whole: the calls of three blocks, and as often as there are more, what one adds."""
    expected = Counter(three)
    for prefix, four in fours.items():
        more = short.stretches[prefix].count - 3
        added = Counter(four)
        added.subtract(three)
        expected.update({call: times * more for call, times in added.items()})
    return expected
