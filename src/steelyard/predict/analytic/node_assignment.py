"""Assigns each node in a captured step of a few equal blocks to a section, region and kernel.

The assignment is the same for any number of samples. Not for a section's costs: see sections.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from steelyard.ir.collective import Exchange
from steelyard.ir.graph import Graph, Node, Phase
from steelyard.ir.model_blocks import SAVE_ALL, ActivationPolicy
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import CallSite
from steelyard.predict.analytic.fusion import Fusing, fusing

# Offset of the middle block, which has a neighbour on either side, from the first captured block.
MIDDLE = 1
_CALLS = "calls of "


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeAssignment:
    """The section and the recompute region of each node, by node name.

    ``section_of`` is the number of a block, or "before" or "after". ``region_of`` names the region
    in which a node is recomputed; empty if it is not recomputed. ``gatherings`` are the regions of
    values that are gathered again, and ``calls`` those of single recomputed calls. A recomputed
    module saves its outputs for readers outside of it; a recomputed call does not save its output
    for its own block.
    """

    section_of: Mapping[str, str]
    region_of: Mapping[str, str]
    gatherings: frozenset[str]
    calls: frozenset[str]
    middle: str
    following: str
    fusing: Fusing


def assign_nodes(
    graph: Graph,
    layout: ParallelLayout,
    policy: ActivationPolicy = SAVE_ALL,
    *,
    blocks: str,
    first: int = 0,
) -> NodeAssignment:
    """Assign each node of a graph to its section and recompute region.

    ``blocks`` is the path of the module list with the captured blocks, empty if there are none. The
    first captured block has the index ``first``; there are at least three.
    """
    work = _NodeRole(graph, layout, policy, blocks, first)
    section_of, region_of = work.section_of, work.region_of()

    def place(node: Node) -> tuple[str, Phase, str]:
        # No kernel spans two sections, or two passes.
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
    def __init__(
        self,
        graph: Graph,
        layout: ParallelLayout,
        policy: ActivationPolicy,
        blocks: str,
        first: int,
    ) -> None:
        self._graph, self._policy, self._blocks, self._first = graph, policy, blocks, first
        # A call with several results is recomputed if any of them is needed.
        self._recomputed_calls = frozenset(
            replace(call, op=call.op.partition("#")[0]) for call in policy.recomputed
        )
        self.section_of = self._sections_of_nodes()
        self.gathered = self._gathered_values() if layout.regathers_activations else {}

    def region_of(self) -> dict[str, str]:
        return {node.name: self._region_of(node) for node in self._graph.nodes}

    def _sections_of_nodes(self) -> dict[str, str]:
        """Return the section of each node: a block's number, "before" or "after" the blocks."""
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
        """Return the number of the captured block that a node belongs to, or an empty string."""
        head, _, inside = node.path.partition(f"{self._blocks}.")
        number = inside.partition(".")[0]
        is_block = self._blocks and not head and number.isdigit()
        return number if is_block and int(number) >= self._first else ""

    def _region_of(self, node: Node) -> str:
        number = self.section_of.get(node.name, "")
        if not number.isdigit():
            return ""
        if self._recomputed_calls and node.phase is Phase.FORWARD:
            _, _, inside = node.path.removeprefix(f"{self._blocks}.").partition(".")
            if CallSite(inside, node.op, node.nth) in self._recomputed_calls:
                return f"{_CALLS}{number}"
        if node.phase is Phase.FORWARD and any(self._inside(node, s) for s in self._policy.spared):
            return ""
        for inside in self._policy.recomputed_modules:
            path = self._inside(node, inside)
            if path:
                return path
        return self.gathered.get(node.name, "")

    def _inside(self, node: Node, module: str) -> str:
        """Return the path of ``module`` in the node's block if it contains the node, otherwise
        "".
        """
        number = self.section_of[node.name]
        path = f"{self._blocks}.{number}{'.' if module else ''}{module}"
        return path if node.path == path or node.path.startswith(f"{path}.") else ""

    def _gathered_values(self) -> dict[str, str]:
        """Return the nodes that depend on one gather and nothing else, up to the first product."""
        found: dict[str, str] = {}
        inputs = {node.name for node in self._graph.inputs()}
        for node in self._graph.forward():
            if node.collective is not None and node.collective.kind is Exchange.ALL_GATHER:
                found[node.name] = f"gathered {node.name}"
            elif not node.flops and node.inputs and inputs.isdisjoint(node.inputs):
                sources = {found.get(name) for name in node.inputs}
                gathering = sources.pop() if len(sources) == 1 else None
                if gathering is not None:
                    found[node.name] = gathering
        return found
