"""Matrices as products of two thin factors, found by one turn of power iteration a step.

The left factor is a matrix times what the right one was in the step before, made orthonormal when
it is the sum of all ranks'; the right one is the matrix times that. What their product leaves is
added in the next step. Products are taken with the long side in memory order: the other way round
they take several times as long. Not for sending: see passes/compression/compressed_all_reduce.py.
"""

from collections.abc import Iterator, Sequence

import torch

Shapes = Sequence[Sequence[int]]
_LEAST = 1e-30


def left_factors(
    tensors: Sequence[torch.Tensor],
    residual: torch.Tensor,
    start: torch.Tensor,
    shapes: Shapes,
    rank: int,
) -> torch.Tensor:
    """Those of all matrices, one behind the other; ``tensors`` are added to ``residual``."""
    made = residual.new_empty(rank * sum(rows for rows, _ in shapes))
    parts = zip(tensors, _matrices(residual, shapes), _rights(start, shapes, rank),
                _lefts(made, shapes, rank), strict=True)  # fmt: skip
    for x, value, right, left in parts:
        value.add_(x.reshape(value.shape))
        torch.mm(value, right.t(), out=left)
    return made


def right_factors(
    lefts: torch.Tensor, residual: torch.Tensor, shapes: Shapes, rank: int
) -> torch.Tensor:
    """This rank's; ``lefts``, the sum of all, are made orthonormal, and what is sent so is taken
    from ``residual``. Where something is not finite, nothing is, and nothing is lost."""
    made = residual.new_empty(rank * sum(columns for _, columns in shapes))
    parts = zip(_lefts(lefts, shapes, rank), _matrices(residual, shapes),
                _rights(made, shapes, rank), strict=True)  # fmt: skip
    for left, value, right in parts:
        is_finite = left.isfinite().all()
        # Elsewhere nobody waits for an answer: the host would fall behind the device.
        if left.device.type == "cpu" and not is_finite:
            value.zero_()
            left.fill_(torch.nan)
            right.fill_(torch.nan)
            continue
        left.copy_(torch.where(is_finite, torch.linalg.qr(left.where(is_finite, 1.0)).Q, torch.nan))
        torch.mm(left.t(), value, out=right)
        value.addmm_(left, right, alpha=-1)
        if left.device.type != "cpu":
            value.copy_(value.where(is_finite, 0.0))
    return made


def of_factors(
    lefts: torch.Tensor,
    rights: torch.Tensor,
    start: torch.Tensor,
    shapes: Shapes,
    rank: int,
) -> torch.Tensor:
    """The sums, one behind the other; the next step starts with these right factors."""
    made = lefts.new_empty(sum(rows * columns for rows, columns in shapes))
    put_products([*_matrices(made, shapes)], lefts, rights, start, shapes, rank)
    return made


def put_products(
    wholes: Sequence[torch.Tensor],
    lefts: torch.Tensor,
    rights: torch.Tensor,
    start: torch.Tensor,
    shapes: Shapes,
    rank: int,
    *,
    share: float = 1.0,
) -> None:
    """The same, each times ``share`` and where it is to be."""
    parts = zip(_lefts(lefts, shapes, rank), _rights(rights, shapes, rank),
                _rights(start, shapes, rank), wholes, strict=True)  # fmt: skip
    for left, right, next_start, whole in parts:
        torch.mm(left if share == 1 else left * share, right, out=whole)
        norm = right.norm()
        is_some = norm.isfinite() & (norm > _LEAST)
        next_start.copy_(torch.where(is_some, right / norm, next_start))


def first_start(numel: int) -> torch.Tensor:
    """The same on every rank and device, and each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, dtype=torch.float32, device="cpu", generator=generator)


def _matrices(flat: torch.Tensor, shapes: Shapes) -> Iterator[torch.Tensor]:
    return _cut(flat, [(rows, columns) for rows, columns in shapes])


def _lefts(flat: torch.Tensor, shapes: Shapes, rank: int) -> Iterator[torch.Tensor]:
    return _cut(flat, [(rows, rank) for rows, _ in shapes])


def _rights(flat: torch.Tensor, shapes: Shapes, rank: int) -> Iterator[torch.Tensor]:
    """Lying down: a row for each column of the factor."""
    return _cut(flat, [(rank, columns) for _, columns in shapes])


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
    begin = 0
    for rows, columns in shapes:
        yield flat[begin : begin + rows * columns].view(rows, columns)
        begin += rows * columns
