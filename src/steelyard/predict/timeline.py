"""Begin times of each line of a program, and the time that the step waits for its exchanges.

There are two kinds of streams: the device works through the lines in order, and each mesh axis
transfers one exchange after another, each no earlier than the line that issues it. The line that
waits for an exchange blocks the device until that exchange has arrived. A product that reads
offload memory waits for each slice. Not for bytes: see liveness.py.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from steelyard.ir.collective import Collective
from steelyard.ir.graph import Argument, Node
from steelyard.ir.metrics import NOTHING, Estimate
from steelyard.ir.program import Program
from steelyard.predict.cost_table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The timing of one pass over the lines of a program.

    During ``exposed_seconds``, the device only waited. ``spared_seconds`` is the slowdown that
    transfers would have caused in that time if anything had run.
    """

    begins: tuple[float, ...]
    seconds: float
    exposed_seconds: float
    spared_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """The time of a pass: computation, communication, exposed communication, and the total."""

    computation: Estimate
    communication: Estimate
    exposed: Estimate
    step: Estimate

    def scaled(self, factor: float) -> "Durations":
        return Durations(
            computation=self.computation.scaled(factor),
            communication=self.communication.scaled(factor),
            exposed=self.exposed.scaled(factor),
            step=self.step.scaled(factor),
        )

    def __add__(self, later: "Durations") -> "Durations":
        return Durations(
            computation=self.computation + later.computation,
            communication=self.communication + later.communication,
            exposed=self.exposed + later.exposed,
            step=self.step + later.step,
        )


def durations(program: Program, costs: CostTable) -> Durations:
    """Return the durations of one pass over the program, without repeats and without the update."""
    nodes = [program.graph.by_name[i.node] for i in program.instructions if i.sink is None]
    whole = costs.whole_step_in(program.parts)
    computation = _total([costs.seconds(n) for n in nodes]).times(whole)
    if not program.exchanges:
        return Durations(
            computation=computation, communication=NOTHING, exposed=NOTHING, step=computation
        )
    communication = [
        costs.exchange_seconds(n.collective) for n in nodes if n.collective is not None
    ]
    expected = play(program, costs)
    return Durations(
        computation=_less(computation, expected.spared_seconds),
        communication=_total(communication),
        # A slower link or a faster device can only increase the wait; both together maximize it.
        exposed=Estimate(
            value=expected.exposed_seconds,
            low=min(
                expected.exposed_seconds,
                play(program, costs, device=high, link=low).exposed_seconds,
            ),
            high=max(
                expected.exposed_seconds,
                play(program, costs, device=low, link=high).exposed_seconds,
            ),
        ),
        step=Estimate(
            value=expected.seconds,
            low=play(program, costs, device=low, link=low).seconds,
            high=play(program, costs, device=high, link=high).seconds,
        ),
    )


def _total(costs: Sequence[Estimate]) -> Estimate:
    return Estimate(
        value=sum(c.value for c in costs),
        low=sum(c.low for c in costs),
        high=sum(c.high for c in costs),
    )


def _less(estimate: Estimate, seconds: float) -> Estimate:
    return Estimate(
        value=estimate.value - seconds,
        low=max(0.0, estimate.low - seconds),
        high=estimate.high - seconds,
    )


Pick = Callable[[Estimate], float]


def value(estimate: Estimate) -> float:
    return estimate.value


def low(estimate: Estimate) -> float:
    return estimate.low


def high(estimate: Estimate) -> float:
    return estimate.high


def play(
    program: Program,
    costs: CostTable,
    *,
    device: Pick = value,
    link: Pick = value,
    playing: "Playing | None" = None,
) -> Played:
    """Simulate one pass over the program and return its timing.

    ``device`` and ``link`` pick the value or a bound of each estimate. ``playing`` is the clock to
    use; pass one to record what happens.
    """
    if playing is None:
        playing = Playing(costs, device(costs.whole_step_in(program.parts)), device, link)
    player = playing_through(program, playing)
    clock = None
    while True:
        try:
            # All other ranks are assumed to be at the same point as this one.
            clock = player.send(clock)
        except StopIteration as end:
            played: Played = end.value
            return played


def playing_through(program: Program, playing: "Playing") -> Generator[float, float | None, Played]:
    """Simulate one pass as a generator that synchronizes with other ranks.

    It yields its clock at each exchange among ranks, and is sent the time at which the last rank
    reached that exchange.
    """
    nodes = program.graph.by_name
    awaited = {e.wait: e.issue for e in program.exchanges}
    begins: list[float] = []
    arrives: dict[int, float] = {}
    for index, instruction in enumerate(program.instructions):
        begins.append(playing.clock)
        if instruction.sink is not None:
            continue
        node = nodes[instruction.node]
        issue = awaited.get(index)
        if issue in arrives:
            issued = nodes[program.instructions[issue].node].collective
            assert issued is not None
            playing.wait(issued, arrives[issue])
        if node.is_fetch_matmul:
            playing.carry_out(node)
            continue
        playing.run(node)
        if node.collective is not None and node.is_slicing:
            playing.begin_slices(node)
        elif node.collective is not None:
            last_rank_at = None if node.is_transfer else (yield playing.clock)
            arrives[index] = playing.issue(node.collective, not_before=last_rank_at or 0.0)
    return playing.played(begins)


class Playing:
    """The device clock of a simulated pass, and the time until which the link of each axis is
    busy.
    """

    def __init__(
        self, costs: CostTable, whole: float, device: Pick = value, link: Pick = value
    ) -> None:
        self._costs, self._whole, self._device, self._link = costs, whole, device, link
        self.clock = self._exposed = self._overlapped = self._spared = self._most_spared = 0.0
        self._link_free_at: dict[str, float] = {}
        # The time at which all ranks were last synchronized: the beginning, or the end of an
        # exchange for which all of them waited.
        self._synchronized_at = 0.0
        # For each weight that is read in slices: its exchange, and the time at which the next
        # slices arrive.
        self._slicing: dict[Argument, deque[tuple[Collective, deque[float]]]] = {}

    def played(self, begins: Sequence[float]) -> Played:
        spared = min(self._spared, self._most_spared)
        return Played(
            begins=tuple(begins),
            seconds=self.clock + self._overlapped - spared,
            exposed_seconds=self._exposed,
            spared_seconds=spared,
        )

    def wait(self, issued: Collective, arrival: float) -> None:
        stall = max(0.0, arrival - self.clock)
        self._exposed += stall
        self.clock += stall
        if stall and not issued.is_transfer:
            self._synchronized_at = self.clock
        link = self._costs.link_of(issued)
        if link is None:
            return  # only the total time is known, not the share of device time in it
        disturbs = link.disturbs / self._costs.device.speed * self._whole
        self._spared += stall * disturbs
        # A wait may last longer than its transfer; no more than the transfer's slowdown is spared.
        self._most_spared += issued.sent_bytes / link.bytes_per_second * disturbs

    def run(self, node: Node) -> None:
        exchanging = self._device(self._costs.exchange_device_seconds(node)) * self._whole
        # This time is spread over the operators that run while the exchange is in flight.
        self._overlapped += exchanging
        self.take(node, self._device(self._costs.seconds(node)) * self._whole - exchanging)

    def take(self, node: Node, seconds: float) -> None:  # noqa: ARG002 - for whoever watches
        """Advance the clock by the time that the device spends on this node."""
        self.clock += seconds

    def issue(self, collective: Collective, *, not_before: float = 0.0) -> float:
        """Issue an exchange and return the time at which it arrives."""
        begin = max(self.begins(collective), not_before)
        arrival = begin + self._link(self._costs.exchange_seconds(collective))
        if self._costs.skew is not None and not collective.is_transfer:
            arrival += self._link(self._costs.skew.wait(self.clock - self._synchronized_at))
        self._link_free_at[collective.link] = arrival
        return arrival

    def begins(self, collective: Collective) -> float:
        """Return the time at which an exchange that is issued now gets the link."""
        return max(self.clock, self._link_free_at.get(collective.link, 0.0))

    def begin_slices(self, node: Node) -> None:
        """Issue the transfers of the first two slices.

        Each further transfer is issued when the buffer of the slice before the previous one is
        free.
        """
        assert node.collective is not None
        parts = node.collective.hops
        one = replace(node.collective, sent_bytes=node.collective.sent_bytes // parts, hops=1)
        arriving = deque(self.issue(one) for _ in range(min(2, parts)))
        self._slicing.setdefault(node.args[0], deque()).append((one, arriving))

    def carry_out(self, node: Node) -> None:
        """Run a sliced product: wait for each slice, and compute with it while the next one
        arrives.
        """
        (weights, *_), body = node.args, node.body
        assert body is not None
        assert isinstance(weights, tuple)
        slicing = [self._slicing[weight].popleft() for weight in weights]
        seconds = self._device(self._costs.seconds(node)) * self._whole / body.parts
        for number in range(body.parts):
            for one, arriving in slicing:
                if 0 < number < body.parts - 1:
                    arriving.append(self.issue(one))
                self.wait(one, arriving.popleft())
            self.take(node, seconds)
