"""Gradients in few bits, as they go over a wire: the codes there are, their sizes, their calls.

In 8 bits and fewer, a scale of four bytes stands for each block of elements; in 16 bits each is
rounded by itself. Not for carrying it out (operators/codes), nor for values that wait in memory
(coding.py).
"""

from dataclasses import dataclass

BLOCK = 1024
# Writes gradients down, one row for each part of them.
ENCODE = "steelyard.encode_gradients"
# Adds up what came of all ranks, and writes the sum down.
ENCODE_SUM = "steelyard.encode_sum"
# Reads parts back, one behind the other; and adds up what each rank wrote down.
DECODE, DECODE_SUM = "steelyard.decode_gradients", "steelyard.decode_sum"
CODED_CALLS = frozenset({ENCODE, ENCODE_SUM, DECODE, DECODE_SUM})
# How inputs begin that hold what codes lost of the gradients of one bucket, and have not made up
# for yet.
RESIDUAL = "residual:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """``has_residual``: what is lost in one step is added in the next. ``is_linear``: what is
    written down is added up on its way, and has no blocks."""

    name: str
    bits: int
    has_residual: bool = False
    is_linear: bool = False

    @property
    def label(self) -> str:
        return f"gradients in {self.bits} bits"

    def row_bytes(self, blocks: int) -> int:
        """All scales, then all codes."""
        return blocks * (4 + BLOCK * self.bits // 8)


# By the name of torch's format.
BFLOAT16 = Codec(name="bfloat16", bits=16, is_linear=True)
INT8 = Codec(name="int8", bits=8)
TERNARY = Codec(name="ternary", bits=2, has_residual=True)
CODECS = {codec.name: codec for codec in (BFLOAT16, INT8, TERNARY)}
# Those of the trades whose rules say which gradients go in codes, and what rules say of the code;
# what loses least first.
CODES = {
    ("rounded_gradients", BFLOAT16.name): BFLOAT16,
    ("rounded_gradients", INT8.name): INT8,
    ("ternary_gradients", ""): TERNARY,
}
CODE_TRADES = tuple(dict.fromkeys(trade for trade, _ in CODES))


def blocks_of(numel: int, *, parts: int) -> int:
    """Of so many elements in equal parts, the last filled up."""
    return -(-numel // (parts * BLOCK)) * parts
