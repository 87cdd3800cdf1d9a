"""A published step: what was run, what was measured, and what is predicted of it.

Not for what any one publication printed: see the modules named after them.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.published.captured import BLOCKS
from benchmarks.published.equal_blocks import step_of_equal_blocks
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.cluster_file import decode_tree
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.graph import Graph
from steelyard.ir.model_blocks import SAVE_ALL, ActivationPolicy, Formats
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.sections import Section, Sections, sections
from steelyard.predict.analytic.step import AnalyticStep, tensor_costs

_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """``family`` names the device and the software, whose shares are fitted together; what is
    ``outside`` is of other software, and only scored. ``stack`` is what else is known of it.
    ``model_flops`` are a step's, none computed twice. Rows that are ``alike`` are what a guess
    from a constant efficiency goes by.
    """

    family: str
    table: str
    name: str
    graph: Callable[[], Graph]
    cluster: Cluster
    layout: ParallelLayout
    formats: Formats
    stack: SoftwareStack
    num_blocks: int
    model_flops: float
    alike: str
    step_seconds: float
    peak_bytes: float = 0.0
    outside: bool = False
    # Weights in parts went through as many of a machine's ports as the table says: see scoring.py.
    fits_ports: bool = False
    # What a printed peak has in it besides what the allocator gave out, in words; rows that say the
    # same share one figure for it, fitted where ``table`` has others than those that are scored.
    beside: str = ""
    policy: ActivationPolicy = SAVE_ALL
    # The blocks of each stage, if these are unequal.
    stage_blocks: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        return self.model_flops / self.layout.num_ranks / self.step_seconds


def predicted(row: Row, stack: SoftwareStack) -> AnalyticStep:
    return step_of_equal_blocks(
        _parts(row, stack),
        row.cluster,
        row.layout,
        row.formats,
        num_blocks=row.num_blocks,
        stage_blocks=row.stage_blocks,
        stack=stack,
    )


def peak_bytes(row: Row) -> int:
    """The peak of the rank that holds most."""
    return predicted(row, row.stack).peak_bytes


def block_of(row: Row, stack: SoftwareStack) -> Section:
    return _parts(row, stack).block


def _parts(row: Row, stack: SoftwareStack) -> Sections:
    costs = tensor_costs(row.cluster, row.layout)
    return sections(row.graph(), costs, row.layout, row.policy, blocks=BLOCKS, stack=stack)


def through_ports(row: Row, ports: int) -> Row:
    """As if no more of a machine's ports were used."""
    tree = row.cluster.tree
    members = tuple(replace(m, ports=min(m.ports, ports)) for m in tree.members)
    return replace(row, cluster=Cluster(tree=replace(tree, members=members)))


def reaching(row: Row, share: float, call_seconds: float) -> SoftwareStack:
    """The same share of what it computes and of what it moves."""
    shares = {"peak_share": share, "bandwidth_share": share}
    return replace(row.stack, **shares, call_seconds=call_seconds)


def naive_seconds(row: Row, table: Sequence[Row]) -> float:
    """By the table's other rows that compute as much again: it is known what a plan recomputes."""
    others = [r for r in table if r is not row and r.alike == row.alike]
    others = others or [r for r in table if r is not row] or [row]
    return row.model_flops / row.layout.num_ranks / median(r.rate for r in others)


def facts(name: str) -> list[dict[str, str]]:
    with (_HERE / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def machines(preset: str, num_devices: int) -> Cluster:
    """As many of a ready-made machine of eight devices as are needed."""
    nodes = -(-num_devices // 8)
    if nodes == 1:
        return Cluster.named(preset)
    return declared(f"[scope.cluster]\nmembers = {{ {preset} = {nodes} }}\n")


def declared(text: str) -> Cluster:
    return Cluster(tree=decode_tree(text))
