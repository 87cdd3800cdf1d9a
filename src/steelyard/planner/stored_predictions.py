"""Predictions that stand in the JSON beside a plan file, used again where they still hold.

Not for predicting anew: see api/planning.py. Not for the format of the file: see
plans/prediction_file.py.
"""

from pathlib import Path

from steelyard.errors import PlanFileError
from steelyard.ir.program import Program
from steelyard.planner.session import PlanningSession
from steelyard.plans.plan import Decisions, Plan
from steelyard.plans.prediction_file import explanation_path, read_plan
from steelyard.predict import peak_bytes
from steelyard.predict.cost_table import CostTable
from steelyard.report.document import tree_of
from steelyard.search import Floor


def stored_plan(
    path: Path, decisions: Decisions, session: PlanningSession, program: Program
) -> Plan | str:
    """The plan as it was predicted before, or the reason why it has to be predicted anew.

    Whoever can write the file could make a plan look smaller than it is. So the peak is held
    against what the program surely holds, which needs no measurement.
    """
    if path.suffix != ".toml" or not explanation_path(path).exists():
        return "no predictions stand beside the plan file"
    try:
        found = read_plan(path)
    except PlanFileError as damaged:
        return f"the predictions beside the plan file cannot be used: {damaged.happened}"
    plan = found.plan
    if plan is None or found.decisions != decisions:
        return "the plan was edited after it was predicted"
    if plan.predicted_for != session.predicted_for:
        return "it was predicted for another step, machine or optimizer"
    if plan.predicted.peak.nbytes < _least_bytes(session, program):
        return "the predictions beside the plan file say less memory than its program holds"
    if not tree_of(plan).fits:
        return "it did not keep its budget when it was predicted"
    return plan


def _least_bytes(session: PlanningSession, program: Program) -> int:
    """Bytes that the program holds at its peak, but for the workspace of kernels, which only a
    measurement tells. A compiler may hold less than what was captured, and a stage of a pipeline
    only its own part."""
    if session.request.runner == "inductor" or program.pipeline is not None:
        offload_memory = session.request.cluster.offload_memory
        return Floor.of(session.base).least_bytes(
            ranks=program.layout.num_ranks,
            far_bytes=0 if offload_memory is None else offload_memory.size_bytes,
        )
    return peak_bytes(program, CostTable(device=session.cluster.fastest))
