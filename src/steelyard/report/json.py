"""Renders the document tree as JSON; keys and meanings are stable within a schema version.

    schema        "steelyard.plan/1" or "steelyard.receipt/1"
    plan, title   the plan's name, and the model and data it is for
    budget        text; budget_bytes: the bound on memory or null
    fits          true if the peak (measured, else predicted) and the known accuracy loss are
                  within the budget
    amounts       in order: accuracy_loss, memory_bytes, communication_seconds,
                  computation_seconds, step_seconds; each has before, unplanned, plan, measured
                  (null if not measured) and miss (measured / predicted - 1, or null).
                  A figure is {value, unit, low, high}; low and high are null in a measurement.
                  Accuracy is text: "exact", "unknown", or the result of a probe, "0.02 ± 0.01 %".
    rules         the decisions: trade, and the keys of its table in the plan file
    taken         trade, label, pays, buys, rules
    refused       trade, label, reason, left: "whole" for a whole offer, "rest" for the rest of one
                  taken in part, "never" for one that cannot be offered (not in num_offers)
    frontier      memory, step, more_flops, micro_batches, is_this_plan, accuracy_loss
    peak          nbytes, at, where, line, phase, resident_bytes, workspace_bytes, rest, and
                  alive: nbytes, share, count, where, line, what, role; largest first
    unplanned_peak the same for the graph without trades, or null if no trades are applied
    as_of         a note if the reasons are older than the prediction, else ""
    ranks         for several ranks, in order: rank, predicted_bytes, measured_bytes (null if no
                  step was metered) and miss; empty in a plan, and for a single rank
    stands_in     the machine that was measured, if the plan is for a declared cluster; else ""
    next_cent, least_bytes, least_within, largest, ran, notes, runner, num_offers

Not for reading plans: plan_files/prediction_file.py reads the prediction file next to a plan file.
"""

import json
from dataclasses import asdict
from typing import Any

from steelyard.plans.plan import Decisions
from steelyard.report.document import ReportDocument
from steelyard.report.peak_groups import PeakTree
from steelyard.report.quantities import Cell, Quantity


def to_json(tree: ReportDocument) -> dict[str, Any]:
    bare = tree.unplanned_peak
    return {
        "schema": f"steelyard.{'receipt' if tree.is_receipt else 'plan'}/1",
        "plan": tree.name,
        "title": tree.title,
        "runner": tree.runner,
        "budget": tree.budget,
        "budget_bytes": tree.budget_bytes,
        "fits": tree.fits,
        "amounts": {
            row.key: {
                "before": _cell(row.before),
                "unplanned": _cell(row.unplanned),
                "plan": _cell(row.plan),
                "measured": None if row.measured == "-" else _cell(row.measured),
                "miss": row.miss,
            }
            for row in tree.rows
        },
        "rules": [asdict(rule) for rule in tree.rules],
        "num_offers": tree.num_offers,
        "taken": [asdict(offer) for offer in tree.taken],
        "refused": [asdict(refusal) for refusal in tree.refused],
        "as_of": tree.as_of,
        "next_cent": tree.next_cent,
        "least_bytes": int(tree.least.value),
        "least_within": tree.least_within,
        "largest": tree.largest,
        "fewest": tree.fewest,
        "ran": list(tree.ran),
        "ranks": [{**asdict(one), "miss": one.miss} for one in tree.ranks],
        "stands_in": tree.stands_in,
        "notes": list(tree.notes),
        "frontier": [
            {
                "memory": _cell(p.memory),
                "step": _cell(p.step),
                "more_flops": p.more_flops,
                "micro_batches": p.micro_batches,
                "is_this_plan": p.is_this_plan,
                "accuracy_loss": p.accuracy_loss,
            }
            for p in tree.curve
        ],
        "peak": _peak(tree.peak),
        "unplanned_peak": None if bare is None else _peak(bare),
    }


def _peak(peak: PeakTree) -> dict[str, Any]:
    fields = asdict(peak)
    groups, rest = fields.pop("groups"), ("num_rest", "rest_bytes")
    return {
        **{k: v for k, v in fields.items() if k not in rest},
        "alive": groups,
        "rest": {"num_lines": peak.num_rest, "nbytes": peak.rest_bytes},
    }


def decisions_to_json(decisions: Decisions) -> dict[str, Any]:
    """Render the decisions of a plan file without predictions, or with outdated ones."""
    return {"plan": decisions.name, "budget": str(decisions.budget), **asdict(decisions)}


def dumps(document: dict[str, Any]) -> str:
    """Serialise a document to one line of ASCII, which is safe for any terminal and encoding."""
    return json.dumps(document, ensure_ascii=True, allow_nan=False) + "\n"


def _cell(cell: Cell) -> object:
    if not isinstance(cell, Quantity):
        return cell
    return {"value": cell.value, "unit": cell.unit.value, "low": cell.low, "high": cell.high}
