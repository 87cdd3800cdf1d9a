"""The step of a model of equal blocks that lie on the stages as a publication says.

Not for plans, whose blocks differ in what they recompute: see search/cluster/.
"""

from steelyard.hardware.cluster import Cluster
from steelyard.hardware.software_stack import SoftwareStack
from steelyard.ir.model_blocks import Formats
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.predict.analytic.sections import Sections
from steelyard.predict.analytic.step import AnalyticStep, LayoutCost, StageBlocks, analytic_step


def step_of_equal_blocks(
    parts: Sections,
    cluster: Cluster,
    layout: ParallelLayout,
    formats: Formats,
    *,
    num_blocks: int,
    stage_blocks: tuple[int, ...] = (),
    stack: SoftwareStack | None = None,
) -> AnalyticStep:
    """Return the step of a model of equal blocks under a layout.

    ``stage_blocks`` are the blocks of each stage, if these are unequal. ``parts`` are the sections
    of one tensor rank for one micro-batch, as ``stack`` computes them.
    """
    counts = stage_blocks or (num_blocks // layout.pipeline,) * layout.pipeline
    if len(counts) != layout.pipeline or sum(counts) != num_blocks:
        raise ValueError(f"{num_blocks} blocks on {layout.pipeline} stages cannot be {counts}")
    stages = [StageBlocks(blocks=((parts.block, count),)) for count in counts]
    cost = LayoutCost(parts, cluster, layout, formats, stack)
    return analytic_step([cost] * layout.pipeline, stages)
