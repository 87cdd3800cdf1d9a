"""Every layout of a deep model on so many ranks that is looked into.

Not for what any of them takes: see search.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.cluster_layout import ClusterLayout

# More runs of blocks on a rank, or samples in a micro-batch, are not looked into; nor tensors in
# more parts.
_MOST_VIRTUAL, _MOST_SAMPLES, _MOST_PARTS = 8, 64, 16


def tensor_degrees(tree: TopologyLevel) -> list[int]:
    """Neighbours: those of one innermost scope, which are joined best."""
    sizes = _innermost(tree)
    return [n for n in range(1, _MOST_PARTS + 1) if all(size % n == 0 for size in sizes)]


def layouts_of(
    num_ranks: int, *, tensor: Sequence[int], samples: int, blocks: int, is_whole: bool
) -> Iterator[tuple[ClusterLayout, int]]:
    """Each, and the samples of its micro-batches; ``is_whole`` where the batch cannot be cut."""
    for parts in tensor:
        for pipeline in _divisors(num_ranks // parts) if num_ranks % parts == 0 else ():
            data = num_ranks // parts // pipeline
            if pipeline > max(1, blocks) or samples % data or (is_whole and data > 1):
                continue
            each = samples // data
            for micro_batch in [each] if is_whole else _micro_batches(each):
                first = ClusterLayout(
                    tensor=parts, pipeline=pipeline, data=data, micro_batches=each // micro_batch
                )
                for layout in _variants(first, blocks):
                    yield layout, micro_batch


def _variants(layout: ClusterLayout, blocks: int) -> Iterator[ClusterLayout]:
    """With states held whole or in shares, in one run of blocks on each rank or in several."""
    # Gradients in shares are exchanged for each micro-batch; where there are several, that is
    # reckoned with weights in shares alone.
    stages = (0,) if layout.data == 1 else (0, 1, 2, 3) if layout.micro_batches == 1 else (0, 1, 3)
    for state_stage in stages:
        for virtual in _virtual(layout, blocks):
            yield replace(
                layout,
                virtual=virtual,
                state_stage=state_stage,
                overlaps=layout.data > 1 and state_stage < 3,
            )


def _virtual(layout: ClusterLayout, blocks: int) -> Iterator[int]:
    yield 1
    runs, rest = divmod(blocks, layout.pipeline)
    if layout.pipeline > 1 and not rest and layout.micro_batches % layout.pipeline == 0:
        yield from (v for v in range(2, _MOST_VIRTUAL + 1) if runs % v == 0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _micro_batches(samples: int) -> list[int]:
    return [n for n in _divisors(samples) if n <= _MOST_SAMPLES] or [samples]


def _innermost(scope: TopologyLevel) -> set[int]:
    """How many devices the smallest scopes have."""
    found: set[int] = set()
    for member in scope.members:
        found |= _innermost(member.of) if isinstance(member.of, TopologyLevel) else {member.count}
    return found
