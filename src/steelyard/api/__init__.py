"""The public calls: plan, apply, load, run. Knows every room, and only wires.

Not for deciding, measuring or explaining: each is the business of one room.
"""

from steelyard.api.demo import demo
from steelyard.api.live import Step
from steelyard.api.machine import doctor
from steelyard.api.planning import Planned, load, load_planned, plan, plan_workload
from steelyard.api.training import run_workload
from steelyard.api.workload import Workload, load_workload

__all__ = [
    "Planned",
    "Step",
    "Workload",
    "demo",
    "doctor",
    "load",
    "load_planned",
    "load_workload",
    "plan",
    "plan_workload",
    "run_workload",
]
