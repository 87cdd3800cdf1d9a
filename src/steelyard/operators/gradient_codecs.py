"""Gradients in few bits, block by block: written down, read back and added up.

Codes are put into words of 32 bits and taken out of them by shifts, which Inductor vectorises where
it does not those of bytes, and loads of a few bytes it makes one by one. What is not finite makes
its block's scale so, and every rank then finds nothing finite in it; but it never stays in a
residual. Not for which gradients, nor for sending: see passes/compression/compressed_all_reduce.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from importlib.util import find_spec
from itertools import accumulate

import torch

from steelyard import _torch
from steelyard.errors import BadInput
from steelyard.ir.gradient_codec import BLOCK, CODECS

# Of a bell-shaped value in three levels least is lost at 1.22 of its root mean square. Gradients
# are not: what lies far beyond the level waits for many steps (docs/log.md, 2026-11-26).
_LEVEL = 2.5
_QUARTER = BLOCK // 4
_LEAST = 1e-30


def encode_gradients(
    tensors: Sequence[torch.Tensor], residual: torch.Tensor | None, codec: str, parts: int
) -> torch.Tensor:
    """One row of bytes for each part of ``tensors``, put one behind the other.

    They are added to ``residual``, where there is one, and what is lost stays there. In 16 bits it
    is as many elements.
    """
    flats = [x.reshape(-1) for x in tensors]
    if CODECS[codec].is_linear:
        return _narrowed(flats, getattr(torch, codec))
    blocks = -(-sum(x.numel() for x in flats) // (parts * BLOCK))
    written = _Written(codec, parts, blocks, flats[0].device)
    pieces = _Pieces(flats)
    most = _most_at_once(codec, flats[0].device)
    room = None
    if residual is None:
        room = flats[0].new_empty(min(blocks, most) * BLOCK, dtype=torch.float32)
    for part in range(parts):
        for first, count in _stretches(blocks, most):
            start, end = ((part * blocks + b) * BLOCK for b in (first, first + count))
            if residual is not None:
                values = residual[start:end]
                pieces.add_to(values, start)
            else:
                assert room is not None
                values = pieces.put_into(room[: end - start], start)
            written.write(part, first, values, keeps=residual is not None)
    return written.coded


def _narrowed(flats: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    sizes = [x.numel() for x in flats]
    narrow = flats[0].new_empty(sum(sizes), dtype=dtype)
    for place, flat in zip(narrow.split(sizes), flats, strict=True):
        place.copy_(flat)
    return narrow


def encode_sum(received: torch.Tensor, residual: torch.Tensor | None, codec: str) -> torch.Tensor:
    """One row: of this rank's part, the sum over what every rank wrote down."""
    blocks = _blocks_in(received, codec)
    written = _Written(codec, 1, blocks, received.device)
    keeps = residual is not None
    most = _most_at_once(codec, received.device)
    room = received.new_empty(0 if keeps else min(blocks, most) * BLOCK, dtype=torch.float32)
    for first, count in _stretches(blocks, most):
        values = room[: count * BLOCK]
        if residual is not None:
            values = residual[first * BLOCK : (first + count) * BLOCK]
        _read_into(values, received.unsqueeze(1), codec, 0, first, adds=keeps)
        written.write(0, first, values, keeps=keeps)
    return written.coded


def decode_gradients(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """All parts, one behind the other."""
    if CODECS[codec].is_linear:
        return coded.to(torch.float32)
    return _decoded(coded.unsqueeze(0), codec)


def decode_sum(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """The sum of what each rank wrote down; the same on all, who add in the same order."""
    return _decoded(coded.unsqueeze(1), codec)


def add_decoded(coded: torch.Tensor, values: torch.Tensor, codec: str) -> None:
    """The sum of all rows, to ``values`` in place."""
    for first, count in _stretches(_blocks_in(coded, codec), _most_at_once(codec, coded.device)):
        stretch = values[first * BLOCK : (first + count) * BLOCK]
        _read_into(stretch, coded.unsqueeze(1), codec, 0, first, adds=True)


# What is coded at once: as much as stays in a core's caches from one loop to the next, and on
# another device as much as keeps all of it at work. It is as many parts as a word holds codes, and
# a block some elements of each: a word holds codes that lie far apart, and nothing is ever taken
# out of between others.
_PARTS_OF = {"ternary": 16, "int8": 4, "largest": 4}
# Sixteen parts that lay a power of two apart would push one another out of a core's first cache.
_BLOCKS_OF = {"ternary": 513, "int8": 512, "largest": 512}
_BLOCKS_ELSEWHERE = 2**17
# What is written down of more rows takes a compiler too long.
_ONE_BY_ONE = 8


def _most_at_once(codec: str, device: torch.device) -> int:
    return _BLOCKS_OF[codec] if device.type == "cpu" else _BLOCKS_ELSEWHERE


def _stretches(blocks: int, most: int) -> Iterator[tuple[int, int]]:
    """The first of each, and how many."""
    for first in range(0, blocks, most):
        yield first, min(most, blocks - first)


class _Pieces:
    """Tensors one behind the other, and zeros behind the last."""

    def __init__(self, flats: Sequence[torch.Tensor]) -> None:
        self._flats = flats
        self._starts = [*accumulate((x.numel() for x in flats), initial=0)]

    def add_to(self, values: torch.Tensor, start: int) -> None:
        for place, piece in self._between(start, start + values.numel()):
            values[place].add_(piece)

    def put_into(self, values: torch.Tensor, start: int) -> torch.Tensor:
        end = max(0, self._starts[-1] - start)
        values[end:].zero_()
        for place, piece in self._between(start, start + values.numel()):
            values[place].copy_(piece)
        return values

    def _between(self, start: int, end: int) -> Iterator[tuple[slice, torch.Tensor]]:
        number = max(0, bisect_right(self._starts, start) - 1)
        while number < len(self._flats) and self._starts[number] < end:
            begins = self._starts[number]
            low, high = max(start, begins), min(end, self._starts[number + 1])
            if low < high:
                yield (
                    slice(low - start, high - start),
                    self._flats[number][low - begins : high - begins],
                )
            number += 1


class _Written:
    """Rows of bytes: all scales of a part, then all its codes."""

    def __init__(self, codec: str, parts: int, blocks: int, device: torch.device) -> None:
        self._codec, self._width = codec, CODECS[codec].block_bytes
        self._blocks = blocks
        nbytes = blocks * (4 + self._width)
        self.coded = torch.empty((parts, nbytes), dtype=torch.uint8, device=device)
        if not nbytes:
            return  # and nothing is written
        self._scales, self._words = self.coded.view(torch.float32), self.coded.view(torch.int32)

    def write(self, part: int, first: int, values: torch.Tensor, *, keeps: bool) -> None:
        encode = _encoder(self._codec, keeps, values.device)
        scales, codes = encode(*_in_parts(values, self._codec).unbind())
        self._scales[part, first : first + scales.numel()].copy_(scales)
        words = codes.view(-1).view(torch.int32)
        start = self._blocks + first * self._width // 4
        self._words[part, start : start + words.numel()].copy_(words)


def _in_parts(values: torch.Tensor, codec: str) -> torch.Tensor:
    """Of a stretch, (parts, blocks, elements of a block in each)."""
    parts = _PARTS_OF[codec]
    return values.view(parts, -1, BLOCK // parts)


def _blocks_in(coded: torch.Tensor, codec: str) -> int:
    return coded.shape[-1] // (4 + CODECS[codec].block_bytes)


def _decoded(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """The sum over the first dimension, of parts that follow one another along the second."""
    parts, blocks = coded.shape[1], _blocks_in(coded, codec)
    out = torch.empty(parts, blocks * BLOCK, dtype=torch.float32, device=coded.device)
    for part in range(parts):
        for first, count in _stretches(blocks, _most_at_once(codec, out.device)):
            values = out[part, first * BLOCK : (first + count) * BLOCK]
            _read_into(values, coded, codec, part, first, adds=False)
    return out.view(-1)


def _read_into(
    values: torch.Tensor, coded: torch.Tensor, codec: str, part: int, first: int, *, adds: bool
) -> None:
    """The sum over the first dimension, of a stretch of one part."""
    into = _in_parts(values, codec)
    taken = _taken_apart(coded, codec, part, first, into.shape[1])
    _decoder(codec, coded.shape[0], adds, values.device)(*taken, *into.unbind())


def _taken_apart(
    coded: torch.Tensor, codec: str, part: int, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of codes, or bytes of the largest's, and scales of each block of a stretch."""
    ranks, parts, nbytes = coded.shape
    lying = coded if codec == "largest" else coded.view(torch.int32)
    size = lying.itemsize
    width = CODECS[codec].block_bytes // size
    # By strides: a view would choose those of a dim of one as it likes.
    row = coded.storage_offset() + part * nbytes
    start = (row + 4 * _blocks_in(coded, codec)) // size + first * width
    codes = lying.as_strided((ranks, count, width), (parts * nbytes // size, width, 1), start)
    scales = coded.view(torch.float32).as_strided(
        (ranks, count, 1), (parts * nbytes // 4, 1, 1), row // 4 + first
    )
    return codes, scales


_Compiled = Callable[..., tuple[torch.Tensor, ...]]
_Parts = Sequence[torch.Tensor]


@cache
def _encoder(codec: str, keeps: bool, device: torch.device) -> _Compiled:
    encode = {"ternary": _ternary, "int8": _int8, "largest": _largest}[codec]
    parts, each = _PARTS_OF[codec], BLOCK // _PARTS_OF[codec]

    def run(*pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert pieces[0].shape[1] == each
        scales, codes, left = encode(pieces)
        if keeps:
            # Piece by piece: one loop then reads what a word is of, and writes what is left.
            for piece, lost in zip(pieces, left, strict=True):
                piece.copy_(torch.where(torch.isfinite(scales), lost, 0.0))
        return scales.view(-1), codes

    return _compiled(run, _ones(parts, 5, each, device=device).unbind())


@cache
def _decoder(codec: str, rows: int, adds: bool, device: torch.device) -> _Compiled:
    """Of so many rows, of which a few are written down one by one: a loop over them would be one of
    its own, and what is added another."""
    read = {"ternary": _ternary_read, "int8": _int8_read, "largest": _largest_read}[codec]
    parts, each = _PARTS_OF[codec], BLOCK // _PARTS_OF[codec]
    # As they lie in what is received: for all that lies so, and for all numbers of blocks. Of two
    # sizes that are alike a trace makes one, and as many blocks as rows were then all there are.
    count = 5 if rows != 5 else 7
    nbytes = 9 * (4 + CODECS[codec].block_bytes)
    received = torch.ones(rows, 3, nbytes, dtype=torch.uint8, device=device)
    taken = _taken_apart(received, codec, 1, 1, count)
    width = taken[0].shape[2]

    def run(codes: torch.Tensor, scales: torch.Tensor, *pieces: torch.Tensor) -> tuple[()]:
        assert (codes.shape[0], codes.shape[2]) == (rows, width)
        assert pieces[0].shape[1] == each
        for into, value in zip(pieces, read(codes, scales), strict=True):
            into.copy_(into + value if adds else value)
        return ()

    return _compiled(run, [*taken, *_ones(parts, count, each, device=device).unbind()])


def _ones(*shape: int, device: torch.device) -> torch.Tensor:
    """What is compiled for another format than it is given writes beyond the end."""
    return torch.ones(shape, dtype=torch.float32, device=device)


def _compiled(run: Callable[..., object], examples: Sequence[torch.Tensor]) -> _Compiled:
    if examples[0].device.type == "cpu" and _torch.cpp_compiler() is None:
        raise BadInput(
            "gradients in codes are compiled, and Inductor finds no C++ compiler",
            expected="g++ or clang++, or CXX naming one",
            remedy="install one, or take the rules of these gradients out of the plan",
        )
    if examples[0].device.type != "cpu" and find_spec("triton") is None:
        raise BadInput(
            "gradients in codes are compiled, and Inductor finds no Triton for a GPU",
            expected="the triton that torch's own builds for GPUs bring",
            remedy="install one, or send gradients in bfloat16 or as factors, which need none",
        )
    return _torch.compiled(run, examples)


# A scale of each block, codes, and what they lose of each part.
_Encoded = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]


def _ternary(pieces: _Parts) -> _Encoded:
    """-1, 0 or 1 times a scale, to the nearest; sixteen in a word, one of each part."""
    squares = _summed([v * v for v in pieces]).sum(1, keepdim=True)
    scale = _LEVEL * (squares * (1 / BLOCK)).sqrt()
    half = 0.5 * scale
    codes = [(v > half).to(torch.float32) - (v < -half).to(torch.float32) for v in pieces]
    left = [v - code * scale for v, code in zip(pieces, codes, strict=True)]
    return scale, _put_together([code + 1 for code in codes], bits=2), left


def _ternary_read(codes: torch.Tensor, scales: torch.Tensor) -> _Parts:
    return [_added((code - 1) * scales) for code in _taken_out(codes, bits=2)]


def _put_together(codes: _Parts, *, bits: int) -> torch.Tensor:
    """Words; the code of the last part is in the highest bits."""
    words, *others = (code.to(torch.int32) for code in codes)
    for part, code in enumerate(others, 1):
        words = words | (code << bits * part)
    return words


def _taken_out(words: torch.Tensor, *, bits: int) -> list[torch.Tensor]:
    """Of each part. What a shift brings in from the sign goes with what is not of the code."""
    some = (1 << bits) - 1
    return [((words >> bits * part) & some).to(torch.float32) for part in range(32 // bits)]


def _int8(pieces: _Parts) -> _Encoded:
    """The nearest of 255 multiples of a scale."""
    scale = _largest_size(pieces) * (1 / 127)
    codes = [_in_multiples(v, scale) for v in pieces]
    left = [v - code * scale for v, code in zip(pieces, codes, strict=True)]
    return scale, _put_together([code + 128 for code in codes], bits=8), left


def _largest_size(pieces: _Parts) -> torch.Tensor:
    """Of each block."""
    return reduce(torch.maximum, (v.abs() for v in pieces)).amax(1, keepdim=True)


def _in_multiples(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(v / scale.clamp_min(_LEAST)).clamp(-127, 127)


def _int8_read(codes: torch.Tensor, scales: torch.Tensor) -> _Parts:
    return [_added((code - 128) * scales) for code in _taken_out(codes, bits=8)]


def _added(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(0) if len(rows) > _ONE_BY_ONE else _summed(rows.unbind())


def _summed(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = values
    return sum(others, first)


def _largest(pieces: _Parts) -> _Encoded:
    """Of each quarter of a block the largest, one after the other: where it is, and how many of 255
    multiples of a scale. Places are found by comparing: nothing is taken out of between others."""
    scale = _largest_size(pieces) * (1 / 127)
    places, values, left = [], [], torch.stack([*pieces])
    at = torch.arange(_QUARTER, dtype=torch.float32, device=scale.device)
    for _ in range(CODECS["largest"].kept):
        size = left.abs()
        found = torch.where(size == size.amax(2, keepdim=True), at, float(_QUARTER))
        # Of what is not a number there is none.
        place = found.amin(2, keepdim=True).clamp_max(_QUARTER - 1)
        is_there = (at == place).to(torch.float32)
        code = _in_multiples((left * is_there).sum(2, keepdim=True), scale)
        left = left - is_there * (code * scale)
        places.append(place)
        values.append(code + 128)
    codes = torch.cat([*places, *values], 2).permute(1, 0, 2)
    return scale, codes.reshape(scale.shape[0], -1).to(torch.uint8), left.unbind()


def _largest_read(codes: torch.Tensor, scales: torch.Tensor) -> _Parts:
    kept = CODECS["largest"].kept
    taken = codes.to(torch.float32).reshape(*codes.shape[:2], 4, 2 * kept)
    places, values = taken[..., :kept], (taken[..., kept:] - 128) * scales.unsqueeze(-1)
    at = torch.arange(_QUARTER, dtype=torch.float32, device=codes.device)
    found = []
    for quarter in range(4):
        # A product, so that a scale that is not finite leaves nothing finite.
        each = [
            (at == places[:, :, quarter, n : n + 1]).to(torch.float32)
            * values[:, :, quarter, n : n + 1]
            for n in range(kept)
        ]
        found.append(sum(each[1:], each[0]).sum(0))
    return found
