"""Replanning during a run: changes how gradients are sent once the measured links have changed.

Three steps in a row that take another time than predicted trigger a link measurement of some tenths
of a second. If a link has changed, one rank searches for better ways to send gradients, if possible
in a background process. All ranks then switch to the result, which is written as a plan file. Not
for the search: see replan_search.py; nor for the trigger: see search/ranks/pace.py.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from steelyard.api.background import BackgroundProcess
from steelyard.api.replan_search import LinkState, PresentRun, ReplanSearch
from steelyard.api.step import Step
from steelyard.comm.devices import CPU
from steelyard.errors import BadInput, PlanFileError
from steelyard.ir.metrics import Estimate
from steelyard.ir.parallel_layout import DATA, ParallelLayout
from steelyard.ir.rule import Rule, of_kind
from steelyard.ir.rule_kinds import GradientCompression
from steelyard.measure.device_memory import free_bytes
from steelyard.measure.links.current_links import measured_now, rates_now
from steelyard.plan_files.plan_file import decode_decisions, encode_decisions
from steelyard.plan_files.prediction_file import write_plan
from steelyard.planner.gradient_compression import (
    compile_codecs,
)
from steelyard.planner.session import PlanningSession
from steelyard.plans.plan import Plan
from steelyard.plans.plan_on_file import explanation_path
from steelyard.run.launch.environment import rank_info
from steelyard.safe_files import write_where_other
from steelyard.search.ranks.pace import Pace
from steelyard.search.ranks.retune import (
    Alternative,
    at_once,
    same_on_fewer,
    why_no_alternative,
)
from steelyard.units import format_seconds

# Flags that one rank sets for all: steps deviate from the prediction, or the search has ended.
_CHECK_LINKS, _ANSWER_READY = 1, 2
# A link counts as changed if the time of a small and of a larger message differs by this factor.
_CHANGED_RATIO, _MESSAGE_BYTES = 1.25, 1 << 20
# The first steps of a new plan are not checked, because their programs are being bound again.
_SKIPPED_STEPS = 2
# A link that steps do not use is measured every few steps, so that measuring takes at most this
# share of their time.
_MIN_INTERVAL, _MAX_INTERVAL, _MEASURING_SHARE = 10, 1600, 0.02
# A host that stands by probes codecs on its own weights. These may be out of date by at most this
# many steps.
_RECENT_STEPS = 100

# Separator of the parts of a message to other ranks, and prefix of an error in place of a message.
_SEPARATOR, _FAILURE = "\0", "\1"


class Replanner:
    """Adapts the plan of a running step; one instance on each rank, all called together.

    The rank that searches broadcasts its result to the others.
    """

    def __init__(
        self, step: Step, session: PlanningSession, path: Path, on_note: Callable[[str], None]
    ) -> None:
        rules = step.plan.decisions.rules
        if reason := why_no_alternative(rules):
            raise BadInput(
                f"gradient communication cannot be changed while this plan runs: {reason}",
                expected="a plan in which ranks share the batch and each rank holds the whole "
                "model",
                remedy="leave out --adapt",
            )
        self._step, self._session, self._path, self._on_note = step, session, path, on_note
        self._coordinator = step.ranks.coordinator
        self._search = ReplanSearch(step, session)
        self._decisions, self._first_drift = (
            step.plan.decisions,
            step.plan.predicted.metrics.accuracy_loss,
        )
        self._torch_device, self._num_ranks = (
            step.ranks.torch_device,
            ParallelLayout.of(rules).num_ranks,
        )
        self._hosts = self._decisions.target.hosts_of(self._num_ranks)
        self._is_compiled = session.request.runner == "inductor"
        self._members = tuple(range(self._num_ranks))
        self._rank, self._search_rank = step.ranks.rank, 0
        self.written: Path | None = None
        self._waited_seconds = step.traffic_counter.total().waited
        link = session.prices.costs.links[DATA]
        rates = rates_now(hosts=self._hosts) if self._hosts > 2 else ()
        self._links = LinkState(link=link, rates=rates)
        self._pending: tuple[PlanningSession, LinkState] | None = None
        # Free bytes on the device with the least free memory, when links were last measured.
        self._free_bytes = 0
        # The step after which a host last left the run.
        self._left_at = 0
        self._has_fallen_back = False
        self._background: BackgroundProcess | None = None
        self._answer: str | None = None
        self._steps_unmeasured, self._measuring_interval = 0, _MIN_INTERVAL
        self._pace = self._pace_of(step.plan, skips=1)
        if self._is_background:
            self._prepare()

    @property
    def _ranks_per_host(self) -> int:
        """The number of ranks on each host."""
        return self._num_ranks // self._hosts

    @property
    def _is_background(self) -> bool:
        """True if the search runs in a forked process of its own.

        A compiler has threads that a fork does not copy, and CUDA does not survive a fork.
        """
        return self._torch_device == CPU and not self._is_compiled

    def _prepare(self) -> None:
        """Capture and measure all alternatives before the first step; later only links change.

        Every rank compiles the codecs.
        """
        compile_codecs(self._search.codecs(self._session), num_ranks=self._num_ranks)
        if self._rank == 0 or (
            self._step.supports_standby and self._rank % self._ranks_per_host == 0
        ):
            self._search.prepare(self._links)

    def after_step(self, number: int, seconds: float | None) -> bool:
        """Check the pace after each step, on all ranks; return True if the plan was switched."""
        traffic = self._step.traffic_counter.total().waited
        waited, self._waited_seconds = traffic - self._waited_seconds, traffic
        flagged = self._coordinator.flagged
        self._has_fallen_back |= self._step.has_fallen_back
        if flagged == _ANSWER_READY:
            return self._adopt_answer(number)
        self._note_pace(seconds, waited)
        if flagged == _CHECK_LINKS:
            return self._check_links(number)
        if self._is_time_to_measure():
            return self._check_links(number, is_to_be_sure=True)
        if self._background is not None and self._background.is_done():
            self._coordinator.flag(_ANSWER_READY)
        # Messages sent by this method are not part of a step.
        self._waited_seconds = self._step.traffic_counter.total().waited
        return False

    def close(self) -> None:
        """Stop the background search."""
        if self._background is not None:
            self._background.end()
            self._background = None

    def _note_pace(self, seconds: float | None, waited: float) -> None:
        is_counted = seconds is not None and self._step.is_as_planned
        if seconds is not None and is_counted and self._pace.add(seconds, waited):
            self._coordinator.flag(_CHECK_LINKS)

    def _is_time_to_measure(self) -> bool:
        """True if unused links are due to be measured.

        A step that exchanges nothing with some ranks tells nothing about the links to them.
        """
        if self._members == tuple(range(self._num_ranks)):
            return False
        self._steps_unmeasured += 1
        return self._steps_unmeasured >= self._measuring_interval

    def _check_links(self, number: int, *, is_to_be_sure: bool = False) -> bool:
        """Measure the links on all ranks, and react if they have changed.

        If so, switch at once to a known plan that is faster, and let one rank start to search all
        plans. Return True if the plan was switched. With ``is_to_be_sure``, a change is measured
        twice, because no slow step confirms it.
        """
        self._steps_unmeasured = 0
        links = self._measure_links()
        before = self._links if self._pending is None else self._pending[1]
        if is_to_be_sure and self._has_changed(links, before):
            links = self._measure_links()
        if not self._has_changed(links, before):
            self._pace.settle()
            return False
        self.close()  # a search in progress assumes the old links
        session = self._session.with_link(links.link)
        self._pending = session, links
        self._free_bytes = min(self._coordinator.each(free_bytes(self._torch_device)))
        has_turned = self._is_background and self._switch_at_once(number, session, links)
        self._search_rank = self._least_busy(number)
        if self._rank != self._search_rank:
            return has_turned
        now = self._present(links)

        def work() -> str:
            best = self._search.best(
                session.without_measuring() if self._is_background else session, now
            )
            return "" if best is None else self._encode(best[0], drift=best[1])

        if self._is_background:
            self._background = BackgroundProcess(work)
        else:
            self._answer = work()
            self._coordinator.flag(_ANSWER_READY)
        return has_turned

    def _present(self, links: LinkState) -> PresentRun:
        return PresentRun(
            links=links,
            rules=self._step.plan.decisions.rules,
            ranks=self._members,
            free_bytes=self._free_bytes,
        )

    def _least_busy(self, number: int) -> int:
        """Return the first rank of the first host that stands by, whose cores are idle.

        This is rank 0 if no host stands by, if the search runs between two steps, or if the host
        left long ago: codecs are probed on its weights, which are then out of date.
        """
        idle = (
            r for r in range(0, self._num_ranks, self._ranks_per_host) if r not in self._members
        )
        is_recent = number - self._left_at <= _RECENT_STEPS
        return next(idle, 0) if self._is_background and is_recent else 0

    def _switch_at_once(self, number: int, session: PlanningSession, links: LinkState) -> bool:
        """Switch to the same plan on fewer hosts or to the initial plan, if that is faster.

        Pricing both takes only a moment, while other codecs must be probed first. In the meantime,
        the run should neither wait for a slow link nor leave a restored one unused. Return True if
        the plan was switched.
        """
        encoded = ""
        if self._coordinator.saves and self._step.supports_standby:
            unmeasured = session.without_measuring()
            rules, most = self._step.plan.decisions.rules, self._decisions.budget.memory_bytes
            choices = [
                Alternative(candidate=same_on_fewer(subset.layouts, rules, len(ranks)), ranks=ranks)
                for ranks, subset in self._search.on_fewer_hosts(unmeasured, links)
                if len(ranks) < len(self._members)
            ]
            if len(self._members) < self._num_ranks and not self._has_fallen_back:
                first = unmeasured.layouts.candidates.counted(at_once(self._decisions.rules))
                choices.append(Alternative(candidate=first, ranks=tuple(range(self._num_ranks))))
            better = self._search.worth_trying(
                unmeasured, self._present(links), choices, most or math.inf
            )
            if better:
                drift = self._first_drift if better[0].is_lossy else ""
                encoded = self._encode(better[0], drift=drift)
        encoded = self._coordinator.words(encoded)
        if encoded:
            self._switch_to(number, session, encoded)
        return bool(encoded)

    def _encode(self, choice: Alternative, *, drift: str) -> str:
        """Encode a plan for all ranks: the probed drift, the ranks that take part, the rules."""
        decisions = encode_decisions(
            replace(self._decisions, rules=choice.candidate.rules, used_ranks=())
        )
        return _SEPARATOR.join((drift, json.dumps(choice.ranks), decisions))

    def _switch_to(self, number: int, session: PlanningSession, encoded: str) -> None:
        drift, members, decisions = encoded.split(_SEPARATOR)
        ranks = tuple(map(int, json.loads(members)))
        self._switch(number, session, decode_decisions(decisions).rules, ranks, drift)

    def _measure_links(self) -> LinkState:
        begin = time.perf_counter()
        link = measured_now(self._links.link, hosts=self._hosts, torch_device=self._torch_device)
        # With two hosts, their only link has just been measured.
        rates = rates_now(hosts=self._hosts) if self._hosts > 2 else ()
        seconds = time.perf_counter() - begin
        steps = self._coordinator.most(
            math.ceil(seconds / (_MEASURING_SHARE * self._pace.seconds.value))
        )
        self._measuring_interval = min(max(steps, _MIN_INTERVAL), _MAX_INTERVAL)
        return LinkState(link=link, rates=rates)

    @staticmethod
    def _has_changed(one: LinkState, other: LinkState) -> bool:
        """True if message times have changed enough; all ranks get the same answer."""
        seconds = tuple(state.link.seconds(_MESSAGE_BYTES, messages=2) for state in (one, other))
        pairs = [seconds, *zip(one.rates, other.rates, strict=True)]
        return any(max(pair) > _CHANGED_RATIO * min(pair) for pair in pairs)

    def _adopt_answer(self, number: int) -> bool:
        """Switch all ranks to the plan that was found, if the links are still the same."""
        assert self._pending is not None
        session, links = self._pending
        answer = self._take_answer() if self._rank == self._search_rank else ""
        encoded = self._coordinator.words(answer, of=self._search_rank)
        if encoded.startswith(_FAILURE):
            self._on_note(f"the search for a new plan failed: {encoded.removeprefix(_FAILURE)}")
            encoded = ""
        if not encoded:
            self._session, self._links, self._pending = session, links, None
            self._pace.settle()
            return False
        if self._has_changed(self._measure_links(), links):
            self._pending = None
            return self._check_links(number)
        self._switch_to(number, session, encoded)
        self._pending = None
        return True

    def _take_answer(self) -> str:
        """Return the encoded result of the search; empty if it found nothing better.

        A result that begins with the failure prefix is an error message.
        """
        answer, self._answer = self._answer, None
        if self._background is not None:
            answer = self._background.answer
            if self._background.failure:
                answer = f"{_FAILURE}{self._background.failure}"
            self._background = None
        return answer or ""

    def _pace_of(self, plan: Plan, *, skips: int) -> Pace:
        metrics = plan.predicted.metrics
        expected = (
            metrics.step_seconds.value, metrics.step_seconds.low, metrics.step_seconds.high,
            metrics.exposed_communication_seconds.value,
        )  # fmt: skip
        # Each rank made its own prediction; the expected time must be the same on all ranks.
        value, low, high, waiting_seconds = json.loads(
            self._coordinator.words(json.dumps(expected))
        )
        return Pace(
            seconds=Estimate(value=value, low=low, high=high),
            waits=waiting_seconds,
            skips=skips,
        )

    def _switch(
        self,
        number: int,
        session: PlanningSession,
        rules: tuple[Rule, ...],
        ranks: tuple[int, ...],
        drift: str,
    ) -> None:
        old_links, members = self._links, self._members
        assert self._pending is not None
        links = self._pending[1]
        unmeasured = session if self._is_compiled else session.without_measuring()
        old_prediction = self._search.predict(
            self._search.session_among(unmeasured, links, members), self._step.plan.decisions.rules
        )
        predicted = self._search.predict(
            self._search.session_among(unmeasured, links, ranks), rules
        )
        if drift:
            predicted = replace(predicted, metrics=replace(predicted.metrics, accuracy_loss=drift))
        if not set(members) <= set(ranks):
            self._left_at = number
        used = tuple(self._decisions.ranks_used(self._num_ranks)[rank] for rank in ranks)
        used = () if used == tuple(range(len(used))) else used
        plan = replace(
            self._step.plan, decisions=replace(self._decisions, rules=rules, used_ranks=used),
            predicted=predicted, taken=(), refused=(), num_offers=0,
        )  # fmt: skip
        self._step.switch_plan(plan, ranks)
        self._session, self._links, self._members = session, links, ranks
        self._pace = self._pace_of(plan, skips=_SKIPPED_STEPS)
        self._steps_unmeasured = 0
        name = self._path.name.removesuffix(".toml").removesuffix(".plan")
        path = self._path.with_name(f"{name.partition('.adapted-')[0]}.adapted-{number}.plan.toml")
        self.written = path
        self._write(path, plan)
        self._on_note(
            f"after step {number} the plan was switched: {self._change_text(old_links, links)}; "
            f"{self._plan_text(rules, ranks, members)}, "
            f"~{format_seconds(predicted.metrics.step_seconds.value)} a step instead of "
            f"~{format_seconds(old_prediction.metrics.step_seconds.value)}; written: {path.name}"
        )

    def _change_text(self, before: LinkState, now: LinkState) -> str:
        """Describe the link that has changed since the last switch, with its old and new rate."""
        if not self._has_changed(now, before):
            return "plans were compared for the present links"
        link_name, rate, then = "the link between ranks", now.link, before.link
        pair = rate.bytes_per_second, then.bytes_per_second
        if self._hosts > 1:
            pairs = [*zip(now.rates_of(self._hosts), before.rates_of(self._hosts), strict=True)]
            host = max(range(len(pairs)), key=lambda n: abs(math.log(pairs[n][0] / pairs[n][1])))
            link_name, pair = f"host {host + 1}'s link", pairs[host]
        if max(pair) <= _CHANGED_RATIO * min(pair):
            latencies = (format_seconds(link.latency_seconds) for link in (now.link, then))
            return "messages between ranks now take {}; they took {}".format(*latencies)
        return (
            f"{link_name} now carries {_rate(pair[0])}, it carried {_rate(pair[1])} when the plan "
            "was made"
        )

    def _plan_text(
        self, rules: tuple[Rule, ...], ranks: tuple[int, ...], before: tuple[int, ...]
    ) -> str:
        each = self._ranks_per_host
        hosts = sorted({rank // each for rank in ranks})
        if len(ranks) < self._num_ranks:
            text = f"hosts {', '.join(map(str, hosts))} continue"
            if len(hosts) == 1:
                text = f"host {hosts[0]} continues alone"
            return f"{text} and the others wait"
        labels = {rule.codec.label for rule in of_kind(rules, GradientCompression)}
        coded = " and ".join(sorted(labels)) or "gradients not compressed"
        return coded if before == ranks else f"all hosts take part again, {coded}"

    def _write(self, path: Path, plan: Plan) -> None:
        """Write the plan on each host, because each host resumes from its own file."""
        files = (path, explanation_path(path))
        if self._coordinator.saves:
            write_plan(path, plan)
        written = [file.read_text("utf-8") for file in files] if self._coordinator.saves else []
        received = self._coordinator.words(_SEPARATOR.join(written))
        has_failed = 0
        try:
            if rank_info(os.environ).local_rank == 0:
                for file, text in zip(files, received.split(_SEPARATOR), strict=True):
                    write_where_other(file, text)
        except PlanFileError:
            has_failed = 1  # Training goes on without the file.
        if self._coordinator.most(has_failed):
            self._on_note(
                f"{path.name} cannot be written on one of the hosts: copy it there before you "
                "resume"
            )


def _rate(bytes_per_second: float) -> str:
    rate = bytes_per_second / 1e6
    return f"{rate:,.0f} MB/s" if rate >= 1000 else f"{rate:.3g} MB/s"


__all__ = ["Replanner"]
