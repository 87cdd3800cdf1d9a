"""The report of a plan or a receipt as one document tree, which all renderers draw.

It contains figures with their units and the text around them. Not for formatting: see text.py,
html.py and json.py.
"""

from collections import Counter
from dataclasses import dataclass

from steelyard.ir.rule import Rule, kind_named
from steelyard.ir.rule_kinds import GradientCompression
from steelyard.plans.accuracy import keeps
from steelyard.plans.offers import EVERYTHING
from steelyard.plans.peak_memory import Timeline
from steelyard.plans.plan import Plan, SelectedTrade
from steelyard.plans.receipt import RankMemory, Receipt, RunMeasurement
from steelyard.plans.trade import Rejection, Remaining
from steelyard.report.amounts_table import AmountRow, outside, rows_of
from steelyard.report.frontier import CurvePoint, curve_of
from steelyard.report.peak_groups import PeakTree, peak_of
from steelyard.report.quantities import Quantity, Unit, amount, cell, exactly
from steelyard.units import format_bytes, format_seconds

# Smaller differences are rounding errors of sums of the same times, not time that is paid or saved.
_NO_TIME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOffer:
    trade: str
    label: str
    pays: str
    buys: str
    rules: tuple[Rule, ...]

    @property
    def paying(self) -> str:
        return _with_verb("pays", "saves", self.pays)

    @property
    def buying(self) -> str:
        return _with_verb("buys", "takes", self.buys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDocument:
    """All figures and texts of a report.

    ``stands_in`` names the machine that was measured in place of a declared cluster.
    ``unplanned_peak`` is the peak of the graph without trades, given only if trades are applied; it
    explains an out-of-memory error before planning.
    """

    name: str
    title: str
    budget: str
    budget_bytes: int | None
    runner: str
    rows: tuple[AmountRow, ...]
    is_receipt: bool
    verdict: str
    fits: bool
    baselines: str
    rules: tuple[Rule, ...]
    taken: tuple[TakenOffer, ...]
    taken_is: str
    num_offers: int
    refused_is: str
    refused: tuple[Rejection, ...]
    as_of: str
    next_cent: str
    least: Quantity
    least_within: int
    least_is: str
    largest: str
    fewest: str
    ran: tuple[str, ...]
    ranks: tuple[RankMemory, ...]
    stands_in: str
    notes: tuple[str, ...]
    peak: PeakTree
    unplanned_peak: PeakTree | None
    curve: tuple[CurvePoint, ...]
    timeline: Timeline | None
    unplanned_timeline: Timeline | None

    @property
    def measured_is(self) -> str:
        """The title of the measured column, marked if the measured machine is not the planned
        one.
        """
        return "measured*" if self.stands_in else "measured"


def tree_of(subject: Plan | Receipt) -> ReportDocument:
    if isinstance(subject, Plan):
        return _tree(subject, None)
    return _tree(subject.plan, subject.measured)


def _tree(plan: Plan, measured: RunMeasurement | None) -> ReportDocument:
    rows = rows_of(plan, measured)
    verdict, fits = _verdict(plan, measured)
    unplanned = plan.unplanned.metrics
    return ReportDocument(
        name=plan.decisions.name,
        title=plan.title,
        budget=str(plan.decisions.budget),
        budget_bytes=plan.decisions.budget.memory_bytes,
        runner=plan.decisions.target.runner,
        rows=rows,
        is_receipt=measured is not None,
        verdict=verdict,
        fits=fits,
        baselines=(
            f"before is eager PyTorch; its graph without trades takes "
            f"{cell(unplanned.memory_bytes, Unit.BYTES)} and "
            f"{cell(unplanned.step_seconds, Unit.SECONDS)} a step{_slowdown(plan)}"
        ),
        rules=plan.decisions.rules,
        taken=tuple(
            TakenOffer(
                trade=t.trade,
                label=t.label,
                pays=_paid(t),
                buys=_bought(t),
                rules=t.rules,
            )
            for t in plan.taken
        ),
        taken_is=_taken_is(plan),
        num_offers=plan.num_offers,
        refused_is=_refused_is(plan),
        refused=_refused(plan),
        as_of=_as_of(plan),
        next_cent=_next_cent(plan),
        least=exactly(plan.least_bytes, Unit.BYTES),
        least_within=plan.least_within,
        least_is=_least_is(plan),
        largest=plan.largest,
        fewest=plan.fewest,
        ran=_ran(measured) if measured else (),
        ranks=measured.ranks if measured else (),
        stands_in=measured.stands_in if measured else "",
        notes=(*_probe(plan), *plan.notes, *(measured.notes if measured else ()), *outside(rows)),
        peak=peak_of(plan.predicted.peak),
        unplanned_peak=peak_of(plan.unplanned.peak) if plan.decisions.rules else None,
        curve=curve_of(plan),
        timeline=plan.predicted.timeline,
        unplanned_timeline=plan.unplanned.timeline,
    )


def _slowdown(plan: Plan) -> str:
    """Describe the plan's slowdown over its graph without trades.

    The ratio is known more precisely than either of the two times.
    """
    ratio = plan.slowdown
    if ratio is None or not plan.decisions.rules:
        return ""
    times = f"~{ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f})"
    # The optimizer's step is in both times, and is the same in both, so it is not in the ratio.
    return f"; the plan's forward and backward pass take {times}"


def _probe(plan: Plan) -> list[str]:
    """Return a note that explains the probed accuracy loss of a lossy plan."""
    _, _, probe = plan.predicted.metrics.accuracy_loss.partition(" (")
    meaning = "drift of the loss from an exact twin run; not a bound on the final accuracy"
    return [f"accuracy loss ({probe}: {meaning}"] if probe else []


def _verdict(plan: Plan, measured: RunMeasurement | None) -> tuple[str, bool]:
    """Return a sentence on whether the plan fits its budget, and True if it does."""
    text, fits = _memory_verdict(plan, measured)
    bound = plan.decisions.budget.accuracy_loss
    lost = plan.predicted.metrics.accuracy_loss
    match keeps(lost, bound):
        case None:
            text += "; its accuracy loss is unknown"
        case False:
            short = lost.partition(" (")[0]
            text = f"DOES NOT FIT: accuracy loss {short}, at most {bound * 100:g} % allowed; {text}"
            fits = False
    return text, fits


def _memory_verdict(plan: Plan, measured: RunMeasurement | None) -> tuple[str, bool]:
    budget = plan.decisions.budget.memory_bytes
    if budget is None:
        return "no memory budget was given", True
    peak_bytes = plan.predicted.metrics.memory_bytes.value
    figure = f"~{format_bytes(peak_bytes)}"
    if measured is not None and measured.memory_bytes is not None:
        peak_bytes, figure = measured.memory_bytes, format_bytes(measured.memory_bytes)
    fits = peak_bytes <= budget
    text = f"{'fits' if fits else 'DOES NOT FIT'}: {figure} of {format_bytes(budget)}"
    over = plan.before.metrics.memory_bytes.value - budget
    eager = f"eager PyTorch is ~{format_bytes(over)} over" if over > 0 else "so does eager PyTorch"
    return f"{text}; {eager}" if over > 0 or fits else text, fits


def _with_verb(verb: str, opposite: str, about: str) -> str:
    """Prefix an amount with ``verb``, or with ``opposite`` if it is negative.

    A trade may have a negative cost: a micro-batch, for example, may fit into the processor's
    cache.
    """
    return f"{opposite} {about.replace('~-', '~')}" if about[:2] == "~-" else f"{verb} {about}"


def _about(value: float, unit: Unit, of: str) -> str:
    sign = "-" if value < 0 else ""
    return f"~{sign}{amount(abs(value), unit)} {of}" if abs(value) > _NO_TIME else "nothing"


def _paid(taken: SelectedTrade) -> str:
    seconds = _about(taken.pays_seconds, Unit.SECONDS, kind_named(taken.trade).paid_in)
    if kind_named(taken.trade).buys_communication and taken.buys_bytes < 0:
        memory = _about(-taken.buys_bytes, Unit.BYTES, "memory")
        # Time saved is omitted: next to the memory, it would look as if it were paid too.
        return f"{seconds}, {memory}" if taken.pays_seconds > 0 else memory
    if kind_named(taken.trade).buys_communication and taken.pays_seconds < -_NO_TIME:
        # The processor time that a collective takes while it runs counts as computation.
        return f"{seconds} (exchanging fewer bytes takes less processor time)"
    return seconds


def _bought(taken: SelectedTrade) -> str:
    memory = _about(taken.buys_bytes, Unit.BYTES, "memory")
    if kind_named(taken.trade).buys_communication:
        return _about(taken.buys_seconds, Unit.SECONDS, "communication")
    if not taken.buys_seconds:
        return memory
    return f"{_about(taken.buys_seconds, Unit.SECONDS, 'computation')}, {memory}"


def _least_is(plan: Plan) -> str:
    if not plan.least_within:
        return "is the least memory found"
    most = plan.least_within
    cut = "with the whole batch" if most == 1 else f"in at most {most} micro-batches"
    return f"is the least memory found {cut}"


def _taken_is(plan: Plan) -> str:
    """Count the offers that were taken, and those taken in part; with the refused ones these are
    all offers.
    """
    left = Counter(r.left for r in plan.refused)
    whole = max(0, plan.num_offers - left[Remaining.WHOLE] - left[Remaining.REST])
    in_part = f", and {left[Remaining.REST]} in part" if left[Remaining.REST] else ""
    return f"{whole} of {plan.num_offers} offers{in_part}"


def _refused(plan: Plan) -> tuple[Rejection, ...]:
    """Return the refused offers; for uncompressed gradients, the fastest codec comes first.

    Users of a data-parallel plan usually ask why gradients are not compressed.
    """
    is_compressed = any(isinstance(r, GradientCompression) for r in plan.decisions.rules)
    codecs = [
        r
        for r in plan.refused
        if issubclass(kind_named(r.trade), GradientCompression) and r.left is Remaining.WHOLE
    ]
    if is_compressed or not codecs:
        return plan.refused
    fastest = codecs[0]
    return fastest, *(refusal for refusal in plan.refused if refusal is not fastest)


def _refused_is(plan: Plan) -> str:
    left = Counter(r.left for r in plan.refused)
    text = f"{left[Remaining.WHOLE]} of {plan.num_offers} offers"
    if left[Remaining.REST]:
        text += f", the rest of {left[Remaining.REST]}"
    if left[Remaining.NEVER]:
        text += f", and {left[Remaining.NEVER]} that cannot be offered"
    return text


def refused_label(refusal: Rejection) -> str:
    if refusal.left is not Remaining.REST:
        return refusal.label
    name, bracket, count = refusal.label.partition(" (")
    return (
        f"all other values{bracket}{count}"
        if name == EVERYTHING
        else f"the rest of {refusal.label}"
    )


def _as_of(plan: Plan) -> str:
    """Return a note if the reasons were computed for another step time than the table shows."""
    if plan.planned_seconds is None:
        return ""
    planned = format_seconds(plan.planned_seconds)
    if planned == format_seconds(plan.predicted.metrics.step_seconds.value):
        return ""
    return f"offers, curve and next cent are from planning, when a step took ~{planned}"


def _next_cent(plan: Plan) -> str:
    cent = plan.next_cent
    if cent is None or cent.saved_seconds < _NO_TIME:
        return ""
    return (
        f"{format_bytes(cent.more_bytes)} more memory would save "
        f"~{format_seconds(cent.saved_seconds)} a step"
    )


def _ran(measured: RunMeasurement) -> tuple[str, ...]:
    count = measured.steps - measured.first_step + 1
    facts = [f"{count} step{'s' if count != 1 else ''}"]
    if measured.passes and measured.passes != count:
        facts[0] += f" ({measured.passes} calls of step.backward)"
    if measured.first_step > 1 and count:
        facts[0] += f" ({measured.first_step} to {measured.steps})"
    if measured.first_loss is not None and measured.last_loss is not None:
        facts.append(f"loss {measured.first_loss:.6g} to {measured.last_loss:.6g}")
    if measured.rss_bytes is not None:
        used = format_bytes(measured.rss_bytes)
        facts.append(f"the whole process used {used} (RSS, with libraries)")
    return tuple(facts)


def describe_rule(rule: Rule) -> str:
    """Describe a rule in one line, for plans without explanations of their trades."""
    return f"{rule.trade}: {rule.describe()}"
