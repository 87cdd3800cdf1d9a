"""Compressed gradients: data-parallel ranks exchange gradients in few bits.

Four trades of one kind, which differ in the codec and in its cost:

- quantized: bfloat16, all-reduced, or 8 bits, multiples of a scale for each block, summed in
  float32 after an all-to-all if there are more than two ranks (ZeRO++, Wang et al., ICLR 2024).
- ternary: TernGrad (Wen et al., NIPS 2017) with two bits on the wire: a scale for each block, the
  nearest of -1, 0 and 1 times it, and error feedback: the loss is added to the next step's gradient
  (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019).
- low rank: PowerSGD's linear form (Vogels et al., NeurIPS 2019): one power iteration per step,
  warm-started with the previous step's factor; both factors are all-reduced, with error feedback.
- top k: the largest elements of each block with their indices, so that all blocks have the same
  size and nothing is sorted, with error feedback (Aji and Heafield, EMNLP 2017; Lin et al., ICLR
  2018).

Not for the arithmetic (operators/gradient_codecs.py, operators/low_rank.py), nor for the exchange
(passes/compression/).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from steelyard.errors import Mismatch
from steelyard.ir.gradient_codec import CODES, Codec, codec_of, is_worth_factors
from steelyard.ir.graph import Graph, Node
from steelyard.ir.optimizer_update import WEIGHT, parameters_named, parameters_of
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule, pattern_of
from steelyard.ir.step_source import StepSource
from steelyard.passes.compression.compressed_all_reduce import coded
from steelyard.passes.data_parallel.buckets import buckets
from steelyard.plans.rule_table import (
    MOST_PARAMETERS,
    OMITTED,
    Parameter,
    Positive,
    RuleTable,
    Whole,
)
from steelyard.plans.trade import Offer, Rejection

# A 1-dim parameter scales or shifts whole channels: few elements, each of large influence.
_FEWEST_DIMS, _LEAST_BYTES = 2, 16 << 10
# The first gradients are the largest, and the optimizer's moments average only a few of them.
_WARM_UP = 5


class CompressedGradientsTable(RuleTable):
    """A parameter whose gradient is compressed, and the number of warm-up steps without."""

    most: ClassVar[int] = MOST_PARAMETERS

    module: Parameter
    count: Positive = 1
    lead: Annotated[Whole, Field(alias="warm_up"), OMITTED] = 0


class QuantizedGradientsTable(CompressedGradientsTable):
    """``[[quantized_gradients]]``, with the format on the wire."""

    op: Annotated[Literal["bfloat16", "int8"], Field(alias="format")]


class LowRankGradientsTable(CompressedGradientsTable):
    """``[[low_rank_gradients]]``, with the number of columns of a factor."""

    degree: Annotated[int, Field(ge=1, le=1024, alias="rank")]


class _CompressGradients:
    """Exchange gradients compressed: pays computation and accuracy, buys communication.

    Error feedback also pays memory, for the error of one step until a later step corrects it.
    """

    name: ClassVar[str]
    pays: ClassVar[tuple[str, ...]] = ("computation", "memory", "accuracy")
    buys: ClassVar[tuple[str, ...]] = ("communication",)
    is_exact: ClassVar[bool] = False
    is_bitwise: ClassVar[bool] = False
    table: ClassVar[type[RuleTable]] = CompressedGradientsTable

    def offers(
        self,
        program: Program,
        source: StepSource,  # noqa: ARG002 - the program says what is exchanged
    ) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
        return _offers_in(self.name, program)

    def rewrite(self, program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
        return _compressed(program, rules, source)


class QuantizedGradients(_CompressGradients):
    """Without error feedback, so that no memory is paid."""

    name: ClassVar[str] = "quantized_gradients"
    pays: ClassVar[tuple[str, ...]] = ("computation", "accuracy")
    table: ClassVar[type[RuleTable]] = QuantizedGradientsTable


class TernaryGradients(_CompressGradients):
    name: ClassVar[str] = "ternary_gradients"


class LowRankGradients(_CompressGradients):
    name: ClassVar[str] = "low_rank_gradients"
    table: ClassVar[type[RuleTable]] = LowRankGradientsTable


class TopKGradients(_CompressGradients):
    name: ClassVar[str] = "top_k_gradients"


def _offers_in(trade: str, program: Program) -> tuple[tuple[Offer, ...], tuple[Rejection, ...]]:
    """Offer each codec of the trade for all all-reduced gradients, except small ones."""
    if program.layout.data == 1:
        return (), ()
    offers: list[Offer] = []
    refused: list[Rejection] = []
    for (own, op, degree), codec in CODES.items():
        if own != trade:
            continue
        if names := _codable(program.graph, codec):
            lead = _WARM_UP if codec.has_residual else 0
            rules = _rules_for(trade, program.graph, names, op=op, degree=degree, lead=lead)
            offers.append(Offer(trade=trade, label=codec.label, rules=rules))
        else:
            reason = "no gradient that ranks sum up is a large matrix of float32"
            refused.append(Rejection(trade=trade, label=codec.label, reason=reason))
    return tuple(offers), tuple(refused)


def _codable(graph: Graph, codec: Codec) -> list[str]:
    """Return the parameters whose gradients this codec can encode, in bucket order."""
    return [
        member.target
        for bucket in buckets(graph)
        for member in bucket.members
        if _is_codable(graph.by_name[member.target], codec)
    ]


def _rules_for(
    trade: str, graph: Graph, names: Iterable[str], *, op: str, degree: int = 0, lead: int = 0
) -> tuple[Rule, ...]:
    """Return the fewest rules that name exactly these parameters."""
    names = list(names)
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        pattern = pattern_of(name.removeprefix(WEIGHT), graph.runs)
        by_pattern.setdefault(pattern, []).append(name)
    found = []
    rule = Rule(trade=trade, op=op, degree=degree, lead=lead)
    for pattern, own in by_pattern.items():
        if len(own) == len(parameters_of(graph, pattern)):
            found.append(replace(rule, module=pattern, count=len(own)))
        else:
            found += [replace(rule, module=name.removeprefix(WEIGHT)) for name in own]
    return tuple(sorted(found))


def _compressed(program: Program, rules: Sequence[Rule], source: StepSource) -> Program:
    """Return the program that exchanges the gradients of these rules in their codecs."""
    if not rules:
        return program
    assert not program.again, "what is exchanged is changed before anything is computed again"
    layout = program.layout
    if layout.data == 1 or layout.pipeline > 1 or layout.tensor > 1:
        others = layout.pipeline > 1 or layout.tensor > 1
        raise Mismatch(
            f"the plan sends gradients in codes ({rules[0].trade})"
            + (", and ranks share layers or tensors" if others else ""),
            expected="ranks that share the batch, and nothing else",
            remedy=f"take the {rules[0].trade} rules out of the plan, or plan again",
        )
    codecs = dict(_codecs_by_name(program.graph, rules))
    exchanged = {m.target for bucket in buckets(program.graph) for m in bucket.members}
    if unsupported := sorted(codecs.keys() - exchanged):
        raise Mismatch(
            f"the plan sends the gradient of {unsupported[0].removeprefix(WEIGHT)} in codes, and "
            "ranks do not sum it up by itself, or twice in codes",
            expected="parameters that every rank holds as a whole, each in one rule",
            remedy=f"take it out of the {rules[0].trade} rules, or plan again",
        )
    graph = coded(program.graph, codecs, num_ranks=layout.data, transport=source.transport)
    return program.with_graph(source.rewritten(graph))


def _codecs_by_name(graph: Graph, rules: Sequence[Rule]) -> Iterator[tuple[str, Codec]]:
    for rule in rules:
        codec = codec_of(rule)
        for name in parameters_named(graph, rule):
            if not _is_codable(graph.by_name[name], codec, least_bytes=1):
                factors = f", much larger than factors of rank {codec.rank}" if codec.rank else ""
                raise Mismatch(
                    f"the plan sends the gradient of {name.removeprefix(WEIGHT)} in codes",
                    expected=f"gradients of float32 with two dimensions or more{factors}",
                    remedy=f"take it out of the {rule.trade} rules, or plan again",
                )
            yield name, codec


def _is_codable(parameter: Node, codec: Codec, *, least_bytes: int = _LEAST_BYTES) -> bool:
    tensor = parameter.outputs[0]
    is_large = len(tensor.shape) >= _FEWEST_DIMS and tensor.nbytes >= least_bytes
    is_matrix = not codec.rank or is_worth_factors(tensor, codec.rank)
    return is_large and is_matrix and tensor.dtype == "float32"
