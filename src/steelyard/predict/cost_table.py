"""The cost table of a step: seconds and kernel workspace by operator signature, and link costs.

Costs are measured if possible, and declared otherwise; each says which of the two it is. Not for
measuring them: see measure/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Device, Link
from steelyard.ir.analysis.sliced_body import body_workspace_bytes
from steelyard.ir.collective import Collective, Exchange
from steelyard.ir.graph import Body, Node, Phase
from steelyard.ir.metrics import NOTHING, Estimate
from steelyard.ir.parallel_layout import DATA, PIPELINE
from steelyard.ir.rule import trade_name
from steelyard.ir.rule_kinds import SharedMemoryMessages
from steelyard.predict.arrival_skew import Skew
from steelyard.predict.collectives.host_groups import RanksPerHost
from steelyard.predict.rank_subsets import Subset

# A roofline shows which resource is the bottleneck, but not how well a kernel uses it. For single
# operators, published errors of such models range from half to twice the measured time.
_DECLARED_SHARE = 0.5
FREE = NOTHING
# Two threads that share one physical core each run at little more than half its speed. The same
# step of a rank on one core of an otherwise idle virtual machine took from 47 to 88 ms in different
# runs (docs/log.md, 2026-11-28).
_SHARED_CORE = Estimate(value=1.0, low=0.55, high=1.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """The seconds of one call, and the bytes of workspace that its kernel needs while it runs.

    ``is_measured`` is False if the cost was derived from measured operators of the same kind.
    """

    seconds: Estimate
    workspace_bytes: int
    is_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """The costs of operators and exchanges on a device and its links.

    ``whole_step`` is the ratio of a measured step to the sum of its operators. ``cut_steps`` is
    that ratio for a step in a given number of micro-batches, in which the overhead between the
    smaller operators weighs more. ``update_call_seconds`` is the optimizer's Python overhead per
    operator.

    ``links`` gives the class of link for each mesh axis, and for transfers between device memory
    and offload memory; the latter has a capacity of ``offload_bytes``. ``collective_curves`` gives
    the time of whole exchanges, by axis, kind, number of ranks and their distance, where these are
    known. ``skew`` is the measured time that ranks wait for the last one at an exchange.
    ``devices`` are the devices of the ranks if these differ from ``device``. ``spread`` describes
    how the ranks are distributed over hosts, if several hosts have several ranks. ``subsets``
    gives, for a number of ranks, which ranks a step uses, if these are not the first ones or have
    other links than all ranks together. ``shares_cores`` is True if other virtual machines may use
    the cores of the ranks at the same time.
    """

    device: Device
    operators: Mapping[str, OperatorCost] = field(default_factory=dict)
    whole_step: Estimate = field(default_factory=lambda: Estimate(value=1.0, low=0.8, high=1.25))
    cut_steps: Mapping[int, Estimate] = field(default_factory=dict)
    update_call_seconds: Estimate = NOTHING
    links: Mapping[str, Link] = field(default_factory=dict)
    offload_bytes: int = 0
    collective_curves: Mapping[tuple[str, Exchange, int, int], Link] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    spread: RanksPerHost | None = None
    subsets: Mapping[int, Subset] = field(default_factory=dict)
    skew: Skew | None = None
    shares_cores: bool = False

    def on(self, num_ranks: int) -> "CostTable":
        """Return the costs on this number of ranks, with the devices and links of the chosen
        subset.
        """
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
        """Return the costs on the device of this rank."""
        return replace(self, device=self.devices[rank], devices=()) if self.devices else self

    def seconds(self, node: Node) -> Estimate:
        if node.is_free:
            return FREE
        if node.is_transfer:
            return self.exchange_device_seconds(node)
        known = self.operators.get(node.signature)
        slower = 1 / self.device.speed
        seconds = known.seconds.scaled(slower) if known else self.declared_seconds(node)
        if node.phase is Phase.UPDATE:
            seconds = seconds + self.update_call_seconds.scaled(slower)
        if (collective := node.collective) is None:
            return seconds
        if collective.axis == DATA and collective.is_sum:
            # Each rank first checks its addends for non-finite values.
            read = collective.whole_bytes / self.device.bytes_per_second
            seconds = seconds + Estimate.within(read, share=_DECLARED_SHARE)
        return seconds + self.exchange_device_seconds(node)

    def exchange_device_seconds(self, node: Node) -> Estimate:
        """Return the device time that an exchange takes while it is in flight."""
        collective = node.collective
        link = self.link_of(collective) if collective else None
        if collective is None or link is None:
            return FREE
        own = link.device_seconds(collective.sent_bytes, messages=collective.hops)
        own /= self.device.speed
        return Estimate.within(own, share=_DECLARED_SHARE)

    def link_of(self, collective: Collective) -> Link | None:
        """Return the link of an exchange, or None if only the time of whole exchanges is known."""
        link = self.links.get(collective.link)
        if link is None or self.spread is None or collective.is_transfer:
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
        # If nothing was measured, the workspace computed from the calls is a lower bound.
        return body_workspace_bytes(node.body) if node.body is not None else 0

    def declared_seconds(self, node: Node) -> Estimate:
        if node.body is not None:
            return Estimate.within(self._declared_body_seconds(node.body), share=_DECLARED_SHARE)
        device = self.device
        computing = node.flops / device.flops_in(node.product_format) if node.flops else 0.0
        seconds = device.call_seconds + max(computing, node.moved_bytes / device.bytes_per_second)
        return Estimate.within(seconds, share=_DECLARED_SHARE)

    def _declared_body_seconds(self, body: Body) -> float:
        """Return the declared seconds of a chunked body.

        The first chunk has all the costs of its calls; each further one adds the call overhead, and
        the time to read the unchunked inputs once more.
        """
        nodes = body.calls[0][1]
        reread = sum(take.tensor.nbytes for take in body.takes if take.along is None)
        calls = len(nodes) * self.device.call_seconds + reread / self.device.bytes_per_second
        once = sum(self.declared_seconds(node).value for node in nodes if not node.is_free)
        return once + (body.parts - 1) * calls

    def exchange_seconds(self, collective: Collective) -> Estimate:
        """Return the time of an exchange on its link, without the call that issues it."""
        ranks = collective.num_ranks, collective.stride
        whole = self.collective_curves.get((collective.link, collective.kind, *ranks))
        if whole is not None:
            seconds = whole.seconds(collective.whole_bytes, messages=1)
            return Estimate.within(seconds, share=whole.doubt)
        link = self.links.get(collective.link)
        if collective.axis == PIPELINE and collective.kind is Exchange.ALL_REDUCE:
            # The link of the pipeline axis is for messages; sums over stages use the data-parallel
            # link.
            link = self.links.get(DATA, link)
        if link is None and collective.is_pinned:
            raise BadInput(
                "the plan exchanges data through shared memory, but these ranks have none in "
                "common",
                expected="ranks of one host, as Cluster.here finds them",
                remedy=f"remove the {trade_name(SharedMemoryMessages)} rule from the plan, or plan "
                "again",
            )
        if link is None:
            raise BadInput(
                f"the step exchanges data over the axis {collective.axis!r}, whose link is unknown",
                expected=f"a link for each axis; there is one for {sorted(self.links) or 'none'}",
                remedy="name a folder for offload memory"
                if collective.is_transfer
                else "declare the link that joins these ranks",
            )
        if self.spread is not None and not collective.is_transfer:
            link = self.spread.shared(collective, link)
        seconds = link.seconds(collective.sent_bytes, messages=collective.waits)
        return Estimate.within(seconds, share=link.doubt)

    def is_measured(self, node: Node) -> bool:
        if node.is_free or node.is_transfer:
            return True
        known = self.operators.get(node.signature)
        return known is not None and known.is_measured


class Missing(StrEnum):
    """The reason why an operator was not measured."""

    NO_TIME = "the measuring time limit was reached"
    TOO_LARGE = "needs more than the free memory"
    FAILED = "fails when called on its own"
    EXCHANGES = "communicates with other ranks"
    PROFILED = "a profiler was active"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured:
    """An operator whose cost is declared, not measured."""

    signature: str
    why: Missing
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A report of how a cost table was made.

    Counts are of distinct operators; ``known`` ones were measured before and read from the cache.
    ``notes`` tell the user what was skipped or replaced.
    """

    measured: int = 0
    known: int = 0
    unmeasured: tuple[Unmeasured, ...] = ()
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    def count(self, why: Missing) -> int:
        return sum(u.why is why for u in self.unmeasured)
