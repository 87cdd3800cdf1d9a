"""Replay a pipeline's table of actions: when each begins and ends, and what each rank holds then.

The table is torch's own, so that no formula of a schedule is needed. Not for choosing one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from steelyard.ir.pipeline_schedule import AHEAD, Action, ActionKind, Order, source_of

GIVE_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACK_TO_WEIGHTS)


# What a stage holds of one micro-batch: the bytes of each storage, by its number, or by the name of
# the value of which a copy is sent.
Values = Mapping[int | str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One micro-batch in one stage. A backward pass in two parts need not take what the whole does.

    ``sends`` and ``sends_back`` are what goes to another rank, in ``send_seconds`` and
    ``send_back_seconds``; between stages of one rank what ``receives`` and ``receives_back`` say is
    handed on. ``kept`` stays from the forward pass to the backward, ``kept_between`` between the
    latter's two parts. ``working_bytes`` are there besides while it works, and ``gradient_bytes``
    from the first gradients on: these stay where they were made, which is among ``first_bytes``, in
    place of ``working_bytes`` that once.
    """

    seconds: dict[ActionKind, float]
    send_seconds: float = 0.0
    send_back_seconds: float = 0.0
    receives: Values = field(default_factory=dict)
    receives_back: Values = field(default_factory=dict)
    sends: Values = field(default_factory=dict)
    sends_back: Values = field(default_factory=dict)
    kept: Values = field(default_factory=dict)
    kept_between: Values = field(default_factory=dict)
    working_bytes: dict[ActionKind, int] = field(default_factory=dict)
    first_bytes: dict[ActionKind, int] = field(default_factory=dict)
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """An action; ``held_bytes`` are there above parameters and states while it works."""

    action: Action
    rank: int
    begin_seconds: float
    end_seconds: float
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step of a pipeline, its actions in the order in which they end on each rank."""

    ranks: tuple[tuple[Replayed, ...], ...]

    @property
    def seconds(self) -> float:
        return max(r.end_seconds for ranked in self.ranks for r in ranked)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do nothing."""
        busy = sum(r.end_seconds - r.begin_seconds for ranked in self.ranks for r in ranked)
        return 1 - busy / (self.seconds * len(self.ranks))

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(max(r.held_bytes for r in ranked) for ranked in self.ranks)


def replay(
    order: Order,
    stages: Sequence[StageCost],
    *,
    disturbs: float = 0.0,
    is_by_host: bool = False,
) -> Replay:
    """Every rank takes up its next action when it is done with the last and what it reads has come;
    between two ranks one message goes after another. While one is under way, what both work on is
    slowed by the share of that time that it ``disturbs`` them for. Those that go ``is_by_host``
    take no room of the ranks' before they are read, nor once they are sent."""
    rank_of, pending = order.rank_of, [list(actions) for actions in order.ranks]
    done: list[list[Replayed]] = [[] for _ in order.ranks]
    flights = _Flights(done, disturbs)
    ends = _Ends(order, stages, flights)
    held = [_HeldBytes(order, stages, is_by_host=is_by_host) for _ in order.ranks]

    def can_begin() -> Iterator[tuple[float, int]]:
        for rank, actions in enumerate(pending):
            if rank not in working and actions and ends.has(actions[0]):
                free = done[rank][-1].end_seconds if done[rank] else 0.0
                yield max(free, ends.arrived(actions[0])), rank

    def begins(rank: int, begin: float) -> None:
        action = pending[rank].pop(0)
        awaited = [a for a in pending[rank][:AHEAD] if source_of(a, rank_of) is not None]
        done[rank].append(
            Replayed(
                action=action,
                rank=rank,
                begin_seconds=begin,
                end_seconds=flights.worked(rank, begin, stages[action.stage].seconds[action.work]),
                held_bytes=held[rank].during(action, awaited),
            )
        )

    def ended(rank: int) -> None:
        ends.put(done[rank][-1].action, done[rank][-1].end_seconds)

    working: set[int] = set()
    while any(pending) or working:
        able = list(can_begin())
        assert able or working, f"the table never gets to {[str(a[0]) for a in pending if a]}"
        if not disturbs:
            for begin, rank in able:
                begins(rank, begin)
                ended(rank)
            continue
        # In the order of time: a message that goes on its way makes end later what both ranks are
        # at work on by then.
        begin, rank = min(able, default=(inf, -1))
        end, first = min(((done[r][-1].end_seconds, r) for r in working), default=(inf, -1))
        if end <= begin:
            working.remove(first)
            ended(first)
        else:
            working.add(rank)
            begins(rank, begin)
    return Replay(ranks=tuple(map(tuple, done)))


class _Flights:
    """Messages under way, and what they take of the work at both ends: what a rank is at work on,
    the last of what it has ``done``, ends later."""

    def __init__(self, done: list[list[Replayed]], disturbs: float) -> None:
        self._done, self._disturbs = done, disturbs
        self._of: list[list[tuple[float, float]]] = [[] for _ in done]

    def add(self, ranks: Sequence[int], begin: float, end: float) -> None:
        if not self._disturbs:
            return
        for rank in ranks:
            last = self._done[rank][-1] if self._done[rank] else None
            if last is None or last.end_seconds <= begin:
                self._of[rank].append((begin, end))
                continue
            since = max(begin, last.begin_seconds)  # it begins behind what it waits for
            left = sum(
                share * (min(until, last.end_seconds) - start)
                for start, until, share in self._shares(rank, since)
                if start < last.end_seconds
            )
            self._of[rank].append((begin, end))
            self._done[rank][-1] = replace(last, end_seconds=self.worked(rank, since, left))

    def worked(self, rank: int, begin: float, seconds: float) -> float:
        """When so much work is done."""
        for start, until, share in self._shares(rank, begin):
            if share * (until - start) >= seconds:
                return start + seconds / share if seconds else start
            seconds = max(0.0, seconds - share * (until - start))
        raise AssertionError("the last share is one, without an end")

    def _shares(self, rank: int, since: float) -> Iterator[tuple[float, float, float]]:
        """What is left of this rank's time for its work, from when until when."""
        flights = [flight for flight in self._of[rank] if flight[1] > since]
        changes = sorted({time for flight in flights for time in flight if time > since})
        for start, until in pairwise([since, *changes, inf]):
            under_way = sum(begin <= start < end for begin, end in flights)
            yield start, until, max(0.0, 1.0 - self._disturbs * under_way)


_Key = tuple[int, str, int]


class _Ends:
    """When what an action makes has come to who reads it."""

    def __init__(self, order: Order, stages: Sequence[StageCost], flights: _Flights) -> None:
        self._flights = flights
        self._rank_of = order.rank_of
        self._stages = stages
        self._last = order.num_stages - 1
        self._there: dict[_Key, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}

    def has(self, action: Action) -> bool:
        return all(key in self._there for key in self._reads(action))

    def arrived(self, action: Action) -> float:
        return max((self._there[key] for key in self._reads(action)), default=0.0)

    def put(self, action: Action, end: float) -> None:
        stage, micro_batch, cost = action.stage, action.micro_batch, self._stages[action.stage]
        match action.work:
            case ActionKind.FORWARD:
                self._there[stage, "kept", micro_batch] = end
                if stage < self._last:
                    sent = self._sent(stage, stage + 1, end, cost.send_seconds)
                    self._there[stage + 1, "activations", micro_batch] = sent
            case ActionKind.BACKWARD | ActionKind.BACK_TO_INPUTS:
                self._there[stage, "between", micro_batch] = end
                if stage > 0:
                    sent = self._sent(stage, stage - 1, end, cost.send_back_seconds)
                    self._there[stage - 1, "gradients", micro_batch] = sent

    def _reads(self, action: Action) -> list[_Key]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.work is ActionKind.FORWARD:
            return [(stage, "activations", micro_batch)] if stage > 0 else []
        if action.work is ActionKind.BACK_TO_WEIGHTS:
            return [(stage, "between", micro_batch)]
        gradients: list[_Key] = [(stage, "gradients", micro_batch)] if stage < self._last else []
        return [(stage, "kept", micro_batch), *gradients]

    def _sent(self, source: int, target: int, end: float, seconds: float) -> float:
        link = self._rank_of[source], self._rank_of[target]
        if link[0] == link[1]:
            return end
        begin = max(end, self._link_free.get(link, 0.0))
        there = self._link_free[link] = begin + seconds
        self._flights.add(link, begin, there)
        return there


# Who uses a value: a stage, for what, of which micro-batch.
_Use = tuple[int, str, int]
# A value: the first of the stages that have it in common, the micro-batch, and its storage.
_Value = tuple[int, int, int | str]


class _HeldBytes:
    """The bytes that one rank holds as it goes through its actions: each value is there once, and
    as long as anyone on this rank has a use for it."""

    def __init__(
        self, order: Order, stages: Sequence[StageCost], *, is_by_host: bool = False
    ) -> None:
        self._stages, self._is_by_host = stages, is_by_host
        self._rank_of = order.rank_of
        self._holds_sends = order.holds_sends
        self._nbytes = 0
        self._with_gradients: set[int] = set()
        self._used: dict[_Use, Mapping[_Value, int]] = {}
        self._uses_of: Counter[_Value] = Counter()

    def during(self, action: Action, awaited: Sequence[Action] = ()) -> int:
        """While this action works; what it reads is let go of when it is done."""
        stage, work, micro_batch = action.stage, action.work, action.micro_batch
        cost = self._stages[stage]
        self._use(_reads(action), action, self._read(action))
        is_first = work in GIVE_GRADIENTS and stage not in self._with_gradients
        working = cost.first_bytes if is_first else cost.working_bytes
        coming = () if self._is_by_host else awaited
        room = sum(sum(self._read(each).values()) for each in coming)
        meanwhile = self._nbytes + working.get(work, 0) + room
        if is_first:
            self._with_gradients.add(stage)
            self._nbytes += cost.gradient_bytes
        kept, between = (stage, "kept", micro_batch), (stage, "between", micro_batch)
        match work:
            case ActionKind.FORWARD:
                self._use(kept, action, cost.kept)
            case ActionKind.BACK_TO_INPUTS:
                self._use(between, action, cost.kept_between)
        if work is not ActionKind.BACK_TO_WEIGHTS:
            self._hand_on(action)
        self._let_go(_reads(action))
        match work:
            case ActionKind.BACKWARD | ActionKind.BACK_TO_INPUTS:
                self._let_go(kept)
            case ActionKind.BACK_TO_WEIGHTS:
                self._let_go(between)
        return meanwhile

    def _read(self, action: Action) -> Values:
        """What this action is handed by another stage."""
        cost = self._stages[action.stage]
        match action.work:
            case ActionKind.FORWARD:
                return cost.receives
            case ActionKind.BACKWARD | ActionKind.BACK_TO_INPUTS:
                return cost.receives_back
        return {}

    def _hand_on(self, action: Action) -> None:
        """To a stage of this rank, which lets go of it; or to another rank, and then it stays until
        the step ends, or (1F1B) till others go the same way, but for the first of all."""
        cost, step = self._stages[action.stage], 1 if action.work is ActionKind.FORWARD else -1
        to = replace(action, stage=action.stage + step)
        if to.stage not in self._rank_of:
            return
        if self._rank_of[to.stage] == self._rank_of[action.stage]:
            self._use(_reads(to), to, self._read(to))
            return
        if self._is_by_host:
            return
        way = action.stage, f"sent {step}"
        is_first_of_all = step == 1 and (*way, 0) not in self._used
        place = action.micro_batch if self._holds_sends else int(not is_first_of_all)
        self._let_go((*way, place))
        self._use((*way, place), action, cost.sends if step == 1 else cost.sends_back)

    def _use(self, use: _Use, action: Action, values: Values) -> None:
        if use in self._used:
            return
        # Stages of one rank that follow on each other have their values in common.
        first = action.stage
        while self._rank_of.get(first - 1) == self._rank_of[first]:
            first -= 1
        used = {(first, action.micro_batch, key): nbytes for key, nbytes in values.items()}
        self._nbytes += sum(n for value, n in used.items() if not self._uses_of[value])
        self._uses_of.update(used.keys())
        self._used[use] = used

    def _let_go(self, use: _Use) -> None:
        used = self._used.pop(use, {})
        self._uses_of.subtract(used.keys())
        self._nbytes -= sum(n for value, n in used.items() if not self._uses_of[value])


def _reads(action: Action) -> _Use:
    work = "reads" if action.work is ActionKind.FORWARD else "reads back"
    return action.stage, work, action.micro_batch
