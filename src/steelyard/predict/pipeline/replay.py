"""Replays a pipeline schedule to get the begin, end and memory of each action.

The schedule is torch's own table of actions, so no formula per schedule is needed. Not for
choosing a schedule: see search/ranks/pipeline_search.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from steelyard.ir.pipeline_schedule import AHEAD, Action, ActionKind, Order, source_of

GIVE_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACK_TO_WEIGHTS)


# The bytes of each storage that a stage holds for one micro-batch. The key is the number of the
# storage; if a contiguous copy of a value is sent, it is the name of the value.
Values = Mapping[int | str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of one micro-batch in one stage.

    A backward pass that is split in two may take another time than the whole. ``sends`` and
    ``sends_back`` are the values sent to another rank, in ``send_seconds`` and
    ``send_back_seconds``. Between stages of one rank, ``receives`` and ``receives_back`` are passed
    on instead. ``kept`` is saved from the forward pass for the backward pass, ``kept_between`` from
    the first to the second part of a split backward pass. ``working_bytes`` are temporary while an
    action runs, and ``gradient_bytes`` stay allocated from the first gradients on. The action that
    allocates them needs ``first_bytes``, which include the gradients, instead of ``working_bytes``.
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
    """An action with its times; ``held_bytes`` are allocated on top of parameters and states."""

    action: Action
    rank: int
    begin_seconds: float
    end_seconds: float
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replayed step, with the actions of each rank in the order in which they end."""

    ranks: tuple[tuple[Replayed, ...], ...]

    @property
    def seconds(self) -> float:
        return max(r.end_seconds for ranked in self.ranks for r in ranked)

    @property
    def bubble(self) -> float:
        """The share of the total time of all ranks in which they are idle."""
        busy = sum(r.end_seconds - r.begin_seconds for ranked in self.ranks for r in ranked)
        return 1 - busy / (self.seconds * len(self.ranks))

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak bytes of each rank."""
        return tuple(max(r.held_bytes for r in ranked) for ranked in self.ranks)


def replay(
    order: Order,
    stages: Sequence[StageCost],
    *,
    disturbs: float = 0.0,
    is_by_host: bool = False,
) -> Replay:
    """Replay a schedule and return the times and the memory of its actions.

    A rank begins its next action when it is done with the previous one and the inputs have arrived.
    Messages between two ranks are sent one after another. A message in flight slows the work of
    both of its ranks by the share ``disturbs``. If ``is_by_host``, messages go through host memory
    and take no memory of the ranks before they are read or after they are sent.
    """
    rank_of, pending = order.rank_of, [list(actions) for actions in order.ranks]
    done: list[list[Replayed]] = [[] for _ in order.ranks]
    messages = _MessagesInFlight(done, disturbs)
    arrivals = _Arrivals(order, stages, messages)
    memory = [_RankMemory(order, stages, is_by_host=is_by_host) for _ in order.ranks]

    def can_begin() -> Iterator[tuple[float, int]]:
        for rank, actions in enumerate(pending):
            if rank not in working and actions and arrivals.has(actions[0]):
                free = done[rank][-1].end_seconds if done[rank] else 0.0
                yield max(free, arrivals.arrived(actions[0])), rank

    def start(rank: int, begin: float) -> None:
        action = pending[rank].pop(0)
        awaited = [a for a in pending[rank][:AHEAD] if source_of(a, rank_of) is not None]
        done[rank].append(
            Replayed(
                action=action,
                rank=rank,
                begin_seconds=begin,
                end_seconds=messages.worked(rank, begin, stages[action.stage].seconds[action.work]),
                held_bytes=memory[rank].during(action, awaited),
            )
        )

    def finish(rank: int) -> None:
        arrivals.put(done[rank][-1].action, done[rank][-1].end_seconds)

    working: set[int] = set()
    while any(pending) or working:
        ready = list(can_begin())
        assert ready or working, f"the schedule never reaches {[str(a[0]) for a in pending if a]}"
        if not disturbs:
            for begin, rank in ready:
                start(rank, begin)
                finish(rank)
            continue
        # Actions begin and end in order of time, because a message that is sent delays the end of
        # the actions that run on both ranks at that time.
        begin, rank = min(ready, default=(inf, -1))
        end, first = min(((done[r][-1].end_seconds, r) for r in working), default=(inf, -1))
        if end <= begin:
            working.remove(first)
            finish(first)
        else:
            working.add(rank)
            start(rank, begin)
    return Replay(ranks=tuple(map(tuple, done)))


class _MessagesInFlight:
    """Messages in flight, and the work that they delay at both ends.

    A message added while a rank works moves the end of that rank's last action in ``done``.
    """

    def __init__(self, done: list[list[Replayed]], disturbs: float) -> None:
        self._done, self._disturbs = done, disturbs
        self._messages_of: list[list[tuple[float, float]]] = [[] for _ in done]

    def add(self, ranks: Sequence[int], begin: float, end: float) -> None:
        if not self._disturbs:
            return
        for rank in ranks:
            last = self._done[rank][-1] if self._done[rank] else None
            if last is None or last.end_seconds <= begin:
                self._messages_of[rank].append((begin, end))
                continue
            # A message cannot delay an action before the action begins.
            since = max(begin, last.begin_seconds)
            left = sum(
                share * (min(until, last.end_seconds) - start)
                for start, until, share in self._shares(rank, since)
                if start < last.end_seconds
            )
            self._messages_of[rank].append((begin, end))
            self._done[rank][-1] = replace(last, end_seconds=self.worked(rank, since, left))

    def worked(self, rank: int, begin: float, seconds: float) -> float:
        """Return the time at which ``seconds`` of work are done, if they begin at ``begin``."""
        for start, until, share in self._shares(rank, begin):
            if share * (until - start) >= seconds:
                return start + seconds / share if seconds else start
            seconds = max(0.0, seconds - share * (until - start))
        raise AssertionError("the last interval has no end")

    def _shares(self, rank: int, since: float) -> Iterator[tuple[float, float, float]]:
        """Yield intervals of time, with the share of this rank's time that is left for its own
        work.
        """
        messages = [message for message in self._messages_of[rank] if message[1] > since]
        changes = sorted({time for message in messages for time in message if time > since})
        for start, until in pairwise([since, *changes, inf]):
            in_flight = sum(begin <= start < end for begin, end in messages)
            yield start, until, max(0.0, 1.0 - self._disturbs * in_flight)


_Key = tuple[int, str, int]


class _Arrivals:
    """The times at which the results of actions arrive at the actions that read them."""

    def __init__(
        self, order: Order, stages: Sequence[StageCost], messages: _MessagesInFlight
    ) -> None:
        self._messages = messages
        self._rank_of = order.rank_of
        self._stages = stages
        self._last = order.num_stages - 1
        self._arrived_at: dict[_Key, float] = {}
        self._link_free: dict[tuple[int, int], float] = {}

    def has(self, action: Action) -> bool:
        return all(key in self._arrived_at for key in self._reads(action))

    def arrived(self, action: Action) -> float:
        return max((self._arrived_at[key] for key in self._reads(action)), default=0.0)

    def put(self, action: Action, end: float) -> None:
        stage, micro_batch, cost = action.stage, action.micro_batch, self._stages[action.stage]
        match action.work:
            case ActionKind.FORWARD:
                self._arrived_at[stage, "kept", micro_batch] = end
                if stage < self._last:
                    sent = self._sent(stage, stage + 1, end, cost.send_seconds)
                    self._arrived_at[stage + 1, "activations", micro_batch] = sent
            case ActionKind.BACKWARD | ActionKind.BACK_TO_INPUTS:
                self._arrived_at[stage, "between", micro_batch] = end
                if stage > 0:
                    sent = self._sent(stage, stage - 1, end, cost.send_back_seconds)
                    self._arrived_at[stage - 1, "gradients", micro_batch] = sent

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
        arrival = self._link_free[link] = begin + seconds
        self._messages.add(link, begin, arrival)
        return arrival


# The use of a value: a stage, its purpose, and a micro-batch.
_Use = tuple[int, str, int]
# A value: the first of the stages that share it, the micro-batch, and its storage.
_Value = tuple[int, int, int | str]


class _RankMemory:
    """The bytes that one rank has allocated as it works through its actions.

    Each value is counted only once, for as long as anything on this rank uses it.
    """

    def __init__(
        self, order: Order, stages: Sequence[StageCost], *, is_by_host: bool = False
    ) -> None:
        self._stages, self._is_by_host = stages, is_by_host
        self._rank_of = order.rank_of
        self._holds_sends = order.holds_sends
        self._nbytes = 0
        self._with_gradients: set[int] = set()
        self._values_of: dict[_Use, Mapping[_Value, int]] = {}
        self._uses_of: Counter[_Value] = Counter()

    def during(self, action: Action, awaited: Sequence[Action] = ()) -> int:
        """Return the bytes while this action runs, and free its inputs afterwards."""
        stage, work, micro_batch = action.stage, action.work, action.micro_batch
        cost = self._stages[stage]
        self._use(_reads(action), action, self._read(action))
        is_first = work in GIVE_GRADIENTS and stage not in self._with_gradients
        working = cost.first_bytes if is_first else cost.working_bytes
        coming = () if self._is_by_host else awaited
        receive_bytes = sum(sum(self._read(each).values()) for each in coming)
        nbytes_during = self._nbytes + working.get(work, 0) + receive_bytes
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
            self._pass_on(action)
        self._release(_reads(action))
        match work:
            case ActionKind.BACKWARD | ActionKind.BACK_TO_INPUTS:
                self._release(kept)
            case ActionKind.BACK_TO_WEIGHTS:
                self._release(between)
        return nbytes_during

    def _read(self, action: Action) -> Values:
        """Return the values that this action reads from another stage."""
        cost = self._stages[action.stage]
        match action.work:
            case ActionKind.FORWARD:
                return cost.receives
            case ActionKind.BACKWARD | ActionKind.BACK_TO_INPUTS:
                return cost.receives_back
        return {}

    def _pass_on(self, action: Action) -> None:
        """Pass the results of an action on to the next stage.

        If the next stage is on this rank, it frees them after use. Results sent to another rank
        stay allocated until the step ends, or (1F1B) until the next send in the same direction,
        except for the very first send.
        """
        cost, step = self._stages[action.stage], 1 if action.work is ActionKind.FORWARD else -1
        to = replace(action, stage=action.stage + step)
        if to.stage not in self._rank_of:
            return
        if self._rank_of[to.stage] == self._rank_of[action.stage]:
            self._use(_reads(to), to, self._read(to))
            return
        if self._is_by_host:
            return
        direction = action.stage, f"sent {step}"
        is_first_of_all = step == 1 and (*direction, 0) not in self._values_of
        place = action.micro_batch if self._holds_sends else int(not is_first_of_all)
        self._release((*direction, place))
        self._use((*direction, place), action, cost.sends if step == 1 else cost.sends_back)

    def _use(self, use: _Use, action: Action, values: Values) -> None:
        if use in self._values_of:
            return
        # Consecutive stages on one rank share their values.
        first = action.stage
        while self._rank_of.get(first - 1) == self._rank_of[first]:
            first -= 1
        used = {(first, action.micro_batch, key): nbytes for key, nbytes in values.items()}
        self._nbytes += sum(n for value, n in used.items() if not self._uses_of[value])
        self._uses_of.update(used.keys())
        self._values_of[use] = used

    def _release(self, use: _Use) -> None:
        used = self._values_of.pop(use, {})
        self._uses_of.subtract(used.keys())
        self._nbytes -= sum(n for value, n in used.items() if not self._uses_of[value])


def _reads(action: Action) -> _Use:
    work = "reads" if action.work is ActionKind.FORWARD else "reads back"
    return action.stage, work, action.micro_batch
