"""The public calls: plan, apply, load, run. They connect the stages and contain no logic.

Not for deciding, measuring or explaining: see planner/, measure/ and report/.
"""

from steelyard import _torch  # noqa: F401 - first: it refuses a torch that is not supported
from steelyard.api.demo import demo
from steelyard.api.fitting.config_workload import ConfigRequest
from steelyard.api.fitting.memory_fit import fit, fit_config, fit_script
from steelyard.api.machine import doctor
from steelyard.api.planned import Planned
from steelyard.api.planning import load, load_planned, plan, plan_workload
from steelyard.api.rank_context import as_a_rank, hold_meeting_place, joined_ranks, restarts
from steelyard.api.scaling_study import scale_workload
from steelyard.api.step import Step
from steelyard.api.train import run_workload
from steelyard.api.workload import Workload, load_workload
from steelyard.planner.multi_host import HostRendezvous, keep_to_own_gpu, meeting, probe_local_ranks
from steelyard.run.launch.launcher import launch
from steelyard.run.rng_state import seed_everything

__all__ = [
    "ConfigRequest",
    "HostRendezvous",
    "Planned",
    "Step",
    "Workload",
    "as_a_rank",
    "demo",
    "doctor",
    "fit",
    "fit_config",
    "fit_script",
    "hold_meeting_place",
    "joined_ranks",
    "keep_to_own_gpu",
    "launch",
    "load",
    "load_planned",
    "load_workload",
    "meeting",
    "plan",
    "plan_workload",
    "probe_local_ranks",
    "restarts",
    "run_workload",
    "scale_workload",
    "seed_everything",
]
