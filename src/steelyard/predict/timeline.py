"""When each line of a program begins, and how long the step waits for its exchanges.

Two streams: the device works through the lines in order; each mesh axis carries one exchange after
another, from the line that issues it on. The line that waits blocks the device until that one has
arrived. Not for bytes: see liveness.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.core.costs import Costs
from steelyard.core.program import Program
from steelyard.core.quad import NOTHING, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One pass over the lines. ``exposed_seconds`` are those in which the device only waited;
    ``spared_seconds`` what transfers would have slowed in that time, had anything run.
    """

    begins: tuple[float, ...]
    seconds: float
    exposed_seconds: float
    spared_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """What a pass takes: working, exchanging, waiting for that, and in all."""

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


def durations(program: Program, costs: Costs) -> Durations:
    """One pass over the program, without what repeats it and what follows."""
    nodes = [program.graph.by_name[i.node] for i in program.instructions if i.sink is None]
    whole = costs.whole_step_of(program.graph)
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
        # A slower link or a faster device can only mean more waiting; both together, the most.
        exposed=Estimate(
            value=expected.exposed_seconds,
            low=play(program, costs, device=_high, link=_low).exposed_seconds,
            high=play(program, costs, device=_low, link=_high).exposed_seconds,
        ),
        step=Estimate(
            value=expected.seconds,
            low=play(program, costs, device=_low, link=_low).seconds,
            high=play(program, costs, device=_high, link=_high).seconds,
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


_Pick = Callable[[Estimate], float]


def _value(estimate: Estimate) -> float:
    return estimate.value


def _low(estimate: Estimate) -> float:
    return estimate.low


def _high(estimate: Estimate) -> float:
    return estimate.high


def play(program: Program, costs: Costs, *, device: _Pick = _value, link: _Pick = _value) -> Played:
    """``device`` and ``link`` pick the end of the interval that is played."""
    nodes = program.graph.by_name
    awaited = {e.wait: e.issue for e in program.exchanges}
    whole = device(costs.whole_step_of(program.graph))
    clock = exposed = beside = spared = at_most = 0.0
    begins: list[float] = []
    idle_from: dict[str, float] = {}  # of each axis's link
    arrives: dict[int, float] = {}
    for index, instruction in enumerate(program.instructions):
        begins.append(clock)
        if instruction.sink is not None:
            continue
        node = nodes[instruction.node]
        if index in awaited:
            issue = awaited[index]
            stall = max(0.0, arrives[issue] - clock)
            exposed += stall
            clock += stall
            issued = nodes[program.instructions[issue].node].collective
            if issued is not None and issued.is_far:
                far = costs.links[issued.axis]
                spared += stall * whole * far.disturbs
                # Of a transfer: waiting may take longer.
                at_most += issued.sent_bytes / far.bytes_per_second * whole * far.disturbs
        seconds = device(costs.seconds(node)) * whole
        if node.is_far:
            # Spread over what runs while the transfer is under way.
            beside += seconds
        else:
            clock += seconds
        collective = node.collective
        if collective is not None:
            start = max(clock, idle_from.get(collective.axis, 0.0))
            arrives[index] = start + link(costs.exchange_seconds(collective))
            idle_from[collective.axis] = arrives[index]
    spared = min(spared, at_most)
    return Played(
        begins=tuple(begins),
        seconds=clock + beside - spared,
        exposed_seconds=exposed,
        spared_seconds=spared,
    )
