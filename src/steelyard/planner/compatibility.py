"""Compares the target of a plan file with the step and the machine that loads it.

Not for reading the file (see plan_files/plan_file.py) or for predicting its rules (see
api/planning.py).
"""

from collections.abc import Iterator, Sequence

import torch

from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, Mismatch
from steelyard.hardware.cluster import Cluster
from steelyard.measure.cache import CostCache
from steelyard.planner.local_cluster import local_cluster
from steelyard.plans.plan import Decisions, Target
from steelyard.safe_text import printable


def target_differences(
    ours: Target, theirs: Target, torch_device: torch.device = CPU, *, used: Sequence[int] = ()
) -> Iterator[str]:
    """Yield a note for each harmless difference between two targets.

    The rules of the plan still apply, but their cost or result may change. ``torch_device`` is the
    device of the model's parameters; ``used`` are the ranks of the plan that run the step.
    """
    if ours.batch != theirs.batch:
        yield "planned for another batch shape; its rules were predicted again for this one"
    elif ours.graph != theirs.graph:
        yield (
            "planned for operators with other arguments (such as a dropout rate, or mean or sum); "
            "the present step was predicted, and can be run"
        )
    if theirs.declared and not ours.declared:
        yield (
            f"planned for the declared cluster {printable(theirs.declared)}; predicted again for "
            "this machine, on which it runs"
        )
    elif ours.cluster not in (
        theirs.cluster,
        _used_cluster_fingerprint(theirs, used or range(ours.ranks), torch_device),
    ):
        yield "planned for another machine or number of threads; predicted again for this one"


def _used_cluster_fingerprint(
    theirs: Target, used: Sequence[int], torch_device: torch.device
) -> str:
    """Return the cluster fingerprint to compare with if the plan uses only some of its ranks.

    If the plan was made for several hosts like this machine, it is the fingerprint of the ranks
    in ``used``; otherwise the fingerprint of the cluster in the plan.
    """
    if theirs.hosts == 1:
        return theirs.cluster
    ranks = len(used)
    speeds, hosts = theirs.speeds or (1.0,) * theirs.ranks, theirs.hosts_of(ranks)
    used_speeds = tuple(speeds[rank] for rank in used)
    whole = Cluster.here(ranks=theirs.ranks, hosts=theirs.hosts, speeds=speeds)
    part, cache = Cluster.here(ranks=ranks, hosts=hosts, speeds=used_speeds), CostCache()
    try:
        is_equal = local_cluster(torch_device, whole, cache=cache).fingerprint == theirs.cluster
    except BadInput:  # this machine has fewer GPUs than a host of the plan
        is_equal = False
    return (
        local_cluster(torch_device, part, cache=cache).fingerprint if is_equal else theirs.cluster
    )


def check_cluster(decisions: Decisions, cluster: Cluster) -> None:
    theirs = decisions.target.cluster
    if cluster.fingerprint != theirs:
        raise Mismatch(
            f"the plan was made for a different cluster than {cluster.tree.name} (fingerprint "
            f"{theirs[:16]}, this one is {cluster.fingerprint})",
            expected="the cluster that the plan was made for",
            remedy="name that cluster, or plan again for this one",
        )


def check_target(decisions: Decisions, ours: Target) -> None:
    theirs = decisions.target
    if ours.model != theirs.model:
        raise Mismatch(
            "the plan was made for another model, loss or set of trained parameters "
            f"(fingerprint {theirs.model[:16]}, this one is {ours.model})",
            expected="the model and loss that the plan was made for",
            remedy="plan again for this model",
        )
    if ours.torch != theirs.torch:
        raise Mismatch(
            f"the plan was made under torch {theirs.torch[:20]}, this is {ours.torch}",
            expected="the same version: operators and their memory differ between versions",
            remedy="plan again under this torch",
        )
