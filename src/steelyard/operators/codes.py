"""Gradients in few bits, block by block: written down, read back and added up.

The arithmetic is in floating point, which Inductor vectorises where it does not shifts of bytes.
What is not finite makes its block's scale so, and every rank then finds nothing finite in it; but
it never stays in a residual. Not for which gradients, nor for sending: see exchange/coded.py.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch

from steelyard import _torch
from steelyard.core.codec import BLOCK

# Of a bell-shaped value in three levels least is lost at this share of its root mean square.
_LEVEL = 1.22
_QUARTER = BLOCK // 4
_LEAST = 1e-30


def encode_gradients(
    tensors: Sequence[torch.Tensor], residual: torch.Tensor | None, codec: str, parts: int
) -> torch.Tensor:
    """One row of bytes for each part of ``tensors``, put one behind the other.

    They are added to ``residual``, where there is one, and what is lost stays there.
    """
    if residual is None:
        numel = sum(x.numel() for x in tensors)
        padded = -(-numel // (parts * BLOCK)) * parts * BLOCK
        values = torch.empty(padded, dtype=torch.float32, device=tensors[0].device)
        values[numel:].zero_()
        torch.cat([x.reshape(-1) for x in tensors], out=values[:numel])
    else:
        values, start = residual, 0
        for x in tensors:
            values[start : start + x.numel()].add_(x.reshape(-1))
            start += x.numel()
    return _encoded(values, codec, parts, keeps=residual is not None)


def encode_sum(received: torch.Tensor, residual: torch.Tensor | None, codec: str) -> torch.Tensor:
    """One row: of this rank's part, the sum over what every rank wrote down."""
    values = decode_sum(received, codec)
    if residual is not None:
        values = residual.add_(values)
    return _encoded(values, codec, 1, keeps=residual is not None)


def decode_gradients(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """All parts, one behind the other."""
    return _read(coded.unsqueeze(0), codec)


def decode_sum(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """The sum of what each rank wrote down; the same on all, who add in the same order."""
    return _read(coded.unsqueeze(1), codec)


def _encoded(values: torch.Tensor, codec: str, parts: int, *, keeps: bool) -> torch.Tensor:
    """Each part is four quarters, and a block some elements of each: so bytes hold four codes
    that lie far apart, and nothing is ever taken out of between others."""
    blocks = values.numel() // (parts * BLOCK)
    width = BLOCK * _BITS[codec] // 8
    coded = torch.empty(parts, blocks * (4 + width), dtype=torch.uint8, device=values.device)
    for row, part in zip(coded, values.view(parts, 4, blocks, _QUARTER), strict=True):
        scales, codes = _encoder(codec, keeps)(part)
        row[: 4 * blocks].view(torch.float32).copy_(scales)
        row[4 * blocks :].copy_(codes.view(-1))
    return coded


def _read(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """The sum over the first dimension, of parts that follow one another along the second."""
    (values,) = _decoder(codec)(*_taken_apart(coded, codec))
    return values.view(-1)


def _taken_apart(coded: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each block of each part."""
    ranks, parts, nbytes = coded.shape
    width = BLOCK * _BITS[codec] // 8
    blocks = nbytes // (4 + width)
    # By strides: a view would choose those of a dim of one as it likes.
    start, words = coded.storage_offset(), nbytes // 4
    codes = coded.as_strided(
        (ranks, parts, blocks, width), (parts * nbytes, nbytes, width, 1), start + 4 * blocks
    )
    scales = coded.view(torch.float32).as_strided(
        (ranks, parts, blocks, 1), (parts * words, words, 1, 1), start // 4
    )
    return codes, scales


_Encoder = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
_Decoder = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


@cache
def _encoder(codec: str, keeps: bool) -> _Encoder:
    encode = {"ternary": _ternary, "int8": _int8}[codec]

    def run(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert (values.shape[0], values.shape[2]) == (4, _QUARTER)
        scales, codes, left = encode(values)
        if keeps:
            values.copy_(torch.where(torch.isfinite(scales), left, 0.0))
        return scales.view(-1), codes

    return _torch.compiled(run, [torch.ones(4, 5, _QUARTER)])


@cache
def _decoder(codec: str) -> _Decoder:
    read = {"ternary": _ternary_read, "int8": _int8_read}[codec]
    width = BLOCK * _BITS[codec] // 8

    def run(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor]:
        assert codes.shape[3] == width
        return (read(codes, scales),)

    # Of different sizes, and as they lie in what is received: for all sizes, and all that lies so.
    return _torch.compiled(run, _taken_apart(torch.ones(2, 3, 5 * (4 + width)).byte(), codec))


_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _ternary(v: torch.Tensor) -> _Three:
    """-1, 0 or 1 times a scale, to the nearest; four in a byte, one of each quarter.

    ``v`` is (4, blocks, quarter of a block); the scale, the codes, what they lose.
    """
    scale = _LEVEL * (v * v).mean((0, 2), keepdim=True).sqrt()
    half = 0.5 * scale
    t = (v > half).to(torch.float32) - (v < -half).to(torch.float32)
    codes = t[0] + 4 * t[1] + 16 * t[2] + 64 * t[3] + 85
    return scale, codes.to(torch.uint8), v - t * scale


def _ternary_read(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    c = codes.to(torch.float32)
    first = torch.floor((c + 0.5) * (1 / 4))
    second = torch.floor((c + 0.5) * (1 / 16))
    third = torch.floor((c + 0.5) * (1 / 64))
    quarters = (c - 4 * first, first - 4 * second, second - 4 * third, third)
    return torch.stack([((q - 1) * scales).sum(0) for q in quarters], dim=1)


def _int8(v: torch.Tensor) -> _Three:
    """The nearest of 255 multiples of a scale."""
    scale = v.abs().amax((0, 2), keepdim=True) * (1 / 127)
    code = torch.round(v / scale.clamp_min(_LEAST)).clamp(-127, 127)
    return scale, (code + 128).to(torch.uint8), v - code * scale


def _int8_read(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = codes.view(*codes.shape[:2], 4, -1, _QUARTER).to(torch.float32) - 128
    return (values * scales.unsqueeze(2)).sum(0)


_BITS = {"ternary": 2, "int8": 8}
