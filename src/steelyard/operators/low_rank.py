"""Low-rank gradient compression: two thin factors per matrix, one power iteration per step.

The left factor is the matrix times the right factor of the previous step; it is summed over ranks
and then made orthonormal. The right factor is the transposed matrix times the left factor. The
error is added in the next step (error feedback). Factors are stored with the long side contiguous,
because products with the other layout take several times as long. Not for sending: see
passes/compression/compressed_all_reduce.py.
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
    """Return the left factors of all matrices, flat; ``tensors`` are added to ``residual``."""
    flat = residual.new_empty(rank * sum(rows for rows, _ in shapes))
    parts = zip(tensors, _matrices(residual, shapes), _rights(start, shapes, rank),
                _lefts(flat, shapes, rank), strict=True)  # fmt: skip
    for x, value, right, left in parts:
        value.add_(x.reshape(value.shape))
        torch.mm(value, right.t(), out=left)
    return flat


def right_factors(
    lefts: torch.Tensor, residual: torch.Tensor, shapes: Shapes, rank: int
) -> torch.Tensor:
    """Return this rank's right factors of all matrices, flat.

    ``lefts`` have been summed over ranks. They are made orthonormal in place, and the product of
    both factors is subtracted from ``residual``. A matrix with a non-finite left factor gets NaN
    factors and a zero residual.
    """
    flat = residual.new_empty(rank * sum(columns for _, columns in shapes))
    parts = zip(_lefts(lefts, shapes, rank), _matrices(residual, shapes),
                _rights(flat, shapes, rank), strict=True)  # fmt: skip
    for left, value, right in parts:
        is_finite = left.isfinite().all()
        # This is done on the CPU only; on other devices, the test would synchronise the host with
        # the device.
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
    return flat


def matrices_of_factors(
    lefts: torch.Tensor,
    rights: torch.Tensor,
    start: torch.Tensor,
    shapes: Shapes,
    rank: int,
) -> torch.Tensor:
    """Multiply the summed factors to get flat gradients; the normalised ``rights`` become
    ``start``.
    """
    flat = lefts.new_empty(sum(rows * columns for rows, columns in shapes))
    put_products([*_matrices(flat, shapes)], lefts, rights, start, shapes, rank)
    return flat


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
    """Write each product of factors, times ``share``, into ``wholes``, and update ``start``."""
    parts = zip(_lefts(lefts, shapes, rank), _rights(rights, shapes, rank),
                _rights(start, shapes, rank), wholes, strict=True)  # fmt: skip
    for left, right, next_start, whole in parts:
        torch.mm(left if share == 1 else left * share, right, out=whole)
        norm = right.norm()
        is_some = norm.isfinite() & (norm > _LEAST)
        next_start.copy_(torch.where(is_some, right / norm, next_start))


def first_start(numel: int) -> torch.Tensor:
    """Return initial right factors, equal on every rank and device and in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(numel, dtype=torch.float32, device="cpu", generator=generator)


def _matrices(flat: torch.Tensor, shapes: Shapes) -> Iterator[torch.Tensor]:
    return _cut(flat, [(rows, columns) for rows, columns in shapes])


def _lefts(flat: torch.Tensor, shapes: Shapes, rank: int) -> Iterator[torch.Tensor]:
    return _cut(flat, [(rows, rank) for rows, _ in shapes])


def _rights(flat: torch.Tensor, shapes: Shapes, rank: int) -> Iterator[torch.Tensor]:
    """Yield the transposed right factors, which have one row for each of ``rank`` columns."""
    return _cut(flat, [(rank, columns) for _, columns in shapes])


def _cut(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
    begin = 0
    for rows, columns in shapes:
        yield flat[begin : begin + rows * columns].view(rows, columns)
        begin += rows * columns
