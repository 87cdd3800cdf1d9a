"""Gradients in few bits, as they go over a wire: the codes there are, their sizes, their calls.

In 8 bits and fewer, a scale of four bytes stands for each block of elements, of all of them or of
the largest; in 16 bits each is rounded by itself. Of low rank, two factors stand for a matrix. Not
for carrying it out (operators/codes, operators/low_rank), nor for values that wait in memory
(quantized_activation.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from steelyard.ir.graph import Tensor
from steelyard.ir.rule import Rule

BLOCK = 1024
# Writes gradients down, one row for each part of them.
ENCODE = "steelyard.encode_gradients"
# Adds up what came of all ranks, and writes the sum down.
ENCODE_SUM = "steelyard.encode_sum"
# Reads parts back, one behind the other; and adds up what each rank wrote down.
DECODE, DECODE_SUM = "steelyard.decode_gradients", "steelyard.decode_sum"
# Makes the left factor of each matrix; the right one, when the left is known of all; the matrices.
LEFT, RIGHT = "steelyard.left_factors", "steelyard.right_factors"
OF_FACTORS = "steelyard.of_factors"
CODED_CALLS = frozenset({ENCODE, ENCODE_SUM, DECODE, DECODE_SUM, LEFT, RIGHT, OF_FACTORS})
# Those that begin: all others read what came of other ranks.
FIRST_CALLS = frozenset({ENCODE, LEFT})
# How inputs begin that hold what codes lost of the gradients of one bucket, and have not made up
# for yet; and how such end that hold what right factors begin with, those of the step before.
RESIDUAL, START = "residual:", ":start"
# Of a matrix, factors are sent that are smaller than it by so many times at least.
_WORTH_FACTORS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """``has_residual``: what is lost in one step is added in the next. ``is_linear``: what is
    written down is added up on its way, and has no blocks. ``rank``: of so many columns are the
    factors, where there are any. ``kept``: of each quarter of a block go so many elements, the
    largest, with their places; else all, in so many bits."""

    name: str
    bits: int
    has_residual: bool = False
    is_linear: bool = False
    rank: int = 0
    kept: int = 0

    @property
    def label(self) -> str:
        if self.kept:
            return f"the largest {4 * self.kept} of {BLOCK:,} gradients"
        return f"gradients of rank {self.rank}" if self.rank else f"gradients in {self.bits} bits"

    @property
    def is_compiled(self) -> bool:
        return not (self.is_linear or self.rank)

    @property
    def block_bytes(self) -> int:
        """Of the codes of a block."""
        return 8 * self.kept if self.kept else BLOCK * self.bits // 8

    def row_bytes(self, blocks: int) -> int:
        """All scales, then all codes."""
        return blocks * (4 + self.block_bytes)


# By the name of torch's format.
BFLOAT16 = Codec(name="bfloat16", bits=16, is_linear=True)
INT8 = Codec(name="int8", bits=8)
TERNARY = Codec(name="ternary", bits=2, has_residual=True)
LARGEST = Codec(name="largest", bits=8, has_residual=True, kept=4)
CODECS = {codec.name: codec for codec in (BFLOAT16, INT8, TERNARY, LARGEST)}
_LOW_RANK, _RANK = "low_rank_gradients", 4


def low_rank(rank: int) -> Codec:
    return Codec(name=f"rank {rank}", bits=32, has_residual=True, rank=rank)


# Those of the trades whose rules say which gradients go in codes, and what rules say of the code,
# ``op`` and ``degree``; what loses least first.
CODES = {
    ("quantized_gradients", BFLOAT16.name, 0): BFLOAT16,
    ("quantized_gradients", INT8.name, 0): INT8,
    ("ternary_gradients", "", 0): TERNARY,
    (_LOW_RANK, "", _RANK): low_rank(_RANK),
    ("top_k_gradients", "", 0): LARGEST,
}
CODE_TRADES = tuple(dict.fromkeys(trade for trade, _, _ in CODES))


def codec_of(rule: Rule) -> Codec:
    if rule.trade == _LOW_RANK:
        return low_rank(rule.degree)
    return CODES[rule.trade, rule.op, rule.degree]


def codec_fallbacks(rules: Sequence[Rule]) -> tuple[tuple[Rule, ...], ...]:
    """These, and the same with gradients in codes that lose less and less, down to none at all."""
    rungs = [tuple(rules)]
    while any(rule.trade in CODE_TRADES for rule in rungs[-1]):
        milder = (_milder(rule) if rule.trade in CODE_TRADES else rule for rule in rungs[-1])
        rungs.append(tuple(sorted(rule for rule in milder if rule is not None)))
    return tuple(rungs)


def _milder(rule: Rule) -> Rule | None:
    """None where the gradient then goes as it is. What needs no compiler goes on without."""
    codec = codec_of(rule)
    if codec == BFLOAT16:
        return None
    if codec == LARGEST:
        return replace(rule, trade="ternary_gradients")
    milder = INT8 if codec == TERNARY else BFLOAT16
    return replace(rule, trade="quantized_gradients", op=milder.name, degree=0)


def warm_up_of(rules: Iterable[Rule]) -> int:
    """How many steps go without codes first."""
    return max((rule.lead for rule in rules if rule.trade in CODE_TRADES), default=0)


def matrix_of(tensor: Tensor) -> tuple[int, int]:
    """Its rows are what lies furthest apart in memory, and all else their columns."""
    outermost = max(zip(tensor.stride, tensor.shape), default=(1, 1))[1]
    return outermost, prod(tensor.shape) // max(1, outermost)


def is_worth_factors(tensor: Tensor, rank: int) -> bool:
    return are_worth_factors(*matrix_of(tensor), rank)


def are_worth_factors(rows: int, columns: int, rank: int) -> bool:
    return rows * columns >= _WORTH_FACTORS * rank * (rows + columns)


def blocks_of(numel: int, *, parts: int) -> int:
    """Of so many elements in equal parts, the last filled up."""
    return -(-numel // (parts * BLOCK)) * parts
