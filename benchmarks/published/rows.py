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
    """A published step.

    ``family`` names the device and the software whose shares are fitted together. Rows that are
    ``outside`` are of other software, and are only scored. ``stack`` are other known properties of
    the software. ``model_flops`` are those of a step without recomputation. The naive guess takes
    the efficiency of rows with the same ``alike``.
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
    # The number of a machine's ports that carried sharded weights is fitted: see scoring.py.
    fits_ports: bool = False
    # What a printed peak includes in addition to allocated memory, in words. Rows with the same
    # words share one figure for it, which is fitted on rows that are not scored.
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
    """Return the predicted peak of a rank, the largest of all."""
    return predicted(row, row.stack).peak_bytes


def block_of(row: Row, stack: SoftwareStack) -> Section:
    return _parts(row, stack).block


def _parts(row: Row, stack: SoftwareStack) -> Sections:
    costs = tensor_costs(row.cluster, row.layout)
    return sections(row.graph(), costs, row.layout, row.policy, blocks=BLOCKS, stack=stack)


def through_ports(row: Row, ports: int) -> Row:
    """Return the row with at most ``ports`` ports of each machine in use."""
    tree = row.cluster.tree
    members = tuple(replace(m, ports=min(m.ports, ports)) for m in tree.members)
    return replace(row, cluster=Cluster(tree=replace(tree, members=members)))


def reaching(row: Row, share: float, call_seconds: float) -> SoftwareStack:
    """Return the row's stack with one achieved share for both FLOPs and bandwidth."""
    shares = {"peak_share": share, "bandwidth_share": share}
    return replace(row.stack, **shares, call_seconds=call_seconds)


def naive_seconds(row: Row, table: Sequence[Row]) -> float:
    """Return the seconds at the median efficiency of the other rows of the table.

    Only rows with the same ``alike`` count, if there are any.
    """
    others = [r for r in table if r is not row and r.alike == row.alike]
    others = others or [r for r in table if r is not row] or [row]
    return row.model_flops / row.layout.num_ranks / median(r.rate for r in others)


def facts(name: str) -> list[dict[str, str]]:
    with (_HERE / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def machines(preset: str, num_devices: int) -> Cluster:
    """Return a cluster of as many preset machines of eight devices as are needed."""
    nodes = -(-num_devices // 8)
    if nodes == 1:
        return Cluster.named(preset)
    return declared(f"[scope.cluster]\nmembers = {{ {preset} = {nodes} }}\n")


def declared(text: str) -> Cluster:
    return Cluster(tree=decode_tree(text))
