"""Offload state: what an optimizer keeps lies in farther memory between steps.

ZeRO-Offload's and ZeRO-Infinity's trade (Rajbhandari et al., SC 2021), one parameter after another:
what is kept for it is fetched, it is updated, what is kept goes back. Strikes only the program's
update. Not for which parameters: see search/.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from steelyard.core.cluster import FAR_IN, FAR_OUT
from steelyard.core.collective import Collective, Exchange
from steelyard.core.errors import Mismatch
from steelyard.core.graph import FAR_CALLS, BlockRun, Graph, Node, Phase, Ref, Role, path_matches
from steelyard.core.program import Instruction, Program
from steelyard.core.rules import Rule, starred
from steelyard.core.trade import Offer, Refusal, Source
from steelyard.core.updates import owners, portions, states

# Of a parameter; less costs as many calls and buys nothing. A smaller tensor, such as the number of
# the step, stays where it is.
_LEAST_BYTES, _LEAST_TENSOR_BYTES = 64 << 10, 1024


class OffloadState:
    """Pays communication with far memory, buys memory for the whole step."""

    name: ClassVar[str] = "offload_state"
    pays: ClassVar[tuple[str, ...]] = ("communication",)
    buys: ClassVar[tuple[str, ...]] = ("memory",)
    is_exact: ClassVar[bool] = True
    is_bitwise: ClassVar[bool] = True

    def offers(
        self,
        program: Program,
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> tuple[tuple[Offer, ...], tuple[Refusal, ...]]:
        """One for each parameter, those of equal blocks together."""
        reason = _why_not(program)
        if not reason:
            assert program.update is not None
            by_pattern: dict[str, int] = {}
            for parameter in movable(program.update):
                pattern = _pattern(parameter, program.graph.runs)
                by_pattern[pattern] = by_pattern.get(pattern, 0) + 1
            offers = [
                Offer(
                    trade=self.name,
                    label=pattern if count == 1 else f"{pattern} ({count})",
                    rules=(Rule(trade=self.name, module=pattern, count=count, lead=1),),
                )
                for pattern, count in by_pattern.items()
            ]
            if offers:
                return tuple(offers), ()
            reason = "the optimizer keeps nothing large"
        return (), (Refusal(trade=self.name, label="everything", reason=reason),)

    def rewrite(
        self,
        program: Program,
        rules: Sequence[Rule],
        source: Source,  # noqa: ARG002 - other trades ask it
    ) -> Program:
        if not rules:
            return program
        if reason := _why_not(program):
            raise Mismatch(
                f"the plan moves what the optimizer keeps, and {reason}",
                expected="the optimizer that was planned with, or one like it",
                remedy="take the offload_state rules out of the plan, or plan again",
            )
        assert program.update is not None
        leads = _leads(movable(program.update, least_bytes=1), rules)
        return replace(program, update=with_states_far(program.update, leads))


def _why_not(program: Program) -> str:
    """Why nothing that an optimizer keeps can be moved; empty where something may be."""
    update = program.update
    if update is None:
        return "there is no optimizer in the plan"
    if program.graph.decomposition.startswith("inductor"):
        return "far memory is used by the runner python alone"
    if update.undivided:
        return update.undivided
    if owners(update.graph) is None:
        return "the optimizer's operators work on several parameters at once (foreach=False?)"
    return ""


def movable(update: Program, *, least_bytes: int = _LEAST_BYTES) -> dict[str, tuple[str, ...]]:
    """Of each parameter whose state could leave, the names of what is kept for it that would."""
    found = {}
    for parameter, names in states(update.graph).items():
        large = tuple(n for n in names if _nbytes(update.graph, n) >= _LEAST_TENSOR_BYTES)
        whole = all(_fills(update.graph, name) for name in large)
        if whole and sum(_nbytes(update.graph, name) for name in large) >= least_bytes:
            found[parameter] = large
    return found


def _nbytes(graph: Graph, name: str) -> int:
    return graph.by_name[name].outputs[0].nbytes


def _fills(graph: Graph, name: str) -> bool:
    """Whether it is all that lies on its storage, and lies there alone."""
    (tensor,) = graph.by_name[name].outputs
    others = [n for n in graph.inputs() if n.outputs[0].storage == tensor.storage]
    return len(others) == 1 and tensor.nbytes == graph.storages[tensor.storage].nbytes


def _pattern(parameter: str, runs: Sequence[BlockRun]) -> str:
    patterns = (starred(parameter, run) for run in sorted(runs, key=lambda r: -len(r.prefix)))
    return next((p for p in patterns if p is not None), parameter)


def _leads(able: Mapping[str, object], rules: Sequence[Rule]) -> dict[str, int]:
    """Each parameter that the rules name, in the order of the step, and its lead."""
    leads: dict[str, int] = {}
    for rule in rules:
        named = [p for p in able if path_matches(p, rule.module)]
        if len(named) != rule.count:
            raise Mismatch(
                f"offload_state rule for {rule.module} matches {len(named)} parameters of which "
                "the optimizer keeps something",
                expected=f"{rule.count}, as the plan says",
                remedy="plan again for this model, or edit parameter or count of that rule",
            )
        if twice := next((p for p in named if p in leads), None):
            raise Mismatch(
                f"two offload_state rules name {twice}",
                expected="each parameter in one rule",
                remedy="take one of them out of the plan, or plan again",
            )
        leads |= dict.fromkeys(named, rule.lead)
    return {parameter: leads[parameter] for parameter in able if parameter in leads}


def with_states_far(update: Program, leads: Mapping[str, int]) -> Program:
    """One parameter after another: fetch, update, send.

    ``leads``: so many parameters earlier fetching begins, and so many later what was sent is let
    go.
    """
    graph, owner = update.graph, owners(update.graph)
    assert owner is not None
    large = movable(update, least_bytes=1)
    trips = _Trips.of(graph, [name for parameter in leads for name in large[parameter]])
    groups = list(portions(update, owner, leads))
    moved = [portion for portion, _ in groups if portion]
    lines: list[Instruction] = []
    for place, (portion, own) in enumerate(groups):
        for later, parameter in enumerate(moved):
            if max(0, later - leads[parameter]) == place:
                lines += [trips.line("fetch", name) for name in large[parameter]]
        if portion:
            lines += [trips.line("fetched", name) for name in large[portion]]
        lines += own
        if portion:
            lines += [trips.line("send", name) for name in large[portion]]
        for earlier, parameter in enumerate(moved):
            if min(earlier + leads[parameter], len(moved) - 1) == place:
                lines += [trips.line("sent", name) for name in large[parameter]]
    result = replace(update, graph=trips.graph(), instructions=tuple(lines))
    assert not result.problems(), result.problems()
    return result


class _Trips:
    """The four calls by which each of these states comes and goes. What is fetched has the name
    that the state had, so that whatever reads it need not change."""

    def __init__(self, graph: Graph, nodes: Mapping[tuple[str, str], Node]) -> None:
        self._graph = graph
        self._nodes = nodes

    @classmethod
    def of(cls, graph: Graph, names: Sequence[str]) -> "_Trips":
        nodes: dict[tuple[str, str], Node] = {}
        for slot, name in enumerate(names):
            (tensor,) = graph.by_name[name].outputs

            def call(what: str, called: str, *reads: str, slot: int = slot) -> Node:
                return Node(
                    name=called,
                    op=f"{FAR_CALLS}{what}",
                    args=(slot, *(Ref(i) for i in reads)),
                    inputs=reads,
                    phase=Phase.UPDATE,
                    path="optimizer",
                    signature=f"{FAR_CALLS}{what}",
                )

            def over(axis: str, kind: Exchange, nbytes: int = tensor.nbytes) -> Collective:
                return Collective(kind=kind, axis=axis, num_ranks=1, sent_bytes=nbytes, hops=1)

            fetch = replace(
                call("fetch", f"{name}.fetch"),
                outputs=(tensor,),
                collective=over(FAR_IN, Exchange.FETCH),
            )
            send = replace(
                call("send", f"{name}.send", name), collective=over(FAR_OUT, Exchange.SEND)
            )
            nodes["fetch", name] = fetch
            nodes["fetched", name] = replace(
                call("fetched", name, fetch.name), outputs=(tensor,), waits_for=fetch.name
            )
            nodes["send", name] = send
            nodes["sent", name] = replace(
                call("sent", f"{name}.sent", send.name, name), waits_for=send.name
            )
        return cls(graph, nodes)

    def line(self, what: str, name: str) -> Instruction:
        node = self._nodes[what, name]
        return Instruction(node=node.name, value=node.name, inputs=node.inputs, phase=Phase.UPDATE)

    def graph(self) -> Graph:
        """With what is moved no longer there from the start."""
        moved = {name for _, name in self._nodes}
        gone = {t.storage for name in moved for t in self._graph.by_name[name].outputs}
        first = [n for (what, _), n in self._nodes.items() if what in ("fetch", "fetched")]
        last = [n for (what, _), n in self._nodes.items() if what in ("send", "sent")]
        rest = (n for n in self._graph.nodes if n.name not in moved)
        return replace(
            self._graph,
            nodes=(*first, *rest, *last),
            storages=tuple(
                replace(s, role=Role.ACTIVATION) if number in gone else s
                for number, s in enumerate(self._graph.storages)
            ),
        )
