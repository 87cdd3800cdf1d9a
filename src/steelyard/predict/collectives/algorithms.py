"""What an exchange among a group of ranks takes, by each algorithm that could carry it out.

The terms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005: a wait for each message, and bytes over a rate.
    ring                 section 4, and NCCL: of its hops, only those between nodes wait for the
                         network, and the slowest link sets the pace (src/graph/tuning.cc: nsteps,
                         nInterSteps)                                       _ring
    tree                 NCCL's double binary tree: twice the bytes, pipelined, log2 waits; a
                         binomial tree for what goes to or comes from one rank
                                                                            _all_reduce_tree
    ring in each scope   reduce-scatter inside, all-reduce of the shares outside, all-gather inside
                                                                            _in_scopes
    direct               a message to each other rank; pairwise exchange, section 4.3  _direct
    through one rank     gathered there and redistributed, as with a parameter server  _linear
Not for when an exchange is issued and waited for: see timeline.py.
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
    """One way to carry an exchange out. ``sent_bytes`` is the most that any one rank sends."""

    algorithm: Algorithm
    seconds: float
    sent_bytes: int
    doubt: float

    @property
    def estimate(self) -> Estimate:
        return Estimate.within(self.seconds, share=self.doubt)


def all_reduce(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Every rank gets the sum of ``nbytes`` of each; the quickest way first."""
    twice = [(name, 2 * seconds, 2 * sent) for name, seconds, sent in _shared_out(route, nbytes)]
    tree = (Algorithm.TREE, *_all_reduce_tree(route, nbytes))
    return _sorted(route, [*twice, tree, _through_one(route, taken=nbytes, given=nbytes)])


def all_gather(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Every rank has its share of ``nbytes`` and gets all of them."""
    share = _share(nbytes, route.num_ranks)
    through_one = _through_one(route, taken=share, given=nbytes)
    return _sorted(route, [*_shared_out(route, nbytes), through_one])


def reduce_scatter(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Every rank gets its share of the sum of ``nbytes`` of each."""
    share = _share(nbytes, route.num_ranks)
    through_one = _through_one(route, taken=nbytes, given=share)
    return _sorted(route, [*_shared_out(route, nbytes), through_one])


def all_to_all(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Every rank has a share of its ``nbytes`` for each other."""
    return _sorted(route, [(Algorithm.DIRECT, *_direct(route, nbytes))])


def broadcast(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """Every rank gets the ``nbytes`` of one."""
    n = route.num_ranks
    chain = route.hop_seconds + max(
        (route.moving_seconds(g, nbytes) for g in route.gates()), default=0.0
    )
    tree = sum(stage.depth * _whole(route, stage, nbytes) for stage in route.stages)
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
    """One rank gets the shares that all have of ``nbytes``."""
    share = _share(nbytes, route.num_ranks)
    moving = max(
        (_entering(route, stage, gate, share) for stage, gate in _ways(route)), default=0.0
    )
    tree = route.depth_seconds + moving
    sent = nbytes // 2 if route.num_ranks > 1 else 0
    direct = (Algorithm.DIRECT, _linear(route, share), share if route.num_ranks > 1 else 0)
    return _sorted(route, [direct, (Algorithm.TREE, tree, max(sent, direct[2]))])


def send(route: Route, nbytes: int) -> tuple[CollectiveCost, ...]:
    """One of two ranks gets the ``nbytes`` of the other."""
    assert route.num_ranks == 2, "two ranks send to each other"
    (stage,) = route.stages
    return _sorted(route, [(Algorithm.DIRECT, _whole(route, stage, nbytes), nbytes)])


_Found = tuple[Algorithm, float, int]


def _sorted(route: Route, found: Iterable[_Found]) -> tuple[CollectiveCost, ...]:
    """The quickest first; of equally quick ones, the one that is named first here."""
    order = list(Algorithm)
    return tuple(
        CollectiveCost(algorithm=name, seconds=seconds, sent_bytes=sent, doubt=route.doubt)
        for name, seconds, sent in sorted(found, key=lambda f: (f[1], order.index(f[0])))
    )


def _shared_out(route: Route, nbytes: int) -> list[_Found]:
    """Each rank begins with its share of all, or ends with it: an all-reduce is this twice."""
    found = [
        (Algorithm.RING, *_ring(route, nbytes)),
        (Algorithm.DIRECT, *_direct(route, nbytes)),
    ]
    if _is_even(route):
        found.append((Algorithm.IN_SCOPES, *_in_scopes(route, nbytes)))
    return found


def _ring(route: Route, nbytes: int) -> tuple[float, int]:
    """Once around, share by share: each member of a scope passes each share on by one gate."""
    steps, share = route.num_ranks - 1, _share(nbytes, route.num_ranks)
    slowest = max((route.moving_seconds(gate, share) for gate in route.gates()), default=0.0)
    return route.hop_seconds + steps * slowest, steps * share


def _in_scopes(route: Route, nbytes: int) -> tuple[float, int]:
    """A ring in each scope; the shares of it then go around the scope outside, all at once."""
    seconds, sent, share = 0.0, 0, nbytes
    for stage in route.stages:
        steps = stage.level.most - 1
        share = _share(share, stage.level.most)
        slowest = max(
            route.moving_seconds(gate, gate.ranks * share) for gate in stage.gates
        )  # fmt: skip
        seconds += steps * stage.latency_seconds + steps * slowest
        sent += steps * share
    return seconds, sent


def _is_even(route: Route) -> bool:
    """Only then does every rank find those that hold the same share."""
    joined = [stage.level for stage in route.stages]
    return all(level.is_even for level in joined) and (
        prod(level.most for level in joined) == route.num_ranks
    )


def _all_reduce_tree(route: Route, nbytes: int) -> tuple[float, int]:
    """Up and down again, in pieces that follow each other; each rank is a leaf in one of two."""
    slowest = max((route.moving_seconds(gate, nbytes) for gate in route.gates()), default=0.0)
    return 2 * (route.depth_seconds + slowest), 2 * nbytes if route.num_ranks > 1 else 0


def _direct(route: Route, nbytes: int) -> tuple[float, int]:
    """A share to each other rank, one after the other."""
    share, moving = _share(nbytes, route.num_ranks), 0.0
    for stage, gate in _ways(route):
        others = (route.num_ranks if gate in stage.outward else stage.behind) - gate.ranks
        nbytes_out = gate.ranks * others * share
        moving = max(moving, route.moving_seconds(gate, nbytes_out, messages=max(1, others)))
    waits = sum((stage.behind - stage.inside) * stage.latency_seconds for stage in route.stages)
    return waits + moving, (route.num_ranks - 1) * share


def _through_one(route: Route, *, taken: int, given: int) -> _Found:
    sent = max((route.num_ranks - 1) * given, taken) if route.num_ranks > 1 else 0
    return Algorithm.THROUGH_ONE, _linear(route, taken) + _linear(route, given), sent


def _linear(route: Route, nbytes: int) -> float:
    """So much from each other rank to one, or back: its own gates are what all has to pass."""
    waits = sum((stage.behind - stage.inside) * stage.latency_seconds for stage in route.stages)
    return waits + max(
        (_entering(route, stage, gate, nbytes) for stage, gate in _ways(route)), default=0.0
    )


def _entering(route: Route, stage: RouteStage, gate: Uplink, nbytes: int) -> float:
    """So much from each rank that is not behind the gate, to one that is."""
    others = (route.num_ranks if gate in stage.outward else stage.behind) - gate.ranks
    messages = max(1, others)
    return route.moving_seconds(gate, others * nbytes, streams=1, messages=messages)


def _whole(route: Route, stage: RouteStage, nbytes: int) -> float:
    """One message between two ranks that meet at this stage."""
    return stage.latency_seconds + max(
        route.moving_seconds(gate, nbytes, streams=1) for gate in stage.gates
    )


def _ways(route: Route) -> Iterable[tuple[RouteStage, Uplink]]:
    return ((stage, gate) for stage in route.stages for gate in stage.gates)


def _share(nbytes: int, num_ranks: int) -> int:
    return -(-nbytes // num_ranks)
