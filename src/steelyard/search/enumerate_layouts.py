"""Enumerates parallel layouts: degrees on ranks, and the schedules of a deep model.

Not for the cost of a layout: see ranks/layout_search.py and cluster/search.py.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from steelyard.hardware.topology import TopologyLevel
from steelyard.ir.parallel_layout import ParallelLayout

# Largest number of virtual stages per rank, of samples per micro-batch, and of tensor-parallel
# ranks.
_MAX_VIRTUAL, _MAX_SAMPLES, _MAX_TENSOR_DEGREE = 8, 64, 16


def degrees_on(
    num_ranks: Collection[int],
    *,
    tensor: Iterable[int] = (1,),
    data: Sequence[int] = (1,),
    pipeline: Sequence[int] = (1,),
) -> Iterator[ParallelLayout]:
    """Yield each layout with these degrees whose number of ranks is one of ``num_ranks``."""
    for tensor_degree in tensor:
        for data_degree in data:
            for stages in pipeline:
                if tensor_degree * data_degree * stages in num_ranks:
                    yield ParallelLayout(data=data_degree, tensor=tensor_degree, pipeline=stages)


def tensor_degrees(tree: TopologyLevel) -> list[int]:
    """Return the tensor-parallel degrees to try: those that divide every innermost topology level.

    Tensor-parallel ranks are neighbours within one innermost level, which has the fastest links.
    """
    sizes = _innermost_sizes(tree)
    return [n for n in range(1, _MAX_TENSOR_DEGREE + 1) if all(size % n == 0 for size in sizes)]


def layouts_of(
    num_ranks: int, *, tensor: Sequence[int], samples: int, blocks: int, is_indivisible: bool
) -> Iterator[tuple[ParallelLayout, int]]:
    """Yield each layout with its samples per micro-batch.

    ``is_indivisible`` is true if the batch cannot be split.
    """
    divisors = _divisors(num_ranks)
    degrees = degrees_on((num_ranks,), tensor=tensor, data=divisors[::-1], pipeline=divisors)
    for base in degrees:
        if base.pipeline > max(1, blocks) or samples % base.data:
            continue
        if is_indivisible and base.data > 1:
            continue
        each = samples // base.data
        for micro_batch in [each] if is_indivisible else _micro_batches(each):
            for layout in _variants(replace(base, micro_batches=each // micro_batch), blocks):
                yield layout, micro_batch


def _variants(layout: ParallelLayout, blocks: int) -> Iterator[ParallelLayout]:
    """Yield the layout with each ZeRO stage and each number of virtual stages."""
    # Sharded gradients are reduced in every micro-batch. With several micro-batches, this is only
    # priced together with sharded weights, so ZeRO stage 2 is left out.
    state_stages = (
        (0,) if layout.data == 1 else (0, 1, 2, 3) if layout.micro_batches == 1 else (0, 1, 3)
    )
    for state_stage in state_stages:
        for virtual in _virtual(layout, blocks):
            yield replace(
                layout,
                virtual=virtual,
                state_stage=state_stage,
                overlaps=layout.data > 1 and state_stage < 3,
            )


def _virtual(layout: ParallelLayout, blocks: int) -> Iterator[int]:
    yield 1
    runs, rest = divmod(blocks, layout.pipeline)
    if layout.pipeline > 1 and not rest and layout.micro_batches % layout.pipeline == 0:
        yield from (v for v in range(2, _MAX_VIRTUAL + 1) if runs % v == 0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _micro_batches(samples: int) -> list[int]:
    return [n for n in _divisors(samples) if n <= _MAX_SAMPLES] or [samples]


def _innermost_sizes(level: TopologyLevel) -> set[int]:
    """Return the sizes of the innermost topology levels, in devices."""
    found: set[int] = set()
    for member in level.members:
        found |= (
            _innermost_sizes(member.of) if isinstance(member.of, TopologyLevel) else {member.count}
        )
    return found
