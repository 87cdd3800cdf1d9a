"""Predictions stored in the JSON file of a plan, reused if they still apply.

Not for predicting again: see api/planning.py. Not for the file format: see
plan_files/prediction_file.py.
"""

from pathlib import Path

from steelyard.errors import PlanFileError
from steelyard.ir.program import Program
from steelyard.plan_files.prediction_file import read_plan
from steelyard.planner.session import PlanningSession
from steelyard.plans.plan import Decisions, Plan
from steelyard.plans.plan_on_file import explanation_path
from steelyard.predict import peak_bytes
from steelyard.predict.cost_table import CostTable
from steelyard.report.document import tree_of
from steelyard.search import Floor


def stored_plan(
    path: Path, decisions: Decisions, session: PlanningSession, program: Program
) -> Plan | str:
    """Return the stored plan with its predictions, or the reason why it must be predicted again.

    Anyone who can write the file could make a plan look smaller than it is. So the stored peak is
    checked against a lower bound of the program's memory, which needs no measurement.
    """
    if path.suffix != ".toml" or not explanation_path(path).exists():
        return "the plan file has no predictions file beside it"
    try:
        found = read_plan(path)
    except PlanFileError as damaged:
        return f"the predictions file of the plan cannot be used: {damaged.happened}"
    plan = found.plan
    if plan is None or found.decisions != decisions:
        return "the plan was edited after it was predicted"
    if plan.predicted_for != session.predicted_for:
        return "it was predicted for another step, machine or optimizer"
    if plan.predicted.peak.nbytes < _least_bytes(session, program):
        return "the predictions file states less memory than the program needs"
    if not tree_of(plan).fits:
        return "it exceeded its budget when it was predicted"
    return plan


def _least_bytes(session: PlanningSession, program: Program) -> int:
    """Return a lower bound of the program's peak in bytes.

    The workspace of kernels is left out, because only a measurement shows it. A compiled program
    may hold less than the captured graph, and a pipeline stage holds only its own layers; for
    both, the bound is the floor of the step.
    """
    if session.request.runner == "inductor" or program.pipeline is not None:
        offload_memory = session.request.cluster.offload_memory
        return Floor.of(session.base).least_bytes(
            ranks=program.layout.num_ranks,
            offload_bytes=0 if offload_memory is None else offload_memory.size_bytes,
        )
    return peak_bytes(program, CostTable(device=session.cluster.fastest))
