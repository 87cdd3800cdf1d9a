"""The note in a plan that names hosts with slow links, and the step time with and without them.

Not for choosing the hosts of a step: see predict/rank_subsets.py and layout_search.py.
"""

from collections.abc import Callable, Collection, Sequence

from steelyard.predict.rank_subsets import ALIKE, named
from steelyard.units import format_bytes, format_seconds


def slow_hosts(rates: Sequence[float]) -> tuple[int, ...]:
    """Return the hosts whose links are clearly slower than the fastest; () if this is true of
    most.
    """
    slow = tuple(n for n, rate in enumerate(rates) if rate * ALIKE < max(rates))
    return slow if 2 * len(slow) < len(rates) else ()


def note_on_links(
    rates: Sequence[float],
    used_hosts: Collection[int],
    planned_seconds: float,
    least_seconds: Callable[[Callable[[Collection[int]], bool]], float | None],
) -> tuple[str, ...]:
    """Return the note on slow links, or () if there are none.

    ``least_seconds`` returns the least step time over the sets of hosts that a condition accepts,
    or None if it accepts none. The plan itself uses ``used_hosts``.
    """
    slow = slow_hosts(rates)
    if not slow:
        return ()

    def has_slow(hosts: Collection[int]) -> bool:
        return not set(slow).isdisjoint(hosts)

    with_it, without = least_seconds(has_slow), least_seconds(lambda hosts: not has_slow(hosts))
    if has_slow(used_hosts):
        with_it = planned_seconds
    else:
        without = planned_seconds
    others = max(rates)
    slowest = min(rates[n] for n in slow)
    it = "it" if len(slow) == 1 else "them"
    costs = [f"with {it} a step takes ~{format_seconds(with_it)}"] if with_it is not None else []
    costs += [f"without {it} ~{format_seconds(without)}"] if without is not None else []
    subject = (
        f"{named(slow)}'s link carries" if len(slow) == 1 else f"the links of {named(slow)} carry"
    )
    rate, best_rate = f"{format_bytes(round(slowest))}/s", f"{format_bytes(round(others))}/s"
    return (f"{subject} {rate}, the others {best_rate}: {', '.join(costs)}",)
