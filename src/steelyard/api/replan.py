"""Whether a run still sends its gradients the fastest way, over the links that there are by now.

Steps that take another time than was predicted, three in a row, are looked at: the link is measured
in some tenths of a second, and where it has become another, one rank weighs the ways to go on, in a
process beside the run where there can be one. What it finds all ranks turn to, and it is a plan
file. Not for which ways there are: see search/ranks/retune.py; nor for when to look: pace.py.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from steelyard.api.background import BackgroundProcess
from steelyard.api.step import Step
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, PlanFileError
from steelyard.hardware.link import Link
from steelyard.ir.gradient_codec import CODE_TRADES, Codec, codec_of
from steelyard.ir.metrics import Estimate
from steelyard.ir.parallel_layout import DATA, ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.measure.device_memory import free_bytes
from steelyard.measure.links.worker import measured_now, rates_now
from steelyard.planner.compiled import compiled_limit
from steelyard.planner.gradient_compression import (
    available_codecs,
    compile_codecs,
    peak_in_less_lossy_codecs,
)
from steelyard.planner.lossy import LossyPlanner
from steelyard.planner.session import PlanningSession
from steelyard.plans.plan import Plan, Prediction
from steelyard.plans.plan_file import decode_decisions, encode_decisions
from steelyard.plans.prediction_file import explanation_path, write_plan
from steelyard.predict import predict
from steelyard.run.launch.environment import who_am_i
from steelyard.safe_files import write_where_other
from steelyard.search.ranks.pace import Pace
from steelyard.search.ranks.retune import (
    LEAST_GAIN,
    Alternative,
    alternatives,
    at_once,
    best_hosts,
    compressed_alternatives,
    link_among,
    numbers_of_hosts,
    on_fewer,
    same_on_fewer,
    why_no_alternative,
    worth_trying,
)
from steelyard.units import format_seconds

# Flags that ranks raise: steps that are worth a look, and an answer that is there.
_TO_LOOK, _ANSWERED = 1, 2
# What a message and a larger one take is another where it differs by so much.
_OTHER, _MESSAGE_BYTES = 1.25, 1 << 20
# Steps of another plan that are not looked at: in the first of them programs are bound anew.
_FIRST_STEPS = 2
# A link that steps do not use is measured again after so many steps that measuring takes this share
# of their time.
_UNSEEN, _MOST_UNSEEN, _LOOKING_SHARE = 10, 1600, 0.02
# Codes are probed on the weights of a host that stands by for at most so many steps.
_RECENT_STEPS = 100
# So many ways are lowered in a look, while all ranks wait.
_LOWERED = 3
# Of the memory that is free, what a step on fewer ranks may take more than the one that runs.
_SHARE_OF_FREE_MEMORY = 0.5

# Between what is told to other ranks, and before why there is nothing to tell.
_SIDE, _FAILED = "\0", "\1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkState:
    """What joins the ranks by now; ``rates`` are those between the first host and each other one,
    where there are several others."""

    link: Link
    rates: tuple[float, ...] = ()


class Replanner:
    """All ranks do the same: what the first one finds is told to the others."""

    def __init__(
        self, step: Step, session: PlanningSession, path: Path, tell: Callable[[str], None]
    ) -> None:
        rules = step.plan.decisions.rules
        if reason := why_no_alternative(rules):
            raise BadInput(
                f"how gradients are sent cannot change while this plan runs: {reason}",
                expected="a plan in which ranks share the batch, and each has the whole model",
                remedy="leave out --adapt",
            )
        self._step, self._look, self._path, self._tell = step, session, path, tell
        self._together = step.ranks.coordinator
        self._lossy = LossyPlanner(session=session)
        self._whole, self._first_drift = (
            step.plan.decisions,
            step.plan.predicted.metrics.accuracy_loss,
        )
        self._home, self._num_ranks = step.ranks.home, ParallelLayout.of(rules).num_ranks
        self._hosts = self._whole.target.hosts_of(self._num_ranks)
        self._is_compiled = session.request.runner == "inductor"
        self._members = tuple(range(self._num_ranks))
        self._rank, self._weigher = step.ranks.rank, 0
        self._as_run: dict[tuple[Rule, ...], Program] = {}
        self.written: Path | None = None
        self._waited = step.traffic().waited
        link = session.prices.costs.links[DATA]
        rates = rates_now(hosts=self._hosts) if self._hosts > 2 else ()
        self._seen = _LinkState(link=link, rates=rates)
        self._looked: tuple[PlanningSession, _LinkState] | None = None
        # Bytes on the device that has least of them, when links were measured.
        self._free = 0
        # After which step a host left, the last time that one did.
        self._left_at = 0
        self._gave_up_codes = False
        self._beside: BackgroundProcess | None = None
        self._answer: str | None = None
        self._unseen, self._next_unseen = 0, _UNSEEN
        self._pace = self._pace_of(step.plan, skips=1)
        if self._is_background:
            self._prepare()

    @property
    def _each(self) -> int:
        """Ranks of each host."""
        return self._num_ranks // self._hosts

    @property
    def _is_background(self) -> bool:
        """Whether ways are weighed in a process of its own; a compiler has threads that do not come
        along, and CUDA does not survive it."""
        return self._home == CPU and not self._is_compiled

    @cached_property
    def _coded(self) -> tuple[tuple[Rule, ...], ...]:
        """The rules of the fastest step in each gradient code, over the link that the plan was made
        for. Other links use the same rules, because no further operators are measured in a run."""
        codecs = self._codecs(self._look)
        return compressed_alternatives(self._look.layouts, self._whole.rules, codecs)

    def _prepare(self) -> None:
        """What ways there are is captured and measured before the first step, so that later on only
        links are other ones. Every rank has the codes compiled."""
        compile_codecs(self._codecs(self._look), num_ranks=self._num_ranks)
        if self._rank == 0 or (self._step.can_stand_by and self._rank % self._each == 0):
            self._priced(self._look, self._whole.rules)
            for _ in self._choices(self._look, self._seen):
                pass

    def after(self, number: int, seconds: float | None) -> bool:
        """Behind each step, which all take; whether the plan is another one from here on."""
        traffic = self._step.traffic().waited
        waited, self._waited = traffic - self._waited, traffic
        flagged = self._together.flagged
        self._gave_up_codes |= self._step.gave_up_codes
        if flagged == _ANSWERED:
            return self._answered(number)
        self._note_pace(seconds, waited)
        if flagged == _TO_LOOK:
            return self._look_at_links(number)
        if self._is_time_to_look():
            return self._look_at_links(number, is_to_be_sure=True)
        if self._beside is not None and self._beside.is_done():
            self._together.flag(_ANSWERED)
        # What was exchanged in here is no part of a step.
        self._waited = self._step.traffic().waited
        return False

    def close(self) -> None:
        """Ends what goes on beside the run."""
        if self._beside is not None:
            self._beside.end()
            self._beside = None

    def _note_pace(self, seconds: float | None, waited: float) -> None:
        is_counted = seconds is not None and self._step.is_as_planned
        if seconds is not None and is_counted and self._pace.add(seconds, waited):
            self._together.flag(_TO_LOOK)

    def _is_time_to_look(self) -> bool:
        """Where a step exchanges nothing with some ranks, nothing is seen of their link in it."""
        if self._members == tuple(range(self._num_ranks)):
            return False
        self._unseen += 1
        return self._unseen >= self._next_unseen

    def _look_at_links(self, number: int, *, is_to_be_sure: bool = False) -> bool:
        """Measure the links on all ranks. If they have changed, switch at once to a known plan that
        is faster, and let one rank start to weigh all plans. Returns True if the plan was switched.

        ``is_to_be_sure`` measures a change twice, because no slow step confirms it.
        """
        self._unseen = 0
        seen = self._links_now()
        before = self._seen if self._looked is None else self._looked[1]
        if is_to_be_sure and self._is_other(seen, before):
            seen = self._links_now()
        if not self._is_other(seen, before):
            self._pace.settle()
            return False
        self.close()  # what is weighed is over links that are others by now
        session = self._look.over(seen.link)
        self._looked = session, seen
        self._free = min(self._together.each(free_bytes(self._home)))
        has_turned = self._is_background and self._has_turned_at_once(number, session, seen)
        self._weigher = self._least_busy(number)
        if self._rank != self._weigher:
            return has_turned
        rules = self._step.plan.decisions.rules

        def work() -> str:
            return self._found(session.settled() if self._is_background else session, seen, rules)

        if self._is_background:
            self._beside = BackgroundProcess(work)
        else:
            self._answer = work()
            self._together.flag(_ANSWERED)
        return has_turned

    def _least_busy(self, number: int) -> int:
        """Return the first rank of the first host that stands by, whose cores are idle.

        Rank 0 instead if no host stands by, if plans are weighed between two steps, or if the host
        left long ago: codes are probed on that rank's weights, which are no longer updated.
        """
        idle = (r for r in range(0, self._num_ranks, self._each) if r not in self._members)
        is_recent = number - self._left_at <= _RECENT_STEPS
        return next(idle, 0) if self._is_background and is_recent else 0

    def _has_turned_at_once(self, number: int, session: PlanningSession, seen: _LinkState) -> bool:
        """To the plan as it is on fewer hosts, or to the one that the run began with, which take a
        moment to price. Other codes have to be probed first, and meanwhile the run neither waits
        for a slow link nor leaves a restored one unused."""
        text = ""
        if self._together.saves and self._step.can_stand_by:
            quick = session.settled()
            rules, most = self._step.plan.decisions.rules, self._whole.budget.memory_bytes
            choices = [
                Alternative(way=same_on_fewer(among.layouts, rules, len(ranks)), ranks=ranks)
                for ranks, among in self._fewer(quick, seen)
                if len(ranks) < len(self._members)
            ]
            if len(self._members) < self._num_ranks and not self._gave_up_codes:
                first = quick.layouts.ways.counted(at_once(self._whole.rules))
                choices.append(Alternative(way=first, ranks=tuple(range(self._num_ranks))))
            better = self._worth_trying(quick, seen, rules, choices, most or math.inf)
            if better:
                drift = self._first_drift if better[0].is_lossy else ""
                text = self._written(better[0], drift=drift)
        text = self._together.words(text)
        if text:
            self._turn_by(number, session, text)
        return bool(text)

    def _written(self, choice: Alternative, *, drift: str) -> str:
        """For all ranks: the drift that a probe saw, who takes part, and the rules."""
        written = encode_decisions(replace(self._whole, rules=choice.way.rules, used_ranks=()))
        return _SIDE.join((drift, json.dumps(choice.ranks), written))

    def _turn_by(self, number: int, session: PlanningSession, text: str) -> None:
        drift, members, written = text.split(_SIDE)
        ranks = tuple(map(int, json.loads(members)))
        self._turn(number, session, decode_decisions(written).rules, ranks, drift)

    def _links_now(self) -> _LinkState:
        begin = time.perf_counter()
        link = measured_now(self._seen.link, hosts=self._hosts, home=self._home)
        # Of two hosts the one link is known by now.
        rates = rates_now(hosts=self._hosts) if self._hosts > 2 else ()
        took = time.perf_counter() - begin
        steps = self._together.most(math.ceil(took / (_LOOKING_SHARE * self._pace.seconds.value)))
        self._next_unseen = min(max(steps, _UNSEEN), _MOST_UNSEEN)
        return _LinkState(link=link, rates=rates)

    @staticmethod
    def _is_other(one: _LinkState, other: _LinkState) -> bool:
        """Whether exchanges take another time by enough; the same on all ranks."""
        took = tuple(seen.link.seconds(_MESSAGE_BYTES, messages=2) for seen in (one, other))
        pairs = [took, *zip(one.rates, other.rates, strict=True)]
        return any(max(pair) > _OTHER * min(pair) for pair in pairs)

    def _answered(self, number: int) -> bool:
        """Switch all ranks to the plan that was found, if the links are still the same."""
        assert self._looked is not None
        session, then = self._looked
        said = self._said() if self._rank == self._weigher else ""
        text = self._together.words(said, of=self._weigher)
        if text.startswith(_FAILED):
            self._tell(f"how to go on was not found: {text.removeprefix(_FAILED)}")
            text = ""
        if not text:
            self._look, self._seen, self._looked = session, then, None
            self._pace.settle()
            return False
        if self._is_other(self._links_now(), then):
            self._looked = None
            return self._look_at_links(number)
        self._turn_by(number, session, text)
        self._looked = None
        return True

    def _said(self) -> str:
        """The answer, in words for all; empty where there is nothing better. What begins with
        ``_FAILED`` is why there is none."""
        answer, self._answer = self._answer, None
        if self._beside is not None:
            answer = self._beside.answer
            if self._beside.failure:
                answer = f"{_FAILED}{self._beside.failure}"
            self._beside = None
        return answer or ""

    def _found(self, session: PlanningSession, seen: _LinkState, rules: tuple[Rule, ...]) -> str:
        """The drift that a probe saw of what is to take the plan's place, who takes part, and its
        rules as a plan file; empty where nothing is worth it."""
        budget, most = self._whole.budget, math.inf
        if budget.memory_bytes is not None:
            most = budget.memory_bytes
            if self._is_compiled:
                most = compiled_limit(session, budget.memory_bytes)
        for choice in self._better(session, seen, rules, most):
            drift = self._drift(session, choice.way.rules, budget.accuracy_loss, most)
            if drift is not None:
                return self._written(choice, drift=drift)
        return ""

    def _better(
        self, session: PlanningSession, seen: _LinkState, rules: tuple[Rule, ...], most_bytes: float
    ) -> Iterator[Alternative]:
        """By enough. A compiled step computes for less time than what was captured, so that more is
        gained of it; what it takes only its own prices tell, and each is a lowering."""
        choices = [*self._choices(session, seen)]
        if not self._is_compiled:
            yield from self._worth_trying(session, seen, rules, choices, most_bytes)
            return
        ways = sorted(choices, key=lambda c: (c.way.seconds, c.way.nbytes))[:_LOWERED]
        seconds = self._priced(session, rules).metrics.step_seconds.value
        for choice in ways:
            predicted = self._priced(session, choice.way.rules)
            is_enough = seconds >= (1 + LEAST_GAIN) * predicted.metrics.step_seconds.value
            if is_enough and predicted.peak.nbytes <= most_bytes:
                yield choice

    def _worth_trying(
        self,
        session: PlanningSession,
        seen: _LinkState,
        rules: tuple[Rule, ...],
        choices: Sequence[Alternative],
        most_bytes: float,
    ) -> list[Alternative]:
        now = self._priced(self._among(session, seen, self._members), rules)
        return worth_trying(
            now.metrics.step_seconds.value,
            [choice for choice in choices if self._is_possible(session, choice, now)],
            most_bytes=most_bytes,
            coming_back_seconds=self._step.state_bytes / seen.link.bytes_per_second,
            num_ranks=len(self._members),
        )

    def _choices(self, session: PlanningSession, seen: _LinkState) -> Iterator[Alternative]:
        whole = tuple(range(self._num_ranks))
        for way in alternatives(session.layouts, self._whole.rules, self._coded):
            yield Alternative(way=way, ranks=whole)
        if self._is_compiled or not self._step.can_stand_by:
            return
        for ranks, among in self._fewer(session, seen):
            for way in on_fewer(among.layouts, self._whole.rules, len(ranks)):
                yield Alternative(way=way, ranks=ranks)

    def _fewer(
        self, session: PlanningSession, seen: _LinkState
    ) -> Iterator[tuple[tuple[int, ...], PlanningSession]]:
        """The ranks of fewer hosts, the best-joined, over the links among them."""
        each, degrees = self._each, session.source.sharers()
        are_unequal = bool(ParallelLayout.of(self._whole.rules).shares)
        for count in numbers_of_hosts(self._hosts):
            members = best_hosts(self._rates(seen), count)
            ranks = tuple(host * each + n for host in members for n in range(each))
            if len(ranks) in degrees and not (are_unequal and len(ranks) > 1):
                yield ranks, self._among(session, seen, ranks)

    def _rates(self, seen: _LinkState) -> tuple[float, ...]:
        return seen.rates or (seen.link.bytes_per_second,) * (self._hosts - 1)

    def _among(
        self, session: PlanningSession, seen: _LinkState, ranks: Sequence[int]
    ) -> PlanningSession:
        """Over the links that these ranks have among them."""
        if len(ranks) == self._num_ranks or not seen.rates:
            return session
        each = self._each
        return session.over(link_among(seen.link, seen.rates, sorted({r // each for r in ranks})))

    def _is_possible(self, session: PlanningSession, choice: Alternative, now: Prediction) -> bool:
        """Whether all of it was measured, and the memory is there for it."""
        if not session.prices.has_costs(session.layouts.ways.apply_rules(choice.way.rules).graph):
            return False
        if len(choice.ranks) >= len(self._members):
            return True
        more = choice.way.nbytes - now.peak.nbytes
        return more <= _SHARE_OF_FREE_MEMORY * self._free

    def _codecs(self, session: PlanningSession) -> Sequence[Codec]:
        return available_codecs(session) if self._whole.budget.accuracy_loss else []

    def _priced(self, session: PlanningSession, rules: tuple[Rule, ...]) -> Prediction:
        """What the runner makes of a program is the same over every link."""
        if rules not in self._as_run:
            self._as_run[rules] = session.as_executed(session.apply_rules(rules))
        return predict(self._as_run[rules], session.costs)

    def _drift(
        self, session: PlanningSession, rules: tuple[Rule, ...], allowed: float, most_bytes: float
    ) -> str | None:
        """None where it is more than is allowed, or unknown, or where steps in milder codes or
        none do not fit; nothing is said of what is exact."""
        program = session.apply_rules(rules)
        if not program.is_lossy:
            return ""
        is_bound = most_bytes < math.inf
        if is_bound and peak_in_less_lossy_codecs(session, rules, program) > most_bytes:
            return None
        if self._lossy.session is not session:
            self._lossy = LossyPlanner(session=session)
        seen = self._lossy.drift_of(rules, program, allowed)
        return None if isinstance(seen, str) or not seen.keeps(allowed) else str(seen)

    def _pace_of(self, plan: Plan, *, skips: int) -> Pace:
        metrics = plan.predicted.metrics
        said = (
            metrics.step_seconds.value, metrics.step_seconds.low, metrics.step_seconds.high,
            metrics.exposed_communication_seconds.value,
        )  # fmt: skip
        # Each rank priced it for itself; one expectation is all ranks'.
        value, low, high, waits = json.loads(self._together.words(json.dumps(said)))
        return Pace(seconds=Estimate(value=value, low=low, high=high), waits=waits, skips=skips)

    def _turn(
        self,
        number: int,
        session: PlanningSession,
        rules: tuple[Rule, ...],
        ranks: tuple[int, ...],
        drift: str,
    ) -> None:
        before, members = self._seen, self._members
        assert self._looked is not None
        seen = self._looked[1]
        own = session if self._is_compiled else session.settled()
        was = self._priced(self._among(own, seen, members), self._step.plan.decisions.rules)
        predicted = self._priced(self._among(own, seen, ranks), rules)
        if drift:
            predicted = replace(predicted, metrics=replace(predicted.metrics, accuracy_loss=drift))
        if not set(members) <= set(ranks):
            self._left_at = number
        used = tuple(self._whole.ranks_used(self._num_ranks)[rank] for rank in ranks)
        used = () if used == tuple(range(len(used))) else used
        plan = replace(
            self._step.plan, decisions=replace(self._whole, rules=rules, used_ranks=used),
            predicted=predicted, taken=(), refused=(), num_offers=0,
        )  # fmt: skip
        self._step.turn_to(plan, ranks)
        self._look, self._seen, self._members = session, seen, ranks
        self._pace = self._pace_of(plan, skips=_FIRST_STEPS)
        self._unseen = 0
        name = self._path.name.removesuffix(".toml").removesuffix(".plan")
        path = self._path.with_name(f"{name.partition('.adapted-')[0]}.adapted-{number}.plan.toml")
        self.written = path
        self._write(path, plan)
        self._tell(
            f"after step {number} gradients go otherwise: {self._changed(before, seen)}; "
            f"{self._going_on(rules, ranks, members)}, "
            f"~{format_seconds(predicted.metrics.step_seconds.value)} a step in place of "
            f"~{format_seconds(was.metrics.step_seconds.value)}; written: {path.name}"
        )

    def _changed(self, before: _LinkState, now: _LinkState) -> str:
        """Name the link that has changed since the last switch, and its old and new rate."""
        if not self._is_other(now, before):
            return "other plans were compared over the present links"
        whose, rate, then = "the link between ranks", now.link, before.link
        pair = rate.bytes_per_second, then.bytes_per_second
        if self._hosts > 1:
            pairs = [*zip(self._rates(now), self._rates(before), strict=True)]
            host = max(range(len(pairs)), key=lambda n: abs(math.log(pairs[n][0] / pairs[n][1])))
            whose, pair = f"host {host + 1}'s link", pairs[host]
        if max(pair) <= _OTHER * min(pair):
            took = (format_seconds(link.latency_seconds) for link in (now.link, then))
            return "messages between ranks now take {}, and took {}".format(*took)
        return f"{whose} now carries {_rate(pair[0])}, {_rate(pair[1])} when the plan was made"

    def _going_on(
        self, rules: tuple[Rule, ...], ranks: tuple[int, ...], before: tuple[int, ...]
    ) -> str:
        each = self._each
        hosts = sorted({rank // each for rank in ranks})
        if len(ranks) < self._num_ranks:
            said = f"hosts {', '.join(map(str, hosts))} go on"
            if len(hosts) == 1:
                said = f"host {hosts[0]} goes on alone"
            return f"{said} and the others stand by"
        labels = {codec_of(rule).label for rule in rules if rule.trade in CODE_TRADES}
        coded = " and ".join(sorted(labels)) or "gradients in no code"
        return coded if before == ranks else f"all hosts take part again, {coded}"

    def _write(self, path: Path, plan: Plan) -> None:
        """On each host, for each goes on from a file of its own."""
        files = (path, explanation_path(path))
        if self._together.saves:
            write_plan(path, plan)
        written = [file.read_text("utf-8") for file in files] if self._together.saves else []
        told = self._together.words(_SIDE.join(written))
        lacks = 0
        try:
            if who_am_i(os.environ).local_rank == 0:
                for file, text in zip(files, told.split(_SIDE), strict=True):
                    write_where_other(file, text)
        except PlanFileError:
            lacks = 1  # no reason to stop training
        if self._together.most(lacks):
            self._tell(f"{path.name} cannot be written on one of the hosts: copy it there to go on")


def _rate(bytes_per_second: float) -> str:
    rate = bytes_per_second / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 1000 else f"{rate:.3g} MB/s"


__all__ = ["Replanner"]
