"""The best-connected subsets of ranks and hosts, with their links.

Not for timing collectives among a subset: see host_pairs.py.
"""

from collections.abc import Mapping, Sequence

from steelyard.measure.links.exchange_sizes import ExchangeSizes
from steelyard.measure.links.host_pairs import latency_of, name_of, pair_seconds, rate_of
from steelyard.measure.links.link_figures import (
    ALMOST_ZERO,
    BETWEEN_HOSTS,
    FIGURES,
    MESSAGES,
    NAMES_KEY,
    PROBE,
    SKEW,
    SLOT_COLLECTIVES,
    SLOTS,
    WITHIN_HOST,
    Joined,
    names_hash,
    speed_of,
    to_measurement,
)
from steelyard.measure.links.link_fit import latency_and_rate
from steelyard.predict.rank_subsets import best_joined


def best_groups(found: Mapping[str, float], hosts: int, each: int) -> Mapping[int, tuple[int, ...]]:
    """Return the best subset of each size from two to all but one; empty if no pairs were timed."""
    if hosts < 3 or rate_of(0, 1) not in found:
        return {}
    speeds = [found[speed_of(host * each)] for host in range(hosts)]
    groups = best_joined(pair_seconds(found, hosts), speeds)
    return {number: groups[number] for number in range(2, hosts)}


def joined_subsets(
    found: Mapping[str, float], num_ranks: int, *, hosts: int, sizes: ExchangeSizes
) -> dict[int, Joined]:
    if hosts == 1:
        # All pairs of ranks of one machine count as equally fast.
        level = [[1.0] * num_ranks for _ in range(num_ranks)]
        groups = best_joined(level, [found[speed_of(rank)] for rank in range(num_ranks)])
        return {
            number: Joined(ranks=group)
            for number, group in groups.items()
            if 1 < number < num_ranks and group != tuple(range(number))
        }
    each, subsets = num_ranks // hosts, {}
    for number, group in best_groups(found, hosts, each).items():
        ranks = tuple(host * each + n for host in group for n in range(each))
        link_figures = _subset_link_figures(found, group, hosts=hosts, each=each, sizes=sizes)
        if link_figures:
            measured = to_measurement({**found, **link_figures}, num_ranks, kind=BETWEEN_HOSTS)
            joined = Joined(ranks=ranks, link=measured.link, handing=measured.handing)
            subsets[number * each] = joined
        elif ranks != tuple(range(len(ranks))):
            subsets[number * each] = Joined(ranks=ranks)
    return subsets


def subset_figures(
    found: Mapping[str, float],
    group: Sequence[int],
    names: Sequence[str],
    *,
    each: int,
    sizes: ExchangeSizes,
) -> dict[str, float]:
    """Return the figures that these hosts would have measured without the others.

    If their own collectives were not measured, there is no link probe; they then measure again when
    they meet.
    """
    number, hosts = len(group), len(names) // each
    ranks = [host * each + n for host in group for n in range(each)]
    inherited = (
        *FIGURES,
        *MESSAGES,
        *SLOTS,
        "slot copied",
        *SLOT_COLLECTIVES,
        *WITHIN_HOST,
        *SKEW,
    )
    subset = {name: found[name] for name in inherited if name in found}
    subset |= _subset_link_figures(found, group, hosts=hosts, each=each, sizes=sizes)
    speeds = [found[speed_of(rank)] for rank in ranks]
    subset |= {speed_of(n): speed / max(speeds) for n, speed in enumerate(speeds)}
    subset[NAMES_KEY] = names_hash([names[rank] for rank in ranks])
    positions = {host: position for position, host in enumerate(group)}
    for i in group:
        for j in group:
            if i < j and rate_of(i, j) in found:
                subset[rate_of(positions[i], positions[j])] = found[rate_of(i, j)]
                subset[latency_of(positions[i], positions[j])] = found[latency_of(i, j)]
    if name_of(number, "small") in found:
        subset |= {probe: found[name_of(number, f"least {probe.split()[0]}")] for probe in PROBE}
    return subset


def _subset_link_figures(
    found: Mapping[str, float], group: Sequence[int], *, hosts: int, each: int, sizes: ExchangeSizes
) -> dict[str, float]:
    """Return the link figures of a subset of hosts; empty if only the set of all hosts contains it.

    They are those of collectives in the smallest measured subset that is at least as large.
    """
    numbers = range(len(group), hosts)
    number = next((n for n in numbers if name_of(n, "small") in found), None)
    if number is None:
        return {}
    timed = {name: found[name_of(number, name)] for name in sizes._fields}
    latency, rate = latency_and_rate(timed, number * each, sizes)
    pairs = [(i, j) for i in group for j in group if i < j and rate_of(i, j) in found]
    hand_rate = min((found[rate_of(*pair)] for pair in pairs), default=found["hand rate"])
    hop = max((found[latency_of(*pair)] for pair in pairs), default=found["hop"])
    # The CPU cost per byte is the same at any rate.
    slowdown = found["hand disturbs"] * hand_rate / found["hand rate"]
    return {
        "latency": latency,
        "rate": rate,
        "disturbs": min(1.0, max(found[name_of(number, "disturbs")], ALMOST_ZERO)),
        "hop": hop,
        "hand rate": hand_rate,
        "hand disturbs": min(1.0, max(slowdown, ALMOST_ZERO)),
    }
