"""Where each call of a captured step of a few equal blocks belongs: to which section, to what is
computed again with it, and to which kernel. The same however many samples there are.

Not for what a section takes: see sections.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from steelyard.ir.cluster_layout import ClusterLayout
from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Graph, Node, Phase
from steelyard.ir.rule import CallSite
from steelyard.predict.analytic.fusion import Fusing, fusing

# Of the blocks that were captured, the one that has a neighbour on either side: so many after the
# first.
MIDDLE = 1
_CALLS = "calls of "


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeAssignment:
    """By the names of calls: ``section_of``, blocks by their number; ``region_of``, what a call is
    computed again with, or nothing. ``gatherings`` are regions of what is gathered anew, ``calls``
    those of single calls, of which none hands on what it keeps to others, as a module does."""

    section_of: Mapping[str, str]
    region_of: Mapping[str, str]
    gatherings: frozenset[str]
    calls: frozenset[str]
    middle: str
    following: str
    fusing: Fusing


def belonging(
    graph: Graph, layout: ClusterLayout, *, blocks: str, first: int = 0
) -> NodeAssignment:
    """``blocks`` is the path of the list that the captured blocks, three at least, stand in, the
    first of them at ``first``; empty where there are none."""
    work = _NodeRole(graph, layout, blocks, first)
    section_of, region_of = work.section_of, work.region_of()

    def place(node: Node) -> tuple[str, Phase, str]:
        # No kernel reaches from one section or pass to another.
        return section_of.get(node.name, ""), node.phase, region_of[node.name]

    return NodeAssignment(
        section_of=section_of,
        region_of=region_of,
        gatherings=frozenset(work.gathered.values()),
        calls=frozenset(name for name in region_of.values() if name.startswith(_CALLS)),
        middle=str(first + MIDDLE),
        following=str(first + MIDDLE + 1),
        fusing=fusing(graph, place),
    )


class _NodeRole:
    def __init__(self, graph: Graph, layout: ClusterLayout, blocks: str, first: int) -> None:
        self._graph, self._layout, self._blocks, self._first = graph, layout, blocks, first
        self._modules_again = tuple(a for a in layout.again if isinstance(a, str))
        # A call of several results runs again for any of them.
        self._calls_again = frozenset(
            replace(a, op=a.op.partition("#")[0]) for a in layout.again if not isinstance(a, str)
        )
        self.section_of = self._sections_of_nodes()
        self.gathered = self._gathered_values() if layout.gathers_again else {}

    def region_of(self) -> dict[str, str]:
        return {node.name: self._region_of(node) for node in self._graph.nodes}

    def _sections_of_nodes(self) -> dict[str, str]:
        """Blocks by their number; of the rest, what comes before the blocks, and what after."""
        found: dict[str, str] = {}
        rest, other = "before", "after"
        phase = Phase.FORWARD
        for node in self._graph.nodes:
            if node.is_input:
                continue
            if phase is Phase.FORWARD and node.phase is not Phase.FORWARD:
                phase, rest, other = node.phase, "after", "before"
            number = self._number_of(node)
            if number:
                found[node.name] = number
                rest = other
            else:
                found[node.name] = rest
        return found

    def _number_of(self, node: Node) -> str:
        """Of the block that a node belongs to; empty outside of those that were captured."""
        head, _, inside = node.path.partition(f"{self._blocks}.")
        number = inside.partition(".")[0]
        is_block = self._blocks and not head and number.isdigit()
        return number if is_block and int(number) >= self._first else ""

    def _region_of(self, node: Node) -> str:
        number = self.section_of.get(node.name, "")
        if not number.isdigit():
            return ""
        if self._calls_again and node.phase is Phase.FORWARD:
            _, _, inside = node.path.removeprefix(f"{self._blocks}.").partition(".")
            if CallSite(inside, node.op, node.nth) in self._calls_again:
                return f"{_CALLS}{number}"
        if node.phase is Phase.FORWARD and any(self._inside(node, s) for s in self._layout.spared):
            return ""
        for inside in self._modules_again:
            path = self._inside(node, inside)
            if path:
                return path
        return self.gathered.get(node.name, "")

    def _inside(self, node: Node, module: str) -> str:
        """The path of the module of its block that a node belongs to; none where it does not."""
        number = self.section_of[node.name]
        path = f"{self._blocks}.{number}{'.' if module else ''}{module}"
        return path if node.path == path or node.path.startswith(f"{path}.") else ""

    def _gathered_values(self) -> dict[str, str]:
        """What comes of each gathering, and of nothing else, before it is computed with."""
        found: dict[str, str] = {}
        given = {node.name for node in self._graph.inputs()}
        for node in self._graph.forward():
            if node.collective is not None and node.collective.kind is Exchange.ALL_GATHER:
                found[node.name] = f"gathered {node.name}"
            elif not node.flops and node.inputs and given.isdisjoint(node.inputs):
                sources = {found.get(name) for name in node.inputs}
                gathering = sources.pop() if len(sources) == 1 else None
                if gathering is not None:
                    found[node.name] = gathering
        return found
