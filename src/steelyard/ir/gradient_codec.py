"""Codecs that compress gradients on the wire: their names, sizes and operator calls.

With 8 bits or fewer, each block of elements has a scale of four bytes, and contains all elements or
only the largest. With 16 bits, each element is rounded separately. A low-rank codec replaces a
matrix by two factors. Not for executing codecs (operators/gradient_codecs.py,
operators/low_rank.py) or for values saved in memory (quantized_activation.py).
"""

from dataclasses import dataclass
from math import prod

from steelyard.ir.graph import Tensor

BLOCK = 1024
# Encodes gradients, one row for each part of them.
ENCODE = "steelyard.encode_gradients"
# Sums the parts received from all ranks, and encodes the sum.
ENCODE_SUM = "steelyard.encode_sum"
# The first decodes parts and concatenates them; the second decodes the rows of all ranks and sums
# them.
DECODE, DECODE_SUM = "steelyard.decode_gradients", "steelyard.decode_sum"
# These compute the left factor of each matrix, the right factor from the reduced left one, and the
# matrices.
LEFT, RIGHT = "steelyard.left_factors", "steelyard.right_factors"
MATRICES_OF_FACTORS = "steelyard.matrices_of_factors"
CODED_CALLS = frozenset({ENCODE, ENCODE_SUM, DECODE, DECODE_SUM, LEFT, RIGHT, MATRICES_OF_FACTORS})
# The first call of each exchange; all other calls read data from other ranks.
FIRST_CALLS = frozenset({ENCODE, LEFT})
# Name prefix of the inputs with the error feedback of a bucket, and name suffix of those with its
# initial right factors, which are the factors of the previous step.
RESIDUAL, START = "residual:", ":start"
# A matrix is factorized only if its factors are smaller than it by at least this ratio.
_LEAST_FACTOR_SAVING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A codec for gradients.

    ``has_residual``: the error of one step is added to the next (error feedback). ``is_linear``:
    the encoded values can be all-reduced directly, without blocks. ``rank``: the number of columns
    of the factors, 0 without factors. ``num_largest``: the number of largest elements sent, with
    their indices, for each quarter of a block; 0 sends all elements, in ``bits`` bits.
    """

    name: str
    bits: int
    has_residual: bool = False
    is_linear: bool = False
    rank: int = 0
    num_largest: int = 0

    @property
    def label(self) -> str:
        if self.num_largest:
            return f"the largest {4 * self.num_largest} of {BLOCK:,} gradients"
        return f"gradients of rank {self.rank}" if self.rank else f"gradients in {self.bits} bits"

    @property
    def is_compiled(self) -> bool:
        return not (self.is_linear or self.rank)

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of one block."""
        return 8 * self.num_largest if self.num_largest else BLOCK * self.bits // 8

    def row_bytes(self, blocks: int) -> int:
        """Return how many bytes a row takes: all scales, then all codes."""
        return blocks * (4 + self.block_bytes)


# The names are those of the corresponding torch formats.
BFLOAT16 = Codec(name="bfloat16", bits=16, is_linear=True)
INT8 = Codec(name="int8", bits=8)
TERNARY = Codec(name="ternary", bits=2, has_residual=True)
LARGEST = Codec(name="largest", bits=8, has_residual=True, num_largest=4)
CODECS = {codec.name: codec for codec in (BFLOAT16, INT8, TERNARY, LARGEST)}


def low_rank(rank: int) -> Codec:
    return Codec(name=f"rank {rank}", bits=32, has_residual=True, rank=rank)


def matrix_of(tensor: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a tensor seen as a matrix, whose rows are the outermost dim in
    memory.
    """
    outermost = max(zip(tensor.stride, tensor.shape), default=(1, 1))[1]
    return outermost, prod(tensor.shape) // max(1, outermost)


def is_worth_factors(tensor: Tensor, rank: int) -> bool:
    return are_worth_factors(*matrix_of(tensor), rank)


def are_worth_factors(rows: int, columns: int, rank: int) -> bool:
    return rows * columns >= _LEAST_FACTOR_SAVING * rank * (rows + columns)


def blocks_of(numel: int, *, parts: int) -> int:
    """Return how many blocks ``numel`` elements need in equal parts, with the last part padded."""
    return -(-numel // (parts * BLOCK)) * parts
