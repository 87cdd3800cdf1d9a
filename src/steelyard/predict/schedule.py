"""Replay a pipeline's table of actions: when each begins and ends, and what each rank holds then.

The table is torch's own, so that no formula of a schedule is needed. Not for choosing one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from steelyard.core.schedule import Action, Order, Work

GIVE_GRADIENTS = (Work.BACKWARD, Work.BACK_TO_WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What a stage keeps and the one before it keeps, too; whether each does for the second part of
    its backward pass."""

    nbytes: int
    for_weights: bool
    for_weights_before: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One micro-batch in one stage. A backward pass in two parts need not take what the whole does.

    ``send_seconds`` and ``send_bytes`` are of its activations to the next stage, ``send_back_...``
    of gradients to the one before; of these bytes, ``send_kept_bytes`` and ``send_back_kept_bytes``
    are among those that stay for a later pass, and ``send_kept_on_bytes`` of the former until the
    second part of the backward pass. ``kept_bytes`` stay from the forward pass to the
    backward, ``kept_between_bytes`` between the latter's two parts, of which ``kept_on_bytes`` are
    among those kept before; ``working_bytes`` are there besides while it works, and
    ``gradient_bytes`` from the first gradients on: these stay where they were made, which is among
    ``first_bytes``, in place of ``working_bytes`` that once. ``common`` is among ``kept_bytes``,
    and there once where both stages lie on one rank.
    """

    seconds: dict[Work, float]
    send_seconds: float = 0.0
    send_back_seconds: float = 0.0
    send_bytes: int = 0
    send_back_bytes: int = 0
    send_kept_bytes: int = 0
    send_kept_on_bytes: int = 0
    send_back_kept_bytes: int = 0
    kept_bytes: int = 0
    kept_between_bytes: int = 0
    kept_on_bytes: int = 0
    working_bytes: dict[Work, int] = field(default_factory=dict)
    first_bytes: dict[Work, int] = field(default_factory=dict)
    gradient_bytes: int = 0
    common: tuple[Common, ...] = ()


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


def replay(order: Order, stages: Sequence[StageCost]) -> Replay:
    """Every rank takes up its next action when it is done with the last and what it reads has come;
    between two ranks one message goes after another."""
    ends = _Ends(order, stages)
    pending = [list(actions) for actions in order.ranks]
    done: list[list[Replayed]] = [[] for _ in order.ranks]
    held = [_Held(order, stages) for _ in order.ranks]
    while any(pending):
        ready = [rank for rank, actions in enumerate(pending) if actions and ends.has(actions[0])]
        assert ready, f"the table never gets to {[str(a[0]) for a in pending if a]}"
        for rank in ready:
            action = pending[rank].pop(0)
            free = done[rank][-1].end_seconds if done[rank] else 0.0
            begin = max(free, ends.arrived(action))
            awaited = order.awaited[rank][len(done[rank])] if order.awaited else ()
            end = begin + stages[action.stage].seconds[action.work]
            ends.put(action, end)
            done[rank].append(
                Replayed(
                    action=action,
                    rank=rank,
                    begin_seconds=begin,
                    end_seconds=end,
                    held_bytes=held[rank].during(action, awaited),
                )
            )
    return Replay(ranks=tuple(map(tuple, done)))


_Key = tuple[int, str, int]


class _Ends:
    """When what an action makes has come to who reads it."""

    def __init__(self, order: Order, stages: Sequence[StageCost]) -> None:
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
            case Work.FORWARD:
                self._there[stage, "kept", micro_batch] = end
                if stage < self._last:
                    sent = self._sent(stage, stage + 1, end, cost.send_seconds)
                    self._there[stage + 1, "activations", micro_batch] = sent
            case Work.BACKWARD | Work.BACK_TO_INPUTS:
                self._there[stage, "between", micro_batch] = end
                if stage > 0:
                    sent = self._sent(stage, stage - 1, end, cost.send_back_seconds)
                    self._there[stage - 1, "gradients", micro_batch] = sent

    def _reads(self, action: Action) -> list[_Key]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.work is Work.FORWARD:
            return [(stage, "activations", micro_batch)] if stage > 0 else []
        if action.work is Work.BACK_TO_WEIGHTS:
            return [(stage, "between", micro_batch)]
        gradients: list[_Key] = [(stage, "gradients", micro_batch)] if stage < self._last else []
        return [(stage, "kept", micro_batch), *gradients]

    def _sent(self, source: int, target: int, end: float, seconds: float) -> float:
        link = self._rank_of[source], self._rank_of[target]
        if link[0] == link[1]:
            return end
        there = max(end, self._link_free.get(link, 0.0)) + seconds
        self._link_free[link] = there
        return there


class _Held:
    """The bytes that one rank holds as it goes through its actions."""

    def __init__(self, order: Order, stages: Sequence[StageCost]) -> None:
        self._stages = stages
        self._rank_of = order.rank_of
        self._holds_sends = order.holds_sends
        self._nbytes = 0
        self._with_gradients: set[int] = set()
        self._on_its_way: dict[tuple[int, bool], int] = {}
        self._let_go: set[tuple[int, int, int]] = set()

    def during(self, action: Action, awaited: Sequence[Action] = ()) -> int:
        """While this action works; what it reads is let go of when it is done."""
        cost, work = self._stages[action.stage], action.work
        is_first = work in GIVE_GRADIENTS and action.stage not in self._with_gradients
        self._nbytes += {
            Work.FORWARD: cost.kept_bytes - self._there_already(action.stage),
            Work.BACK_TO_INPUTS: cost.kept_between_bytes - cost.kept_on_bytes,
        }.get(work, 0)
        working = cost.first_bytes if is_first else cost.working_bytes
        meanwhile = self._nbytes + working.get(work, 0) + sum(map(self._room_of, awaited))
        if is_first:
            self._with_gradients.add(action.stage)
            self._nbytes += cost.gradient_bytes
        self._nbytes -= {
            Work.BACKWARD: cost.kept_bytes,
            Work.BACK_TO_INPUTS: cost.kept_bytes - cost.kept_on_bytes,
            Work.BACK_TO_WEIGHTS: cost.kept_between_bytes,
        }.get(work, 0)
        self._nbytes += self._still_on_its_way(action) + self._still_in_common(action)
        if sent := self._sent_bytes(action):
            self._nbytes += sent
            key = action.stage, work is Work.FORWARD
            if not self._holds_sends:
                # What was sent the same way before is let go of, but for one from before the first
                # backward pass.
                self._nbytes -= self._on_its_way.get(key, 0)
            is_before_all = work is Work.FORWARD and key not in self._on_its_way
            self._on_its_way[key] = 0 if is_before_all else sent
        return meanwhile

    def _room_of(self, awaited: Action) -> int:
        """For the message that this action waits for."""
        if awaited.work is Work.FORWARD:
            return self._stages[awaited.stage - 1].send_bytes
        return self._stages[awaited.stage + 1].send_back_bytes

    def _sent_bytes(self, action: Action) -> int:
        """What it sends to another rank and does not keep for itself anyway."""
        cost = self._stages[action.stage]
        match action.work:
            case Work.FORWARD if self._crosses(action.stage, 1):
                return cost.send_bytes - cost.send_kept_bytes
            case Work.BACKWARD | Work.BACK_TO_INPUTS if self._crosses(action.stage, -1):
                # A whole backward pass keeps nothing.
                kept = cost.send_back_kept_bytes if action.work is Work.BACK_TO_INPUTS else 0
                return cost.send_back_bytes - kept
        return 0

    def _still_on_its_way(self, action: Action) -> int:
        """What this rank no longer needs, and its sends still hold: until the step ends, or (1F1B)
        till others go the same way, as by then they have, but for the first."""
        cost, found = self._stages[action.stage], 0
        if self._crosses(action.stage, 1) and (self._holds_sends or action.micro_batch == 0):
            found += {
                Work.BACKWARD: cost.send_kept_bytes,
                Work.BACK_TO_INPUTS: cost.send_kept_bytes - cost.send_kept_on_bytes,
                Work.BACK_TO_WEIGHTS: cost.send_kept_on_bytes,
            }.get(action.work, 0)
        if self._crosses(action.stage, -1) and self._holds_sends:
            found += {Work.BACK_TO_WEIGHTS: cost.send_back_kept_bytes}.get(action.work, 0)
        return found

    def _there_already(self, stage: int) -> int:
        if stage == 0 or self._crosses(stage, -1):
            return 0
        return sum(each.nbytes for each in self._stages[stage].common)

    def _still_in_common(self, action: Action) -> int:
        """What this stage lets go of, and its neighbour on this rank does not yet."""
        found = 0
        for stage, is_before in ((action.stage, False), (action.stage + 1, True)):
            if not 0 < stage < len(self._stages) or self._crosses(stage, -1):
                continue
            for place, each in enumerate(self._stages[stage].common):
                later = each.for_weights_before if is_before else each.for_weights
                last = Work.BACK_TO_WEIGHTS if later else Work.BACK_TO_INPUTS
                key = stage, action.micro_batch, place
                if action.work in (Work.BACKWARD, last) and key not in self._let_go:
                    self._let_go.add(key)
                    found += each.nbytes
        return found

    def _crosses(self, stage: int, step: int) -> bool:
        here = self._rank_of[stage]
        return self._rank_of.get(stage + step, here) != here
