"""What operators cost on a device: seconds and kernel workspace per signature.

Measured where they could be, declared where not, and each says which. Not for measuring them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Device, Link
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import Body, Node, Phase
from steelyard.ir.metrics import NOTHING, Estimate
from steelyard.ir.parallel_layout import DATA, PIPELINE
from steelyard.predict.arrival_skew import Skew
from steelyard.predict.collectives.host_groups import RanksPerHost
from steelyard.predict.rank_subsets import Subset

# A roofline says which resource binds, not how well a kernel uses it: the published errors of
# such models per operator lie between half and twice.
_DECLARED_SHARE = 0.5
FREE = NOTHING
# Two threads of one physical core each compute at little more than half its speed. The same step of
# a rank on one core of a virtual machine took 47 to 88 ms from one run to the next, and nothing
# else ran there (docs/log.md, 2026-11-28).
_SHARED_CORE = Estimate(value=1.0, low=0.55, high=1.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """Seconds of one call, and bytes its kernel holds besides its results while it runs.

    Not ``is_measured`` where it was worked out from operators like it that were.
    """

    seconds: Estimate
    workspace_bytes: int
    is_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """The price list. ``whole_step`` is what a whole step took over the sum of its operators.

    ``cut_steps`` says the same of the step in so many equal parts, whose small operators lose more
    to what comes between them, in whatever way each is then computed. ``update_call_seconds`` is
    what the optimizer's own Python takes for each of its operators. ``links`` says over which class
    of link the ranks of each mesh axis are joined, and near and offload memory, which takes
    ``far_bytes``; ``collective_curves`` what an exchange takes as a whole, by axis, kind, number of
    ranks and how far they are apart, where it is known so. ``devices`` are those of the ranks,
    where they are not all like ``device``; ``spread`` is over how many hosts they are, where
    several of them have several ranks. ``subsets`` says for a number of ranks which of them a step
    on so many lies on, where they are not the first or are joined otherwise than all. ``skew`` is
    how long ranks wait for the last one at an exchange, where that was measured. ``shares_cores``:
    each rank has cores that other virtual machines may use at the same time.
    """

    device: Device
    operators: Mapping[str, OperatorCost] = field(default_factory=dict)
    whole_step: Estimate = field(default_factory=lambda: Estimate(value=1.0, low=0.8, high=1.25))
    cut_steps: Mapping[int, Estimate] = field(default_factory=dict)
    update_call_seconds: Estimate = NOTHING
    links: Mapping[str, Link] = field(default_factory=dict)
    far_bytes: int = 0
    collective_curves: Mapping[tuple[str, Exchange, int, int], Link] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    spread: RanksPerHost | None = None
    subsets: Mapping[int, Subset] = field(default_factory=dict)
    skew: Skew | None = None
    shares_cores: bool = False

    def on(self, num_ranks: int) -> "CostTable":
        """The prices on so many ranks: with the devices and the links of the ones chosen."""
        subset = self.subsets.get(num_ranks)
        if subset is None:
            return self
        devices = tuple(self.devices[rank] for rank in subset.ranks) if self.devices else ()
        return replace(
            self,
            devices=devices,
            links={**self.links, **subset.links},
            collective_curves={**self.collective_curves, **subset.collective_curves},
            subsets={},
        )

    def of_rank(self, rank: int) -> "CostTable":
        """What the same takes on this rank's device."""
        return replace(self, device=self.devices[rank], devices=()) if self.devices else self

    def seconds(self, node: Node) -> Estimate:
        if node.is_free:
            return FREE
        if node.is_far:
            return self.beside_seconds(node)
        known = self.operators.get(node.signature)
        slower = 1 / self.device.speed
        seconds = known.seconds.scaled(slower) if known else self.declared_seconds(node)
        if node.phase is Phase.UPDATE:
            seconds = seconds + self.update_call_seconds.scaled(slower)
        if (collective := node.collective) is None:
            return seconds
        if collective.axis == DATA and collective.is_sum:
            # Each rank first looks for values that are not finite in what it adds.
            read = collective.whole_bytes / self.device.bytes_per_second
            seconds = seconds + Estimate.within(read, share=_DECLARED_SHARE)
        return seconds + self.beside_seconds(node)

    def beside_seconds(self, node: Node) -> Estimate:
        """What of them an exchange takes of the device while it is under way."""
        collective = node.collective
        link = self.link_of(collective) if collective else None
        if collective is None or link is None:
            return FREE
        own = link.device_seconds(collective.sent_bytes, messages=collective.hops)
        own /= self.device.speed
        return Estimate.within(own, share=_DECLARED_SHARE)

    def link_of(self, collective: Collective) -> Link | None:
        """What it goes over; None where only exchanges as a whole are known."""
        link = self.links.get(collective.link)
        if link is None or self.spread is None or collective.is_far:
            return link
        return self.spread.link_of(collective, link)

    def whole_step_in(self, parts: int) -> Estimate:
        found = self.cut_steps.get(parts, self.whole_step)
        if not self.shares_cores:
            return found
        low, high = (found.value * end for end in (_SHARED_CORE.low, _SHARED_CORE.high))
        return replace(found, low=min(low, found.low), high=max(high, found.high))

    def workspace_bytes(self, node: Node) -> int:
        known = self.operators.get(node.signature)
        if known is not None and (known.is_measured or node.body is None):
            return known.workspace_bytes
        # What is not measured is at least what its calls show.
        return node.body.workspace_bytes if node.body is not None else 0

    def declared_seconds(self, node: Node) -> Estimate:
        if node.body is not None:
            return Estimate.within(self._declared_within(node.body), share=_DECLARED_SHARE)
        device = self.device
        computing = node.flops / device.flops_in(node.product_format) if node.flops else 0.0
        seconds = device.call_seconds + max(computing, node.moved_bytes / device.bytes_per_second)
        return Estimate.within(seconds, share=_DECLARED_SHARE)

    def _declared_within(self, body: Body) -> float:
        """Its calls as if each were made once, the further parts' calls, and what is read anew."""
        nodes = body.calls[0][1]
        again = sum(take.tensor.nbytes for take in body.takes if take.along is None)
        calls = len(nodes) * self.device.call_seconds + again / self.device.bytes_per_second
        once = sum(self.declared_seconds(node).value for node in nodes if not node.is_free)
        return once + (body.parts - 1) * calls

    def exchange_seconds(self, collective: Collective) -> Estimate:
        """What the exchange takes on its link, apart from the call that issues it."""
        ranks = collective.num_ranks, collective.stride
        whole = self.collective_curves.get((collective.link, collective.kind, *ranks))
        if whole is not None:
            seconds = whole.seconds(collective.whole_bytes, messages=1)
            return Estimate.within(seconds, share=whole.doubt)
        link = self.links.get(collective.link)
        if collective.axis == PIPELINE and collective.kind is Exchange.ALL_REDUCE:
            # That of stages is of messages; sums among them go as among any ranks.
            link = self.links.get(DATA, link)
        if link is None and collective.is_pinned:
            raise BadInput(
                "the plan's exchanges go through memory that ranks share, and these are not known "
                "to share any",
                expected="ranks of one host, as Cluster.here finds them",
                remedy="take the shared_memory_transfer rule out of the plan, or plan again",
            )
        if link is None:
            raise BadInput(
                f"the step exchanges data over the axis {collective.axis!r}, whose link is unknown",
                expected=f"a link for each axis; there is one for {sorted(self.links) or 'none'}",
                remedy="name a folder for offload memory"
                if collective.is_far
                else "declare the link that joins these ranks",
            )
        if self.spread is not None and not collective.is_far:
            link = self.spread.shared(collective, link)
        seconds = link.seconds(collective.sent_bytes, messages=collective.waits)
        return Estimate.within(seconds, share=link.doubt)

    def is_measured(self, node: Node) -> bool:
        if node.is_free or node.is_far:
            return True
        known = self.operators.get(node.signature)
        return known is not None and known.is_measured


class Missing(StrEnum):
    """Why an operator was not measured."""

    NO_TIME = "the time for measuring was used up"
    TOO_LARGE = "larger than the memory that is free"
    FAILED = "fails when called on its own"
    EXCHANGES = "speaks to other ranks"
    PROFILED = "a profiler was on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """One operator whose cost is declared, not measured."""

    signature: str
    why: Missing
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """How a price list came about. ``notes`` are for the user: nothing here went by in silence.

    Counts are of distinct operators; ``known`` ones were measured before and read from the cache.
    """

    measured: int = 0
    known: int = 0
    unmeasured: tuple[Unmeasured, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def count(self, why: Missing) -> int:
        return sum(u.why is why for u in self.unmeasured)
