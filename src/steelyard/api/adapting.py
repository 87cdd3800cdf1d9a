"""Whether a run still sends its gradients the fastest way, over the link that there is by now.

Where ranks wait for another time than was predicted, the link is measured again; and where another
way is faster by enough, twice in a row, it takes the place of the plan's, and is a plan file. Not
for which ways there are: see search/adapting.py.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from steelyard.api.coded import codecs_here, most_in_milder
from steelyard.api.live import Step
from steelyard.api.look import Look
from steelyard.api.lowering import compiled_limit
from steelyard.core.amounts import format_bytes, format_seconds
from steelyard.core.codec import Codec
from steelyard.core.errors import BadInput, PlanFileError
from steelyard.core.explanation import explanation_path, write_plan
from steelyard.core.layout import DATA
from steelyard.core.link import Link
from steelyard.core.plan import Decisions, Plan, Prediction
from steelyard.core.planfile import decode_decisions, encode_decisions
from steelyard.core.program import Program
from steelyard.core.rules import Rule
from steelyard.core.untrusted import write_where_other
from steelyard.measure.exchanges import measured_now
from steelyard.predict import predict
from steelyard.run.ranks.who import who_am_i
from steelyard.search.adapting import otherwise, why_not_otherwise

# Steps from one look to the next; after a look that found nothing, twice as many, and so on.
_EVERY, _MOST_EVERY = 20, 640
# Of a step: what ranks wait longer, or less long, than was predicted.
_OFF = 0.25
# What is not faster by so much, so often in a row, is left alone.
_LEAST_GAIN, _TIMES = 0.10, 2
# So many ways are lowered in a look, while all ranks wait.
_LOWERED = 3

# Between what is told to other ranks.
_SIDE = "\0"


class Adapting:
    """All ranks do the same: what the first one finds is told to the others."""

    def __init__(self, step: Step, look: Look, path: Path, tell: Callable[[str], None]) -> None:
        rules = step.plan.decisions.rules
        if reason := why_not_otherwise(rules):
            raise BadInput(
                f"how gradients are sent cannot change while this plan runs: {reason}",
                expected="a plan in which ranks share the batch, and each has the whole model",
                remedy="leave out --adapt",
            )
        self._step, self._look, self._path, self._tell = step, look, path, tell
        self._together = step.ranks.together
        self._every, self._in_a_row = _EVERY, 0
        self._as_run: dict[tuple[Rule, ...], Program] = {}
        self.written: Path | None = None
        self._window: list[tuple[float, float]] = []
        self._waited = step.traffic().waited

    def after(self, number: int, seconds: float | None) -> bool:
        """Behind each step, which all take; whether the plan is another one from here on."""
        waited = self._step.traffic().waited
        if seconds is not None and self._step.is_as_planned:
            self._window.append((seconds, waited - self._waited))
        self._waited = waited
        if len(self._window) < self._every:
            return False
        took, waits = map(median, zip(*self._window))
        self._window.clear()
        quad = self._step.plan.predicted.quad
        foreseen, step = quad.exposed_communication_seconds.value, quad.step_seconds.value
        off = abs(waits - foreseen) / max(took, step)
        if self._together.most(round(off * 1e6)) < _OFF * 1e6:
            self._in_a_row = 0
            return False
        return self._looked(number)

    def _looked(self, number: int) -> bool:
        before = self._look.prices.costs.links[DATA]
        hosts, home = self._look.request.cluster.hosts, self._step.ranks.home
        link = measured_now(before, hosts=hosts, home=home)
        look = self._look.over(link)
        found = self._better(look) if self._together.saves else None
        text = self._together.words("" if found is None else _SIDE.join(found))
        self._waited = self._step.traffic().waited
        if not text:
            self._in_a_row, self._every = 0, min(2 * self._every, _MOST_EVERY)
            return False
        self._in_a_row += 1
        if self._in_a_row < _TIMES:
            return False
        drift, _, written = text.partition(_SIDE)
        self._turn(number, look, decode_decisions(written), drift, before, link)
        return True

    def _better(self, look: Look) -> tuple[str, str] | None:
        """The drift that a probe saw of what is to take the plan's place, and its file; None where
        nothing is worth it."""
        decisions = self._step.plan.decisions
        budget = decisions.budget
        codecs = codecs_here(look) if budget.accuracy_loss else []
        most = math.inf if budget.memory_bytes is None else budget.memory_bytes
        if look.request.runner == "inductor" and budget.memory_bytes is not None:
            most = compiled_limit(look, budget.memory_bytes)
        for rules in self._faster(look, codecs, most):
            drift = self._drift(look, rules, budget.accuracy_loss, most)
            if drift is not None:
                return drift, encode_decisions(replace(decisions, rules=rules))
        return None

    def _faster(
        self, look: Look, codecs: Sequence[Codec], most_bytes: float
    ) -> Iterator[tuple[Rule, ...]]:
        """By enough. A compiled step computes for less time than what was captured, so that more is
        gained of it; what it takes only its own prices tell, and each is a lowering."""
        rules = self._step.plan.decisions.rules
        if look.request.runner != "inductor":
            now, ways = otherwise(look.layouts, rules, codecs, most_bytes=most_bytes)
            enough = (way for way in ways if now.seconds >= (1 + _LEAST_GAIN) * way.seconds)
            yield from (way.rules for way in enough)
            return
        _, ways = otherwise(look.layouts, rules, codecs, most_bytes=math.inf)
        if not ways:
            return
        seconds = self._priced(look, rules).quad.step_seconds.value
        for way in ways[:_LOWERED]:
            predicted = self._priced(look, way.rules)
            is_enough = seconds >= (1 + _LEAST_GAIN) * predicted.quad.step_seconds.value
            if is_enough and predicted.peak.nbytes <= most_bytes:
                yield way.rules

    def _priced(self, look: Look, rules: tuple[Rule, ...]) -> Prediction:
        """What the runner makes of a program is the same over every link."""
        if rules not in self._as_run:
            self._as_run[rules] = look.as_run(look.struck(rules))
        return predict(self._as_run[rules], look.costs)

    def _drift(
        self, look: Look, rules: tuple[Rule, ...], allowed: float, most_bytes: float
    ) -> str | None:
        """None where it is more than is allowed, or unknown, or where steps in milder codes or
        none do not fit; nothing is said of what is exact."""
        program = look.struck(rules)
        if not program.is_lossy:
            return ""
        is_bound = most_bytes < math.inf
        if is_bound and most_in_milder(look, rules, program) > most_bytes:
            return None
        seen = look.lossy.drift_of(rules, program, allowed)
        return None if isinstance(seen, str) or not seen.keeps(allowed) else str(seen)

    def _turn(
        self,
        number: int,
        look: Look,
        decisions: Decisions,
        drift: str,
        before: Link,
        link: Link,
    ) -> None:
        was = self._priced(look, self._step.plan.decisions.rules).quad.step_seconds.value
        predicted = self._priced(look, decisions.rules)
        if drift:
            predicted = replace(predicted, quad=replace(predicted.quad, accuracy_loss=drift))
        plan = replace(
            self._step.plan, decisions=decisions, predicted=predicted, taken=(), refused=(),
            num_offers=0,
        )  # fmt: skip
        self._step.turn_to(plan)
        self._look, self._every, self._in_a_row = look, _EVERY, 0
        name = self._path.name.removesuffix(".toml").removesuffix(".plan")
        path = self._path.with_name(f"{name.partition('.adapted-')[0]}.adapted-{number}.plan.toml")
        self.written = path
        self._write(path, plan)
        self._tell(
            f"after step {number} gradients go otherwise: the link gives "
            f"{_rate(link.bytes_per_second)}, and {_rate(before.bytes_per_second)} was "
            f"planned for; ~{format_seconds(predicted.quad.step_seconds.value)} a step in place of "
            f"{format_seconds(was)}; written: {path.name}"
        )

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
    return f"{format_bytes(bytes_per_second)}/s"


__all__ = ["Adapting"]
