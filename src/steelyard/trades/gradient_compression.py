"""Compressed gradients: data-parallel ranks exchange gradients in few bits.

Four trades of one kind, which differ in the codec and in its cost:

- quantized: either bfloat16, all-reduced, or 8 bits: multiples of a scale for each block, summed in
  float32, after an all-to-all if there are more than two ranks (ZeRO++, Wang et al., ICLR 2024).
- ternary: TernGrad (Wen et al., NIPS 2017) with two bits on the wire. Each block has a scale, and
  each element is rounded to -1, 0 or 1 times it. With error feedback, the rounding error is added
  to the next step's gradient (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).
- low rank: PowerSGD's linear form (Vogels et al., NeurIPS 2019): one power iteration per step,
  warm-started with the previous step's factor; both factors are all-reduced, with error feedback.
- top k: the largest elements of each block with their indices, so that all blocks have the same
  size and nothing is sorted, with error feedback (Aji and Heafield, EMNLP 2017; Lin et al., ICLR
  2018).

Not for the arithmetic (see operators/gradient_codecs.py, operators/low_rank.py) or for the exchange
(see passes/compression/).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.gradient_codec import (
    BFLOAT16,
    CODECS,
    INT8,
    LARGEST,
    TERNARY,
    Codec,
    is_worth_factors,
    low_rank,
)
from steelyard.ir.graph import Graph, Node
from steelyard.ir.optimizer_update import WEIGHT, parameters_named, parameters_of
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.rule_kinds import GradientCompression
from steelyard.ir.step_source import StepSource
from steelyard.passes.compression.compressed_all_reduce import compressed
from steelyard.passes.data_parallel.buckets import buckets
from steelyard.plans.trade import Offer, Rejection

# A parameter with one dim scales or shifts whole channels: its few elements have a large influence.
_FEWEST_DIMS, _LEAST_BYTES = 2, 16 << 10
# The number of columns of a factor in the offers.
_RANK = 4
# The first gradients are the largest, and the optimizer's moments average only a few of them.
_WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class _CompressionRule(GradientCompression):
    """A parameter whose gradient is compressed, and the number of warm-up steps without
    compression.
    """

    def describe(self) -> str:
        return f"{self.parameter} ({self.count}){self._codec_text}"

    @property
    def _codec_text(self) -> str:
        return ""

    @property
    def less_lossy(self) -> "QuantizedGradientsRule | TernaryGradientsRule | None":
        """A codec that needs no compiler falls back to one that needs none."""
        return self._quantized("bfloat16")

    def _quantized(self, form: Literal["bfloat16", "int8"]) -> "QuantizedGradientsRule":
        return QuantizedGradientsRule(
            parameter=self.parameter, count=self.count, warm_up=self.warm_up, format=form
        )


@dataclass(frozen=True, kw_only=True)
class QuantizedGradientsRule(_CompressionRule):
    """``[[quantized_gradients]]``, with the format on the wire."""

    trade: str = field(init=False, default="quantized_gradients")
    format: Literal["bfloat16", "int8"]

    @property
    def codec(self) -> Codec:
        return CODECS[self.format]

    @property
    def less_lossy(self) -> "QuantizedGradientsRule | None":
        return None if self.codec == BFLOAT16 else self._quantized("bfloat16")

    @property
    def _codec_text(self) -> str:
        return f" as {self.format}"


@dataclass(frozen=True, kw_only=True)
class TernaryGradientsRule(_CompressionRule):
    """``[[ternary_gradients]]``"""

    trade: str = field(init=False, default="ternary_gradients")

    @property
    def codec(self) -> Codec:
        return TERNARY

    @property
    def less_lossy(self) -> QuantizedGradientsRule:
        return self._quantized("int8")


@dataclass(frozen=True, kw_only=True)
class LowRankGradientsRule(_CompressionRule):
    """``[[low_rank_gradients]]``, with the number of columns of a factor."""

    trade: str = field(init=False, default="low_rank_gradients")
    rank: Annotated[int, Field(ge=1, le=1024)]

    @property
    def codec(self) -> Codec:
        return low_rank(self.rank)

    @property
    def _codec_text(self) -> str:
        return f" of rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class TopKGradientsRule(_CompressionRule):
    """``[[top_k_gradients]]``"""

    trade: str = field(init=False, default="top_k_gradients")

    @property
    def codec(self) -> Codec:
        return LARGEST

    @property
    def less_lossy(self) -> TernaryGradientsRule:
        return TernaryGradientsRule(
            parameter=self.parameter, count=self.count, warm_up=self.warm_up
        )


class _CompressGradients:
    """The trade of compressed gradients: pays computation and accuracy, buys communication.

    Error feedback also pays memory, for the error of one step until a later step corrects it.
    ``codecs`` are the codecs of the trade, the least lossy first.
    """

    name: ClassVar[str]
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
    rule: ClassVar[type[Rule]]
    codecs: ClassVar[tuple[Codec, ...]]

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what is exchanged
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        """Offer each codec of the trade for all gradients that are all-reduced, except small
        ones.
        """
        if program.layout.data == 1:
            return (), ()
        offers: list[Offer] = []
        refused: list[Rejection] = []
        for codec in self.codecs:
            if names := _codable(program.graph, codec):
                rules = _rules_for(self.rule_in(codec), program.graph, names)
                offers.append(Offer(trade=self.name, label=codec.label, rules=rules))
            else:
                reason = "ranks sum no gradient that is a large float32 matrix"
                refused.append(Rejection(trade=self.name, label=codec.label, reason=reason))
        return tuple(offers), tuple(refused)

    def rule_in(self, codec: Codec) -> GradientCompression:
        """Return a rule for this codec that names no parameter yet."""
        raise NotImplementedError

    def rewrite(
        self, program: Program, rules: Sequence[GradientCompression], source: StepSource
    ) -> Program:
        return _compressed(program, rules, source)


class QuantizedGradients(_CompressGradients):
    """A codec without error feedback, so that no memory is paid."""

    name: ClassVar[str] = QuantizedGradientsRule.trade
    pays: ClassVar[tuple[str, ...]] = ("computation", "accuracy")
    rule: ClassVar[type[Rule]] = QuantizedGradientsRule
    codecs: ClassVar[tuple[Codec, ...]] = (BFLOAT16, INT8)

    def rule_in(self, codec: Codec) -> QuantizedGradientsRule:
        return QuantizedGradientsRule(
            parameter="", format="bfloat16" if codec == BFLOAT16 else "int8"
        )


class TernaryGradients(_CompressGradients):
    name: ClassVar[str] = TernaryGradientsRule.trade
    rule: ClassVar[type[Rule]] = TernaryGradientsRule
    codecs: ClassVar[tuple[Codec, ...]] = (TERNARY,)

    def rule_in(self, codec: Codec) -> TernaryGradientsRule:  # noqa: ARG002 - there is one
        return TernaryGradientsRule(parameter="", warm_up=_WARM_UP)


class LowRankGradients(_CompressGradients):
    name: ClassVar[str] = LowRankGradientsRule.trade
    rule: ClassVar[type[Rule]] = LowRankGradientsRule
    codecs: ClassVar[tuple[Codec, ...]] = (low_rank(_RANK),)

    def rule_in(self, codec: Codec) -> LowRankGradientsRule:
        return LowRankGradientsRule(parameter="", rank=codec.rank, warm_up=_WARM_UP)


class TopKGradients(_CompressGradients):
    name: ClassVar[str] = TopKGradientsRule.trade
    rule: ClassVar[type[Rule]] = TopKGradientsRule
    codecs: ClassVar[tuple[Codec, ...]] = (LARGEST,)

    def rule_in(self, codec: Codec) -> TopKGradientsRule:  # noqa: ARG002 - there is one
        return TopKGradientsRule(parameter="", warm_up=_WARM_UP)


def _codable(graph: Graph, codec: Codec) -> list[str]:
    """Return the parameters whose gradients this codec can encode, in bucket order."""
    return [
        member.target
        for bucket in buckets(graph)
        for member in bucket.members
        if _is_codable(graph.by_name[member.target], codec)
    ]


def _rules_for(
    rule: GradientCompression, graph: Graph, names: Iterable[str]
) -> tuple[GradientCompression, ...]:
    """Return the fewest rules like ``rule`` that name exactly these parameters."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        pattern = pattern_of(name.removeprefix(WEIGHT), graph.runs)
        by_pattern.setdefault(pattern, []).append(name)
    found = []
    for pattern, own in by_pattern.items():
        if len(own) == len(parameters_of(graph, pattern)):
            found.append(replace(rule, parameter=pattern, count=len(own)))
        else:
            found += [replace(rule, parameter=name.removeprefix(WEIGHT)) for name in own]
    return tuple(sorted(found))


def _compressed(
    program: Program, rules: Sequence[GradientCompression], source: StepSource
) -> Program:
    """Return the program that exchanges the gradients of these rules in their codecs."""
    if not rules:
        return program
    assert not program.recomputed, "gradient compression is applied before recompute"
    layout = program.layout
    if layout.data == 1 or layout.pipeline > 1 or layout.tensor > 1:
        others = layout.pipeline > 1 or layout.tensor > 1
        raise Mismatch(
            f"the plan compresses gradients ({rules[0].trade})"
            + (", but ranks share layers or tensors" if others else ""),
            expected="ranks that share only the batch",
            remedy=f"remove the {rules[0].trade} rules from the plan, or plan again",
        )
    codecs = dict(_codecs_by_name(program.graph, rules))
    exchanged = {m.target for bucket in buckets(program.graph) for m in bucket.members}
    if unsupported := sorted(codecs.keys() - exchanged):
        raise Mismatch(
            f"the plan compresses the gradient of {unsupported[0].removeprefix(WEIGHT)}, but "
            "ranks do not sum it, or two rules compress it",
            expected="unsharded parameters, each in one rule",
            remedy=f"remove it from the {rules[0].trade} rules, or plan again",
        )
    graph = compressed(program.graph, codecs, num_ranks=layout.data, transport=source.transport)
    return program.with_graph(source.rewritten(graph))


def _codecs_by_name(
    graph: Graph, rules: Sequence[GradientCompression]
) -> Iterator[tuple[str, Codec]]:
    for rule in rules:
        codec = rule.codec
        for name in parameters_named(graph, rule):
            if not _is_codable(graph.by_name[name], codec, least_bytes=1):
                factors = f", much larger than factors of rank {codec.rank}" if codec.rank else ""
                raise Mismatch(
                    f"the gradient of {name.removeprefix(WEIGHT)} cannot be compressed with this "
                    "codec",
                    expected=f"gradients of float32 with two dimensions or more{factors}",
                    remedy=f"remove it from the {rule.trade} rules, or plan again",
                )
            yield name, codec


def _is_codable(parameter: Node, codec: Codec, *, least_bytes: int = _LEAST_BYTES) -> bool:
    tensor = parameter.outputs[0]
    is_large = len(tensor.shape) >= _FEWEST_DIMS and tensor.nbytes >= least_bytes
    is_matrix = not codec.rank or is_worth_factors(tensor, codec.rank)
    return is_large and is_matrix and tensor.dtype == "float32"
