"""Checks of a plan file that need neither its script nor torch, and come before anything starts.

Not for reading the file: see plan_files/plan_file.py. Not for checks that need the script: see
planner/compatibility.py.
"""

from pathlib import Path

from steelyard.errors import BadInput, Mismatch
from steelyard.hardware.cluster import Cluster, most_ranks_here
from steelyard.hardware.host_os import num_cores
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.rule import trade_name
from steelyard.ir.rule_kinds import BatchSharding
from steelyard.plans.plan import Decisions
from steelyard.safe_text import printable

# The supported operator decompositions of each runner; new plans use the first one.
DECOMPOSITIONS = {"python": ("python-2", "python-1"), "inductor": ("inductor-1", "inductor-2")}


def check_file(path: str | Path, decisions: Decisions) -> None:
    """Raise an error if the runner is unknown, or if the layout does not match the ranks of the
    target.
    """
    target = decisions.target
    if target.runner not in DECOMPOSITIONS:
        raise BadInput(
            f"{path} is for an unknown runner, {target.runner[:40]!r}",
            expected=" or ".join(DECOMPOSITIONS),
            remedy="correct target.runner, or plan again",
        )
    if target.decomposition not in DECOMPOSITIONS[target.runner]:
        raise BadInput(
            f"{path} has an unknown decomposition, {target.decomposition[:40]!r}",
            expected=" or ".join(DECOMPOSITIONS[target.runner]),
            remedy="plan again with this version",
        )
    ranks = ParallelLayout.of(decisions.rules).num_ranks
    if ranks > target.ranks:
        raise Mismatch(
            f"{path} needs {ranks} ranks, but its target has {target.ranks}",
            expected=f"at most {target.ranks} under [[{trade_name(BatchSharding)}]]",
            remedy=f"plan again with --ranks {ranks}, or set target.ranks to {ranks}",
        )
    if ranks > 1 and target.hosts > 1 and ranks % target.ranks_of_a_host:
        raise Mismatch(
            f"{path} needs {ranks} ranks, but each host has {target.ranks_of_a_host}",
            expected="all ranks of some of the hosts, or one rank",
            remedy="plan again, or correct the degrees of its shard rules",
        )


def check_startable(path: str | Path, decisions: Decisions) -> None:
    """Raise an error, before any process starts, if this machine cannot provide the plan's
    ranks.
    """
    check_file(path, decisions)
    target, name = decisions.target, printable(str(path))
    ranks = ParallelLayout.of(decisions.rules).num_ranks
    hosts, most = target.hosts_of(ranks), most_ranks_here()
    each = -(-ranks // hosts)
    if each > most:
        where = "on each host" if hosts > 1 else "on this machine"
        raise Mismatch(
            f"{name} needs {each} ranks {where}, which has {num_cores()} cores",
            expected=f"at most {most} ranks on this number of cores",
            remedy="run it on the machine that it was planned for, or plan again here",
        )
    cluster_for(decisions)


def cluster_for(decisions: Decisions) -> Cluster:
    """Return this machine, with hosts equal to it, as a cluster for the ranks of the plan.

    Speeds come from the plan and are not measured again, because a busy moment must not change the
    plan. If this machine cannot provide that many ranks, an error is raised before any list of them
    is made.
    """
    target = decisions.target
    ranks = target.ranks
    if target.hosts > 1:
        # Only the hosts that run the plan have joined the rendezvous.
        ranks = ParallelLayout.of(decisions.rules).num_ranks
    hosts = target.hosts_of(ranks)
    here = Cluster.here(ranks=ranks, hosts=hosts, offload_memory=decisions.offload_memory)
    if target.speeds:
        own = target.speeds
        if target.hosts > 1:
            # Cluster.here raises if there are too few of them.
            own = tuple(own[rank] for rank in decisions.ranks_used(ranks) if rank < len(own))
        return Cluster.here(
            ranks=ranks, hosts=hosts, speeds=own[:ranks], offload_memory=decisions.offload_memory
        )
    return here.at_speeds((1.0,) * ranks)
