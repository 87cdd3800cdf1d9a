"""Block-wise gradient codecs: encode, decode and sum gradients in few bits.

Codes are packed into 32-bit words by shifts, because Inductor vectorises shifts of words but not of
bytes, and would load the bytes one at a time. A non-finite gradient makes the scale of its block
non-finite, so every rank decodes the whole block as non-finite; it never gets into a residual. Not
for choosing or sending gradients: see passes/compression/compressed_all_reduce.py.
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

# For a normal distribution, the error of three levels is smallest at 1.22 times the root mean
# square. Gradients have heavier tails: with a small level, error feedback takes many steps to send
# the large elements (docs/log.md, 2026-11-26).
_LEVEL = 2.5
_QUARTER = BLOCK // 4
_LEAST = 1e-30


def encode_gradients(
    tensors: Sequence[torch.Tensor], residual: torch.Tensor | None, codec: str, parts: int
) -> torch.Tensor:
    """Encode the concatenated ``tensors`` as ``parts`` rows of bytes.

    With a ``residual`` (error feedback), the tensors are added to it before encoding and the
    encoding error stays in it. The 16-bit codecs return one element per gradient instead.
    """
    flats = [x.reshape(-1) for x in tensors]
    if CODECS[codec].is_linear:
        return _rounded(flats, getattr(torch, codec))
    blocks = -(-sum(x.numel() for x in flats) // (parts * BLOCK))
    rows_out = _EncodedRows(codec, parts, blocks, flats[0].device)
    pieces = _Pieces(flats)
    most = _chunk_blocks(codec, flats[0].device)
    buffer = None
    if residual is None:
        buffer = flats[0].new_empty(min(blocks, most) * BLOCK, dtype=torch.float32)
    for part in range(parts):
        for first, count in _chunks(blocks, most):
            start, end = ((part * blocks + b) * BLOCK for b in (first, first + count))
            if residual is not None:
                values = residual[start:end]
                pieces.add_to(values, start)
            else:
                assert buffer is not None
                values = pieces.put_into(buffer[: end - start], start)
            rows_out.write(part, first, values, keeps=residual is not None)
    return rows_out.coded


def _rounded(flats: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    sizes = [x.numel() for x in flats]
    narrow = flats[0].new_empty(sum(sizes), dtype=dtype)
    for place, flat in zip(narrow.split(sizes), flats, strict=True):
        place.copy_(flat)
    return narrow


def encode_sum(received: torch.Tensor, residual: torch.Tensor | None, codec: str) -> torch.Tensor:
    """Decode this rank's part as received from every rank, and encode the sum as one row."""
    blocks = _blocks_in(received, codec)
    rows_out = _EncodedRows(codec, 1, blocks, received.device)
    keeps = residual is not None
    most = _chunk_blocks(codec, received.device)
    buffer = received.new_empty(0 if keeps else min(blocks, most) * BLOCK, dtype=torch.float32)
    for first, count in _chunks(blocks, most):
        values = buffer[: count * BLOCK]
        if residual is not None:
            values = residual[first * BLOCK : (first + count) * BLOCK]
        _decode_into(values, received.unsqueeze(1), codec, 0, first, adds=keeps)
        rows_out.write(0, first, values, keeps=keeps)
    return rows_out.coded


def decode_gradients(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """Decode all parts into one flat tensor."""
    if CODECS[codec].is_linear:
        return coded.to(torch.float32)
    return _decoded(coded.unsqueeze(0), codec)


def decode_sum(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """Decode the rows of all ranks and sum them in rank order, so that all ranks get the same
    bits.
    """
    return _decoded(coded.unsqueeze(1), codec)


def add_decoded(coded: torch.Tensor, values: torch.Tensor, codec: str) -> None:
    """Add the sum of all decoded rows to ``values`` in place."""
    for first, count in _chunks(_blocks_in(coded, codec), _chunk_blocks(codec, coded.device)):
        chunk = values[first * BLOCK : (first + count) * BLOCK]
        _decode_into(chunk, coded.unsqueeze(1), codec, 0, first, adds=True)


# Blocks are encoded in chunks. On a CPU a chunk stays in a core's caches from one loop to the next;
# on other devices it is large enough to occupy the device. A chunk is split into as many pieces as
# a word has codes. Word i packs element i of every piece, so that all loads are contiguous and no
# elements need to be interleaved.
_PARTS_OF = {"ternary": 16, "int8": 4, "largest": 4}
# 513, not 512: sixteen pieces at a distance that is a power of two would evict each other from the
# L1 cache.
_BLOCKS_OF = {"ternary": 513, "int8": 512, "largest": 512}
_BLOCKS_ELSEWHERE = 2**17
# Sums over more rows than this are not unrolled, because it would take the compiler too long.
_MOST_UNROLLED = 8


def _chunk_blocks(codec: str, device: torch.device) -> int:
    return _BLOCKS_OF[codec] if device.type == "cpu" else _BLOCKS_ELSEWHERE


def _chunks(blocks: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (first block, number of blocks) of each chunk."""
    for first in range(0, blocks, most):
        yield first, min(most, blocks - first)


class _Pieces:
    """A virtual concatenation of flat tensors, padded with zeros."""

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


class _EncodedRows:
    """The encoded result: for each part a row of bytes, with all scales and then all codes."""

    def __init__(self, codec: str, parts: int, blocks: int, device: torch.device) -> None:
        self._codec, self._width = codec, CODECS[codec].block_bytes
        self._blocks = blocks
        nbytes = blocks * (4 + self._width)
        self.coded = torch.empty((parts, nbytes), dtype=torch.uint8, device=device)
        if not nbytes:
            return  # there is nothing to write
        self._scales, self._words = self.coded.view(torch.float32), self.coded.view(torch.int32)

    def write(self, part: int, first: int, values: torch.Tensor, *, keeps: bool) -> None:
        encode = _encoder(self._codec, keeps, values.device)
        scales, codes = encode(*_pieces_of(values, self._codec).unbind())
        self._scales[part, first : first + scales.numel()].copy_(scales)
        words = codes.view(-1).view(torch.int32)
        start = self._blocks + first * self._width // 4
        self._words[part, start : start + words.numel()].copy_(words)


def _pieces_of(values: torch.Tensor, codec: str) -> torch.Tensor:
    """View a chunk as (pieces, blocks, elements of a block in each piece)."""
    parts = _PARTS_OF[codec]
    return values.view(parts, -1, BLOCK // parts)


def _blocks_in(coded: torch.Tensor, codec: str) -> int:
    return coded.shape[-1] // (4 + CODECS[codec].block_bytes)


def _decoded(coded: torch.Tensor, codec: str) -> torch.Tensor:
    """Sum decoded rows over dim 0 (ranks); the parts along dim 1 are concatenated."""
    parts, blocks = coded.shape[1], _blocks_in(coded, codec)
    out = torch.empty(parts, blocks * BLOCK, dtype=torch.float32, device=coded.device)
    for part in range(parts):
        for first, count in _chunks(blocks, _chunk_blocks(codec, out.device)):
            values = out[part, first * BLOCK : (first + count) * BLOCK]
            _decode_into(values, coded, codec, part, first, adds=False)
    return out.view(-1)


def _decode_into(
    values: torch.Tensor, coded: torch.Tensor, codec: str, part: int, first: int, *, adds: bool
) -> None:
    """Decode one chunk of one part, summed over dim 0 (ranks), into ``values``."""
    into = _pieces_of(values, codec)
    codes_and_scales = _codes_and_scales(coded, codec, part, first, into.shape[1])
    _decoder(codec, coded.shape[0], adds, values.device)(*codes_and_scales, *into.unbind())


def _codes_and_scales(
    coded: torch.Tensor, codec: str, part: int, first: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the codes (words; bytes for ``largest``) and scales of a chunk's blocks."""
    ranks, parts, nbytes = coded.shape
    units = coded if codec == "largest" else coded.view(torch.int32)
    size = units.itemsize
    width = CODECS[codec].block_bytes // size
    # Explicit strides: for a dim of size one, ``view`` may choose any stride, but the compiled
    # decoder accepts only the strides for which it was compiled.
    row = coded.storage_offset() + part * nbytes
    start = (row + 4 * _blocks_in(coded, codec)) // size + first * width
    codes = units.as_strided((ranks, count, width), (parts * nbytes // size, width, 1), start)
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
            # Compute piece by piece, so that one fused loop reads the elements of a word and writes
            # their errors.
            for piece, lost in zip(pieces, left, strict=True):
                piece.copy_(torch.where(torch.isfinite(scales), lost, 0.0))
        return scales.view(-1), codes

    return _compiled(run, _ones(parts, 5, each, device=device).unbind())


@cache
def _decoder(codec: str, rows: int, adds: bool, device: torch.device) -> _Compiled:
    """Compile a decoder for ``rows`` rows.

    A sum over few rows is unrolled; a reduction would not be fused with the final addition.
    """
    read = {"ternary": _decode_ternary, "int8": _decode_int8, "largest": _decode_largest}[codec]
    parts, each = _PARTS_OF[codec], BLOCK // _PARTS_OF[codec]
    # The example has the strides of received data, so that the compiled code is valid for received
    # data with any number of blocks. The number of blocks must differ from ``rows``: tracing would
    # treat equal dynamic sizes as one, and the code would only work for that number.
    count = 5 if rows != 5 else 7
    nbytes = 9 * (4 + CODECS[codec].block_bytes)
    received = torch.ones(rows, 3, nbytes, dtype=torch.uint8, device=device)
    example = _codes_and_scales(received, codec, 1, 1, count)
    width = example[0].shape[2]

    def run(codes: torch.Tensor, scales: torch.Tensor, *pieces: torch.Tensor) -> tuple[()]:
        assert (codes.shape[0], codes.shape[2]) == (rows, width)
        assert pieces[0].shape[1] == each
        for into, value in zip(pieces, read(codes, scales), strict=True):
            into.copy_(into + value if adds else value)
        return ()

    return _compiled(run, [*example, *_ones(parts, count, each, device=device).unbind()])


def _ones(*shape: int, device: torch.device) -> torch.Tensor:
    """Return example inputs. (Code that was compiled for another dtype would write out of
    bounds.)
    """
    return torch.ones(shape, dtype=torch.float32, device=device)


def _compiled(run: Callable[..., object], examples: Sequence[torch.Tensor]) -> _Compiled:
    if examples[0].device.type == "cpu" and _torch.cpp_compiler() is None:
        raise BadInput(
            "gradient codecs are compiled, but Inductor finds no C++ compiler",
            expected="g++ or clang++, or CXX naming one",
            remedy="install one, or remove the rules of these gradients from the plan",
        )
    if examples[0].device.type != "cpu" and find_spec("triton") is None:
        raise BadInput(
            "gradient codecs are compiled, but Inductor finds no Triton for the GPU",
            expected="triton, which comes with torch's builds for GPUs",
            remedy="install it, or send gradients in bfloat16 or as factors, which do not need it",
        )
    return _torch.compiled(run, examples)


# The scale of each block, the codes, and the encoding error of each piece.
_Encoded = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]


def _ternary(pieces: _Parts) -> _Encoded:
    """Encode as the nearest of -1, 0 and 1 times a scale; sixteen codes in a word."""
    squares = _sum_unrolled([v * v for v in pieces]).sum(1, keepdim=True)
    scale = _LEVEL * (squares * (1 / BLOCK)).sqrt()
    half = 0.5 * scale
    codes = [(v > half).to(torch.float32) - (v < -half).to(torch.float32) for v in pieces]
    left = [v - code * scale for v, code in zip(pieces, codes, strict=True)]
    return scale, _pack([code + 1 for code in codes], bits=2), left


def _decode_ternary(codes: torch.Tensor, scales: torch.Tensor) -> _Parts:
    return [_sum_rows((code - 1) * scales) for code in _unpack(codes, bits=2)]


def _pack(codes: _Parts, *, bits: int) -> torch.Tensor:
    """Pack codes into words; the code of the last piece is in the highest bits."""
    words, *others = (code.to(torch.int32) for code in codes)
    for part, code in enumerate(others, 1):
        words = words | (code << bits * part)
    return words


def _unpack(words: torch.Tensor, *, bits: int) -> list[torch.Tensor]:
    """Unpack the codes of each piece. The mask also removes sign bits that the shift brings in."""
    mask = (1 << bits) - 1
    return [((words >> bits * part) & mask).to(torch.float32) for part in range(32 // bits)]


def _int8(pieces: _Parts) -> _Encoded:
    """Encode as the nearest of 255 multiples of a scale."""
    scale = _largest_magnitude(pieces) * (1 / 127)
    codes = [_nearest_multiple(v, scale) for v in pieces]
    left = [v - code * scale for v, code in zip(pieces, codes, strict=True)]
    return scale, _pack([code + 128 for code in codes], bits=8), left


def _largest_magnitude(pieces: _Parts) -> torch.Tensor:
    """Return the largest magnitude of each block."""
    return reduce(torch.maximum, (v.abs() for v in pieces)).amax(1, keepdim=True)


def _nearest_multiple(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(v / scale.clamp_min(_LEAST)).clamp(-127, 127)


def _decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> _Parts:
    return [_sum_rows((code - 128) * scales) for code in _unpack(codes, bits=8)]


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(0) if len(rows) > _MOST_UNROLLED else _sum_unrolled(rows.unbind())


def _sum_unrolled(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = values
    return sum(others, first)


def _largest(pieces: _Parts) -> _Encoded:
    """Encode the largest elements of each quarter of a block as (position, 8-bit value) pairs.

    A value is one of 255 multiples of a scale. Elements are selected one after the other, by
    comparisons instead of gathers.
    """
    scale = _largest_magnitude(pieces) * (1 / 127)
    places, values, left = [], [], torch.stack([*pieces])
    at = torch.arange(_QUARTER, dtype=torch.float32, device=scale.device)
    for _ in range(CODECS["largest"].num_largest):
        size = left.abs()
        found = torch.where(size == size.amax(2, keepdim=True), at, float(_QUARTER))
        # A NaN is not equal to anything, so the position would be out of range.
        place = found.amin(2, keepdim=True).clamp_max(_QUARTER - 1)
        is_selected = (at == place).to(torch.float32)
        code = _nearest_multiple((left * is_selected).sum(2, keepdim=True), scale)
        left = left - is_selected * (code * scale)
        places.append(place)
        values.append(code + 128)
    codes = torch.cat([*places, *values], 2).permute(1, 0, 2)
    return scale, codes.reshape(scale.shape[0], -1).to(torch.uint8), left.unbind()


def _decode_largest(codes: torch.Tensor, scales: torch.Tensor) -> _Parts:
    num_largest = CODECS["largest"].num_largest
    fields = codes.to(torch.float32).reshape(*codes.shape[:2], 4, 2 * num_largest)
    places, values = (
        fields[..., :num_largest],
        (fields[..., num_largest:] - 128) * scales.unsqueeze(-1),
    )
    at = torch.arange(_QUARTER, dtype=torch.float32, device=codes.device)
    found = []
    for quarter in range(4):
        # Multiply instead of using ``where``, so that a non-finite scale makes the block
        # non-finite.
        each = [
            (at == places[:, :, quarter, n : n + 1]).to(torch.float32)
            * values[:, :, quarter, n : n + 1]
            for n in range(num_largest)
        ]
        found.append(sum(each[1:], each[0]).sum(0))
    return found
