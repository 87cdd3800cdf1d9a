"""How BERT-Large scales from one DGX-2H to 92: days on 16 V100, minutes on 1,472.

NVIDIA's first edition of August 2019. How it was run is in NVIDIA/DeepLearningExamples at 6fe463fe,
PyTorch/LanguageModeling/BERT: 7,038 steps of 65,536 sequences of 128 words, 64 at once, then 1,563
of 32,768 of 512, 8 at once (README.md); gradients are added up in half precision once a step,
when all is computed (run_pretraining.py). Its README also has the sequences a second on 1 to 64
machines. Dropout and the head are those of a GPT. Not for errors of other steps: see scoring.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean, median
from typing import Any

from benchmarks.published.captured import BLOCKS, captured
from benchmarks.published.equal_blocks import step_of_equal_blocks
from benchmarks.published.gpt import Shape
from benchmarks.published.rows import Row, declared, facts
from benchmarks.published.scoring import figure
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.model_blocks import MIXED
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.sections import sections
from steelyard.predict.analytic.step import tensor_costs

_SHAPE = Shape(hidden=1024, heads=16, layers=24, sequence=128, vocabulary=30528)
_SHARES = tuple(s / 100 for s in range(30, 101, 2))
# The bytes that LAMB reads and writes for each parameter, as optimization.py calls it: the gradient
# to half precision and back (6 + 6), norms of gradient and weight (4 + 4), the direction from
# moments, gradient and weight (4 + 4 + 8 + 8 + 4), its norm (4), the weight (4 + 8), and its half
# precision (6).
_FORMATS = replace(MIXED, update_bytes=70)
_graph = cache(captured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    sequence: int
    sequences: int
    batch: int
    most_at_once: int


_PHASES = (
    Phase(sequence=128, sequences=7038 * 65536, batch=65536, most_at_once=64),
    Phase(sequence=512, sequences=1563 * 32768, batch=32768, most_at_once=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A step in which each device computes ``times`` micro-batches of ``at_once`` sequences."""

    devices: int
    sequence: int
    at_once: int
    times: int

    @property
    def sequences(self) -> int:
        return self.devices * self.at_once * self.times


def bert_figures() -> Iterator[dict[str, Any]]:
    _, error, naive = bert_fit()
    yield figure("BERT-Large on 1,472 from 16: time error", error, 0.20)
    yield figure("BERT-Large on 1,472 from 16: skill", error / naive, 0.4)
    errors = bert_step_errors()
    yield figure("BERT-Large, half of the steps: median time error", median(errors), 0.08)
    yield figure("BERT-Large, half of the steps: worst time error", max(errors), 0.20)


@cache
def bert_fit() -> tuple[float, float, float]:
    """Fit the achieved share on the smallest cluster, and score it on the largest.

    Return the share, its error, and the error of the naive guess.
    """
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


@cache
def bert_step_errors() -> tuple[float, ...]:
    """Fit the achieved share on every other row, and return the errors of the rest."""
    rows = list(_measured_steps())

    def errors(share: float, of: list[tuple[Steps, float]]) -> list[float]:
        return [_step_seconds(steps, share) / measured - 1 for steps, measured in of]

    used, scored = rows[::2], rows[1::2]
    share = min(_SHARES, key=lambda share: mean(abs(e) for e in errors(share, used)))
    found = errors(share, scored)
    for (steps, measured), error in zip(scored, found, strict=True):
        print(
            f"BERT-Large, {steps.sequence} words on {steps.devices}: {share:.0%} is reached; "
            f"{measured:.3f} s: {error:+.1%}"
        )
    return tuple(abs(error) for error in found)


def bert_rows() -> list[Row]:
    """Return the measured single steps as rows of one table."""
    return [_row(steps, seconds) for steps, seconds in _measured_steps()]


def _measured_steps() -> Iterator[tuple[Steps, float]]:
    for line in facts("bert_steps"):
        nodes, sequence, at_once, times = (
            int(line[n]) for n in ("nodes", "sequence", "micro_batch", "micro_batches")
        )
        steps = Steps(devices=16 * nodes, sequence=sequence, at_once=at_once, times=times)
        yield steps, steps.sequences / float(line["sequences_per_s"])


def _row(steps: Steps, seconds: float) -> Row:
    shape = replace(_SHAPE, sequence=steps.sequence)
    s, l, h, v = shape.sequence, shape.layers, shape.hidden, shape.vocabulary
    return Row(
        family="bert, V100",
        table="bert",
        name=f"BERT-0.34B of {steps.sequence} on {steps.devices}",
        graph=partial(_graph, shape, micro_batch=steps.at_once, tensor=1),
        cluster=_machines(steps.devices),
        layout=ParallelLayout(data=steps.devices, micro_batches=steps.times),
        formats=_FORMATS,
        stack=SoftwareStack(),
        num_blocks=shape.layers,
        model_flops=72 * steps.sequences * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h)),
        alike="",
        step_seconds=seconds,
    )


def _machines(devices: int) -> Cluster:
    return declared(f"[scope.cluster]\nmembers = {{ dgx-2 = {devices // 16} }}\n")


def _minutes(devices: int, share: float) -> float:
    return sum(_phase_seconds(phase, devices, share) for phase in _PHASES) / 60


def _phase_seconds(phase: Phase, devices: int, share: float) -> float:
    """Return the seconds of a phase on a number of devices.

    In a step, each device takes the number of sequences that comes nearest to the batch.
    """
    each = phase.batch / devices
    times = -(-round(each) // phase.most_at_once)
    steps = Steps(
        devices=devices, sequence=phase.sequence, at_once=round(each / times), times=times
    )
    return phase.sequences / steps.sequences * _step_seconds(steps, share)


def _step_seconds(steps: Steps, share: float) -> float:
    layout = ParallelLayout(data=steps.devices, micro_batches=steps.times)
    shape = replace(_SHAPE, sequence=steps.sequence)
    cluster = _machines(steps.devices)
    stack = SoftwareStack(peak_share=share, bandwidth_share=share)
    graph = _graph(shape, micro_batch=steps.at_once, tensor=1)
    parts = sections(graph, tensor_costs(cluster, layout), layout, blocks=BLOCKS, stack=stack)
    step = step_of_equal_blocks(
        parts, cluster, layout, _FORMATS, num_blocks=shape.layers, stack=stack
    )
    return step.step_seconds
