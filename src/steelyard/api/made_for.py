"""What a plan file was made for, held against the step and the machine that it meets here.

Not for reading the file: see core/planfile.py. Not for what its rules do here: see planning.py.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from steelyard.api.home import cluster_at
from steelyard.api.look import DECOMPOSITIONS
from steelyard.core.cluster import Cluster
from steelyard.core.errors import BadInput, Mismatch
from steelyard.core.layout import Layout
from steelyard.core.plan import Decisions, MadeFor
from steelyard.exchange.devices import CPU
from steelyard.measure.cache import CostCache


def check_file(path: str | Path, decisions: Decisions) -> None:
    """Whatever step it meets: that there is such a runner, and that its ranks are some of those."""
    made_for = decisions.made_for
    if made_for.runner not in DECOMPOSITIONS:
        raise BadInput(
            f"{path} is for an unknown runner, {made_for.runner[:40]!r}",
            expected=" or ".join(DECOMPOSITIONS),
            remedy="correct made_for.runner, or plan again",
        )
    if made_for.decomposition not in DECOMPOSITIONS[made_for.runner]:
        raise BadInput(
            f"{path} is for an unknown table of operators, {made_for.decomposition[:40]!r}",
            expected=" or ".join(DECOMPOSITIONS[made_for.runner]),
            remedy="plan again with this version",
        )
    ranks = Layout.of(decisions.rules).num_ranks
    if ranks > made_for.ranks:
        raise Mismatch(
            f"{path} lies on {ranks} ranks, and is made for {made_for.ranks}",
            expected=f"at most {made_for.ranks} under [[shard_batch]]",
            remedy=f"plan again with --ranks {ranks}, or set made_for.ranks to {ranks}",
        )
    if ranks > 1 and made_for.hosts > 1 and ranks % made_for.ranks_of_a_host:
        raise Mismatch(
            f"{path} lies on {ranks} ranks, and each host has {made_for.ranks_of_a_host}",
            expected="all ranks of some of the hosts, or one rank",
            remedy="plan again, or correct the degrees of its shard rules",
        )


def cluster_for(decisions: Decisions) -> Cluster:
    """This machine, and others like it, for as many ranks as are asked for; as the plan found them,
    for a busy moment must not make it another plan."""
    made_for = decisions.made_for
    ranks = made_for.ranks
    if made_for.hosts > 1:
        # Of hosts those that it lies on have met, and no others.
        ranks = Layout.of(decisions.rules).num_ranks
    speeds = (made_for.speeds or (1.0,) * made_for.ranks)[:ranks]
    hosts = made_for.hosts_of(ranks)
    return Cluster.here(ranks=ranks, hosts=hosts, speeds=speeds, far=decisions.far)


def other_than_planned(ours: MadeFor, theirs: MadeFor, home: torch.device = CPU) -> Iterator[str]:
    """What leaves the rules as good as they were, and may change what they cost or compute, of a
    step that lies at ``home``."""
    if ours.batch != theirs.batch:
        yield "planned for another batch shape; the same rules were predicted anew"
    elif ours.graph != theirs.graph:
        yield (
            "planned for operators with other arguments (a dropout's rate, a mean or a sum); it is "
            "the step as it is now that was predicted, and runs"
        )
    if ours.cluster not in (theirs.cluster, _part_of(theirs, ours.ranks, home)):
        yield "planned for another machine or number of threads; predicted anew for this one"


def _part_of(theirs: MadeFor, ranks: int, home: torch.device) -> str:
    """What a machine like this is for a plan that was made for several hosts like it, and lies on
    so many of their ranks."""
    if theirs.hosts == 1:
        return theirs.cluster
    speeds, hosts = theirs.speeds or (1.0,) * theirs.ranks, theirs.hosts_of(ranks)
    whole = Cluster.here(ranks=theirs.ranks, hosts=theirs.hosts, speeds=speeds)
    part, cache = Cluster.here(ranks=ranks, hosts=hosts, speeds=speeds[:ranks]), CostCache()
    try:
        is_like = cluster_at(home, whole, cache=cache).fingerprint == theirs.cluster
    except BadInput:  # it has fewer GPUs than each of theirs
        is_like = False
    return cluster_at(home, part, cache=cache).fingerprint if is_like else theirs.cluster


def check_cluster(decisions: Decisions, cluster: Cluster) -> None:
    theirs = decisions.made_for.cluster
    if cluster.fingerprint != theirs:
        raise Mismatch(
            f"the plan was made for another cluster than {cluster.tree.name} (fingerprint "
            f"{theirs[:16]}, this one is {cluster.fingerprint})",
            expected="the cluster that was planned for",
            remedy="name that one, or plan again for this one",
        )


def check_made_for(decisions: Decisions, ours: MadeFor) -> None:
    theirs = decisions.made_for
    if ours.model != theirs.model:
        raise Mismatch(
            "the plan was made for another model, loss or set of trained parameters "
            f"(fingerprint {theirs.model[:16]}, this one is {ours.model})",
            expected="the model and loss that were planned",
            remedy="plan again for this model",
        )
    if ours.torch != theirs.torch:
        raise Mismatch(
            f"the plan was made under torch {theirs.torch[:20]}, this is {ours.torch}",
            expected="the same version: operators and their memory differ between versions",
            remedy="plan again under this torch",
        )
