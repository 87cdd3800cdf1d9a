"""How BERT-Large scales from one DGX-2H to 92: days on 16 V100, minutes on 1,472.

NVIDIA's first edition of August 2019. It gives no batch: as remembered of NVIDIA's recipe with
LAMB, 7,038 steps of 65,536 sequences of 128 words, then 1,563 of 32,768 of 512. Dropout and the
head are those of a GPT. Not for errors of other steps: see scoring.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.published.captured import BLOCKS, captured
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import declared, facts
from benchmarks.published.scoring import figure
from steelyard.core.deep_layout import MIXED, DeepLayout
from steelyard.core.stack import Stack
from steelyard.predict.deep import deep_step, tensor_costs
from steelyard.predict.sections import sections

_SHAPE = Shape(hidden=1024, heads=16, layers=24, sequence=128, vocabulary=30528)
_SHARES = tuple(s / 100 for s in range(30, 101, 2))
_graph = cache(captured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    sequence: int
    sequences: int
    batch: int
    most_at_once: int


_PHASES = (
    Phase(sequence=128, sequences=7038 * 65536, batch=65536, most_at_once=64),
    Phase(sequence=512, sequences=1563 * 32768, batch=32768, most_at_once=16),
)


def bert_figures() -> Iterator[dict[str, Any]]:
    _, error, naive = bert_fit()
    yield figure("BERT-Large on 1,472 from 16: time error", error, 0.20)
    yield figure("BERT-Large on 1,472 from 16: skill", error / naive, 0.4)


@cache
def bert_fit() -> tuple[float, float, float]:
    """The share that is reached is that of one machine, and scored on all of them; beside the error
    the naive one."""
    minutes = {int(line["devices"]): float(line["minutes"]) for line in facts("bert")}
    (few, alone), (many, together) = sorted(minutes.items())
    share = min(_SHARES, key=lambda share: abs(_minutes(few, share) / alone - 1))
    found, naive = _minutes(many, share), alone * few / many
    error = found / together - 1
    print(
        f"BERT-Large on {many}: {share:.0%} is reached; ~{found:.1f} min, {together:.0f} min: "
        f"{error:+.1%}, naive {naive / together - 1:+.1%}"
    )
    return share, abs(error), abs(naive / together - 1)


def _minutes(devices: int, share: float) -> float:
    return sum(_phase_seconds(phase, devices, share) for phase in _PHASES) / 60


def _phase_seconds(phase: Phase, devices: int, share: float) -> float:
    """Each device takes as many sequences a step as come nearest to the batch."""
    each = round(phase.batch / devices)
    times = -(-each // phase.most_at_once)
    layout = DeepLayout(data=devices, micro_batches=times)
    shape = replace(_SHAPE, sequence=phase.sequence)
    cluster = declared(f"[scope.cluster]\nmembers = {{ dgx-2 = {devices // 16} }}\n")
    stack = Stack(peak_share=share, bandwidth_share=share)
    graph = _graph(shape, micro_batch=-(-each // times), tensor=1)
    parts = sections(graph, tensor_costs(cluster, layout), layout, blocks=BLOCKS, stack=stack)
    step = deep_step(parts, cluster, layout, MIXED, num_blocks=shape.layers, stack=stack)
    return phase.sequences / (each * devices) * step.step_seconds
