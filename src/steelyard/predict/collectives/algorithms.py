"""The seconds and bytes of a collective in a group of ranks, for each possible algorithm.

The cost terms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 19(1), 2005: a latency for each message, and bytes over
a rate.
    ring                 section 4, and NCCL: only hops between nodes have the network's latency,
                         and the slowest link sets the pace (src/graph/tuning.cc: nsteps,
                         nInterSteps)                                       _ring
    tree                 NCCL's double binary tree: twice the bytes, pipelined, log2 latencies; a
                         binomial tree for collectives to or from one rank
                                                                            _all_reduce_tree
    ring in each scope   reduce-scatter inside, all-reduce of the shards outside, all-gather inside
                                                                            _hierarchical
    direct               a message to each other rank; pairwise exchange, section 4.3  _direct
    through one rank     gathered there and redistributed, as with a parameter server  _linear
Not for the times at which an exchange is issued and waited for: see timeline.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from steelyard.ir.metrics import Estimate
from steelyard.predict.collectives.group_topology import Uplink
from steelyard.predict.collectives.routes import Route, RouteStage


class Algorithm(StrEnum):
    RING = "ring"
    TREE = "tree"
    IN_SCOPES = "ring in each scope"
    DIRECT = "direct"
    THROUGH_ONE = "through one rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """The cost of a collective by one algorithm.

    ``sent_bytes`` is the most that any one rank sends.
    """

    algorithm: Algorithm
    seconds: float
    sent_bytes: int
    doubt: float

    @property
    def estimate(self) -> Estimate:
        return Estimate.within(self.seconds, share=self.doubt)


def all_reduce(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the costs of an all-reduce of ``nbytes`` per rank, the fastest algorithm first."""
    twice = [
        (name, 2 * seconds, 2 * sent) for name, seconds, sent in _shard_algorithms(route, nbytes)
    ]
    tree = (Algorithm.TREE, *_all_reduce_tree(route, nbytes))
    return _sorted(route, [*twice, tree, _through_one(route, in_bytes=nbytes, out_bytes=nbytes)])


def all_gather(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the costs of an all-gather; ``nbytes`` is the size of the result."""
    share = _share(nbytes, route.num_ranks)
    through_one = _through_one(route, in_bytes=share, out_bytes=nbytes)
    return _sorted(route, [*_shard_algorithms(route, nbytes), through_one])


def reduce_scatter(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the costs of a reduce-scatter; ``nbytes`` is the size of each rank's input."""
    share = _share(nbytes, route.num_ranks)
    through_one = _through_one(route, in_bytes=nbytes, out_bytes=share)
    return _sorted(route, [*_shard_algorithms(route, nbytes), through_one])


def all_to_all(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the costs of an all-to-all; ``nbytes`` is the size of each rank's input."""
    return _sorted(route, [(Algorithm.DIRECT, *_direct(route, nbytes))])


def broadcast(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the costs of a broadcast of ``nbytes`` from one rank."""
    n = route.num_ranks
    chain = route.hop_seconds + max(
        (route.moving_seconds(g, nbytes) for g in route.uplinks()), default=0.0
    )
    tree = sum(stage.depth * _message_seconds(route, stage, nbytes) for stage in route.stages)
    depth = sum(stage.depth for stage in route.stages)
    linear = _linear(route, nbytes)
    return _sorted(
        route,
        [
            (Algorithm.RING, chain, nbytes if n > 1 else 0),
            (Algorithm.TREE, tree, depth * nbytes),
            (Algorithm.DIRECT, linear, (n - 1) * nbytes),
        ],
    )


def gather(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the costs of a gather to one rank; ``nbytes`` is the size of the result."""
    share = _share(nbytes, route.num_ranks)
    moving = max(
        (_incoming_seconds(route, stage, uplink, share) for stage, uplink in _stage_uplinks(route)),
        default=0.0,
    )
    tree = route.depth_seconds + moving
    sent = nbytes // 2 if route.num_ranks > 1 else 0
    direct = (Algorithm.DIRECT, _linear(route, share), share if route.num_ranks > 1 else 0)
    return _sorted(route, [direct, (Algorithm.TREE, tree, max(sent, direct[2]))])


def send(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Return the cost of a message of ``nbytes`` between two ranks."""
    assert route.num_ranks == 2, "two ranks send to each other"
    (stage,) = route.stages
    return _sorted(route, [(Algorithm.DIRECT, _message_seconds(route, stage, nbytes), nbytes)])


_Candidate = tuple[Algorithm, float, int]


def _sorted(route: Route, candidates: Iterable[_Candidate]) -> tuple[CollectiveCost, ...]:
    """Return the costs, fastest first; ties are in the order of ``Algorithm``."""
    order = list(Algorithm)
    return tuple(
        CollectiveCost(algorithm=name, seconds=seconds, sent_bytes=sent, doubt=route.doubt)
        for name, seconds, sent in sorted(candidates, key=lambda f: (f[1], order.index(f[0])))
    )


def _shard_algorithms(route: Route, nbytes: int) -> list[_Candidate]:
    """Return the costs of exchanging shards once, as in an all-gather or a reduce-scatter.

    An all-reduce takes twice as long.
    """
    candidates = [
        (Algorithm.RING, *_ring(route, nbytes)),
        (Algorithm.DIRECT, *_direct(route, nbytes)),
    ]
    if _is_even(route):
        candidates.append((Algorithm.IN_SCOPES, *_hierarchical(route, nbytes)))
    return candidates


def _ring(route: Route, nbytes: int) -> tuple[float, int]:
    """Return the seconds and bytes of passing shards once around a ring.

    In each step, every member of a scope passes one shard on through its uplink.
    """
    steps, share = route.num_ranks - 1, _share(nbytes, route.num_ranks)
    slowest = max((route.moving_seconds(uplink, share) for uplink in route.uplinks()), default=0.0)
    return route.hop_seconds + steps * slowest, steps * share


def _hierarchical(route: Route, nbytes: int) -> tuple[float, int]:
    """Return the seconds and bytes of a ring in each scope.

    The shards of a scope then go around rings in the next outer scope, all at the same time.
    """
    seconds, sent, share = 0.0, 0, nbytes
    for stage in route.stages:
        steps = stage.level.most - 1
        share = _share(share, stage.level.most)
        slowest = max(
            route.moving_seconds(uplink, uplink.ranks * share) for uplink in stage.uplinks
        )  # fmt: skip
        seconds += steps * stage.latency_seconds + steps * slowest
        sent += steps * share
    return seconds, sent


def _is_even(route: Route) -> bool:
    """True if the scopes have equally many members, so that each rank has peers for its shard."""
    joined = [stage.level for stage in route.stages]
    return all(level.is_even for level in joined) and (
        prod(level.most for level in joined) == route.num_ranks
    )


def _all_reduce_tree(route: Route, nbytes: int) -> tuple[float, int]:
    """Return the seconds and bytes of a pipelined reduction up a double tree and a broadcast down
    it.

    Each rank is a leaf in one of the two trees.
    """
    slowest = max((route.moving_seconds(uplink, nbytes) for uplink in route.uplinks()), default=0.0)
    return 2 * (route.depth_seconds + slowest), 2 * nbytes if route.num_ranks > 1 else 0


def _direct(route: Route, nbytes: int) -> tuple[float, int]:
    """Return the seconds and bytes of sending a shard to every other rank, one after another."""
    share, moving = _share(nbytes, route.num_ranks), 0.0
    for stage, uplink in _stage_uplinks(route):
        others = (route.num_ranks if uplink in stage.outward else stage.behind) - uplink.ranks
        nbytes_out = uplink.ranks * others * share
        moving = max(moving, route.moving_seconds(uplink, nbytes_out, messages=max(1, others)))
    latencies = sum((stage.behind - stage.inside) * stage.latency_seconds for stage in route.stages)
    return latencies + moving, (route.num_ranks - 1) * share


def _through_one(route: Route, *, in_bytes: int, out_bytes: int) -> _Candidate:
    sent = max((route.num_ranks - 1) * out_bytes, in_bytes) if route.num_ranks > 1 else 0
    return Algorithm.THROUGH_ONE, _linear(route, in_bytes) + _linear(route, out_bytes), sent


def _linear(route: Route, nbytes: int) -> float:
    """Return the seconds of sending ``nbytes`` from every other rank to one rank, or the reverse.

    The uplinks of that one rank are the bottleneck.
    """
    latencies = sum((stage.behind - stage.inside) * stage.latency_seconds for stage in route.stages)
    return latencies + max(
        (
            _incoming_seconds(route, stage, uplink, nbytes)
            for stage, uplink in _stage_uplinks(route)
        ),
        default=0.0,
    )


def _incoming_seconds(route: Route, stage: RouteStage, uplink: Uplink, nbytes: int) -> float:
    """Return the seconds of sending ``nbytes`` to a rank from each rank outside of its uplink."""
    others = (route.num_ranks if uplink in stage.outward else stage.behind) - uplink.ranks
    messages = max(1, others)
    return route.moving_seconds(uplink, others * nbytes, streams=1, messages=messages)


def _message_seconds(route: Route, stage: RouteStage, nbytes: int) -> float:
    """Return the seconds of one message between two ranks that meet at this level."""
    return stage.latency_seconds + max(
        route.moving_seconds(uplink, nbytes, streams=1) for uplink in stage.uplinks
    )


def _stage_uplinks(route: Route) -> Iterable[tuple[RouteStage, Uplink]]:
    return ((stage, uplink) for stage in route.stages for uplink in stage.uplinks)


def _share(nbytes: int, num_ranks: int) -> int:
    return -(-nbytes // num_ranks)
