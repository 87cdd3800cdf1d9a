"""The search for a faster plan over changed links, in a run whose ranks share the batch.

Prices each alternative, and probes the accuracy of a lossy one. Not for enumerating alternatives:
see search/ranks/retune.py; nor for switching to one: see replan.py.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from steelyard.api.step import Step
from steelyard.hardware.link import Link
from steelyard.ir.gradient_codec import Codec
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.program import Program
from steelyard.ir.rule import Rule
from steelyard.planner.compiled import compiled_limit
from steelyard.planner.gradient_compression import available_codecs, peak_in_less_lossy_codecs
from steelyard.planner.lossy import LossyPlanner
from steelyard.planner.session import PlanningSession
from steelyard.plans.plan import Prediction
from steelyard.predict import predict
from steelyard.search.ranks.retune import (
    LEAST_GAIN,
    Alternative,
    alternatives,
    best_hosts,
    compressed_alternatives,
    link_among,
    numbers_of_hosts,
    on_fewer,
    worth_trying,
)

# The number of candidates that are lowered in one search, while all ranks wait.
_MAX_LOWERINGS = 3
# A step on fewer ranks may need this share of the free memory in addition to the present step.
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The present link between ranks; ``rates`` are those from the first host to each other host.

    ``rates`` is empty with fewer than three hosts.
    """

    link: Link
    rates: tuple[float, ...] = ()

    def rates_of(self, hosts: int) -> tuple[float, ...]:
        """Return the rates from the first of so many hosts to each other."""
        return self.rates or (self.link.bytes_per_second,) * (hosts - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentRun:
    """The links, rules and ranks of the running step.

    ``free_bytes`` are those of the device with the least free memory.
    """

    links: LinkState
    rules: tuple[Rule, ...]
    ranks: tuple[int, ...]
    free_bytes: int


class ReplanSearch:
    """Compares other ways to send gradients with the running ``step``.

    ``session`` prices the plan that the run began with.
    """

    def __init__(self, step: Step, session: PlanningSession) -> None:
        self._step, self._session = step, session
        self._decisions = step.plan.decisions
        self._num_ranks = ParallelLayout.of(self._decisions.rules).num_ranks
        self._hosts = self._decisions.target.hosts_of(self._num_ranks)
        self._is_compiled = session.request.runner == "inductor"
        self._lossy = LossyPlanner(session=session)
        self._executed_programs: dict[tuple[Rule, ...], Program] = {}

    def prepare(self, links: LinkState) -> None:
        """Capture and measure all alternatives; later only links change."""
        self.predict(self._session, self._decisions.rules)
        for _ in self._alternatives(self._session, links):
            pass

    def best(self, session: PlanningSession, now: PresentRun) -> tuple[Alternative, str] | None:
        """Return a better plan with its probed drift as text; None if none is worth a switch."""
        budget, max_bytes = self._decisions.budget, math.inf
        if budget.memory_bytes is not None:
            max_bytes = budget.memory_bytes
            if self._is_compiled:
                max_bytes = compiled_limit(session, budget.memory_bytes)
        for choice in self._improvements(session, now, max_bytes):
            drift = self._drift(session, choice.candidate.rules, budget.accuracy_loss, max_bytes)
            if drift is not None:
                return choice, drift
        return None

    def _improvements(
        self, session: PlanningSession, now: PresentRun, max_bytes: float
    ) -> Iterator[Alternative]:
        """Yield the alternatives that are sufficiently faster and fit in memory.

        A compiled step computes for less time than the captured one, so it gains more from faster
        communication. Only lowering shows its time, so few candidates are tried.
        """
        choices = [*self._alternatives(session, now.links)]
        if not self._is_compiled:
            yield from self.worth_trying(session, now, choices, max_bytes)
            return
        fastest = sorted(choices, key=lambda c: (c.candidate.seconds, c.candidate.nbytes))[
            :_MAX_LOWERINGS
        ]
        seconds = self.predict(session, now.rules).metrics.step_seconds.value
        for choice in fastest:
            predicted = self.predict(session, choice.candidate.rules)
            is_enough = seconds >= (1 + LEAST_GAIN) * predicted.metrics.step_seconds.value
            if is_enough and predicted.peak.nbytes <= max_bytes:
                yield choice

    def worth_trying(
        self,
        session: PlanningSession,
        now: PresentRun,
        choices: Sequence[Alternative],
        max_bytes: float,
    ) -> list[Alternative]:
        """Return the alternatives that are faster by enough and fit the memory, best first."""
        current = self.predict(self.session_among(session, now.links, now.ranks), now.rules)
        return worth_trying(
            current.metrics.step_seconds.value,
            [choice for choice in choices if self._is_possible(session, choice, now, current)],
            most_bytes=max_bytes,
            coming_back_seconds=self._step.state_bytes / now.links.link.bytes_per_second,
            num_ranks=len(now.ranks),
        )

    def _alternatives(self, session: PlanningSession, links: LinkState) -> Iterator[Alternative]:
        all_ranks = tuple(range(self._num_ranks))
        for candidate in alternatives(
            session.layouts, self._decisions.rules, self._compressed_rules
        ):
            yield Alternative(candidate=candidate, ranks=all_ranks)
        if self._is_compiled or not self._step.supports_standby:
            return
        for ranks, subset in self.on_fewer_hosts(session, links):
            for candidate in on_fewer(subset.layouts, self._decisions.rules, len(ranks)):
                yield Alternative(candidate=candidate, ranks=ranks)

    def on_fewer_hosts(
        self, session: PlanningSession, links: LinkState
    ) -> Iterator[tuple[tuple[int, ...], PlanningSession]]:
        """Yield the best-connected ranks on fewer hosts, with a session over their links."""
        each, degrees = self._num_ranks // self._hosts, session.source.sharers()
        are_unequal = bool(ParallelLayout.of(self._decisions.rules).shares)
        for count in numbers_of_hosts(self._hosts):
            members = best_hosts(links.rates_of(self._hosts), count)
            ranks = tuple(host * each + n for host in members for n in range(each))
            if len(ranks) in degrees and not (are_unequal and len(ranks) > 1):
                yield ranks, self.session_among(session, links, ranks)

    def session_among(
        self, session: PlanningSession, links: LinkState, ranks: Sequence[int]
    ) -> PlanningSession:
        """Return the session with the costs of the links among these ranks."""
        if len(ranks) == self._num_ranks or not links.rates:
            return session
        each = self._num_ranks // self._hosts
        return session.with_link(
            link_among(links.link, links.rates, sorted({r // each for r in ranks}))
        )

    def _is_possible(
        self, session: PlanningSession, choice: Alternative, now: PresentRun, current: Prediction
    ) -> bool:
        """True if all operators of the alternative were measured and there is enough memory for
        it.
        """
        if not session.prices.has_costs(
            session.layouts.candidates.apply_rules(choice.candidate.rules).graph
        ):
            return False
        if len(choice.ranks) >= len(now.ranks):
            return True
        extra_bytes = choice.candidate.nbytes - current.peak.nbytes
        return extra_bytes <= _SHARE_OF_FREE_MEMORY * now.free_bytes

    def codecs(self, session: PlanningSession) -> Sequence[Codec]:
        return available_codecs(session) if self._decisions.budget.accuracy_loss else []

    def predict(self, session: PlanningSession, rules: tuple[Rule, ...]) -> Prediction:
        """Predict the program as executed; the program is cached, as no link changes it."""
        if rules not in self._executed_programs:
            self._executed_programs[rules] = session.as_executed(session.apply_rules(rules))
        return predict(self._executed_programs[rules], session.costs)

    def _drift(
        self, session: PlanningSession, rules: tuple[Rule, ...], allowed: float, max_bytes: float
    ) -> str | None:
        """Return the probed drift as text; empty for an exact plan.

        None if the drift is unknown or too large, or if the less lossy fallback codecs need too
        much memory.
        """
        program = session.apply_rules(rules)
        if not program.is_lossy:
            return ""
        is_bound = max_bytes < math.inf
        if is_bound and peak_in_less_lossy_codecs(session, rules, program) > max_bytes:
            return None
        if self._lossy.session is not session:
            self._lossy = LossyPlanner(session=session)
        drift = self._lossy.probe_drift(rules, program, allowed)
        return None if isinstance(drift, str) or not drift.keeps(allowed) else str(drift)

    @cached_property
    def _compressed_rules(self) -> tuple[tuple[Rule, ...], ...]:
        """The rules of the fastest step with each gradient codec, over the initial link.

        Other links use the same rules, because no further operators are measured in a run.
        """
        codecs = self.codecs(self._session)
        return compressed_alternatives(self._session.layouts, self._decisions.rules, codecs)
