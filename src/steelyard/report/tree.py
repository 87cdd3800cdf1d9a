"""What there is to say about a plan or a receipt, as one tree that every renderer draws.

Holds figures with their units and the words between them; not how they are laid out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from steelyard.core.accuracy import keeps
from steelyard.core.amounts import format_bytes, format_seconds
from steelyard.core.peak import Holding, Peak, Timeline
from steelyard.core.plan import FrontierPoint, Plan, Prediction
from steelyard.core.quad import EXACT, Estimate, Quad
from steelyard.core.receipt import Measured, Receipt
from steelyard.core.rules import Rule
from steelyard.core.trade import Left, Refusal

# A miss smaller than this shows as nothing, and pointing at nothing helps nobody.
_LEAST_MISS = 0.0005
_MOST_GROUPS = 20
# Two sums of the same times may differ by their rounding; nobody pays or saves that.
_NO_TIME = 1e-9


class Unit(StrEnum):
    BYTES = "bytes"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """An amount; ``~`` stands before every one that was predicted, nothing before the others."""

    value: float
    unit: Unit
    low: float | None = None
    high: float | None = None

    @property
    def is_predicted(self) -> bool:
        return self.low is not None

    def __str__(self) -> str:
        # A zero that cannot be anything else is a fact, not a prediction.
        if not self.value and not self.high:
            return "none"
        return ("~" if self.is_predicted else "") + amount(self.value, self.unit)

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return "measured"
        if self.low == self.high:
            return "no more and no less"
        return f"between {amount(self.low, self.unit)} and {amount(self.high, self.unit)}"


Cell = Figure | str
"""A figure, or a word where there is none: ``exact``, or ``-`` for not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One of the four amounts, or the step; ``miss`` is measured over predicted, less one."""

    key: str
    label: str
    before: Cell
    unplanned: Cell
    plan: Cell
    measured: Cell = "-"
    miss: float | None = None
    is_outside: bool = False
    is_largest: bool = False


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
class Group:
    """What is alive at the peak and was made by one source line, in modules that look alike."""

    nbytes: int
    share: float
    count: int
    where: str
    line: str
    what: tuple[str, ...]
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTree:
    nbytes: int
    resident_bytes: int
    workspace_bytes: int
    at: str
    where: str
    line: str
    phase: str
    groups: tuple[Group, ...]
    num_rest: int
    rest_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One plan of the memory-time curve; ``more_flops`` is beside the graph without trades."""

    memory: Figure
    step: Figure
    more_flops: float
    micro_batches: int
    is_this_plan: bool
    accuracy_loss: str = EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """``unplanned_peak`` is that of the graph without trades, where any are struck: what ran out
    of memory before there was a plan.
    """

    name: str
    title: str
    budget: str
    budget_bytes: int | None
    runner: str
    rows: tuple[Row, ...]
    is_receipt: bool
    verdict: str
    fits: bool
    baselines: str
    rules: tuple[Rule, ...]
    taken: tuple[TakenOffer, ...]
    taken_is: str
    num_offers: int
    refused_is: str
    refused: tuple[Refusal, ...]
    as_of: str
    next_cent: str
    least: Figure
    least_within: int
    least_is: str
    largest: str
    ran: tuple[str, ...]
    notes: tuple[str, ...]
    peak: PeakTree
    unplanned_peak: PeakTree | None
    curve: tuple[CurvePoint, ...]
    timeline: Timeline | None
    unplanned_timeline: Timeline | None


_PAID_IN = {"offload": "communication", "offload_state": "communication"}


def tree_of(subject: Plan | Receipt) -> Tree:
    if isinstance(subject, Plan):
        return _tree(subject, None)
    return _tree(subject.plan, subject.measured)


def amount(value: float, unit: Unit) -> str:
    return format_bytes(value) if unit is Unit.BYTES else format_seconds(value)


def _tree(plan: Plan, measured: Measured | None) -> Tree:
    rows = _rows(plan, measured)
    verdict, fits = _verdict(plan, measured)
    unplanned = plan.unplanned.quad
    return Tree(
        name=plan.decisions.name,
        title=plan.title,
        budget=str(plan.decisions.budget),
        budget_bytes=plan.decisions.budget.memory_bytes,
        runner=plan.decisions.made_for.runner,
        rows=rows,
        is_receipt=measured is not None,
        verdict=verdict,
        fits=fits,
        baselines=(
            f"before is eager PyTorch; its graph without trades takes "
            f"{_cell(unplanned.memory_bytes, Unit.BYTES)} and "
            f"{_cell(unplanned.step_seconds, Unit.SECONDS)} a step{_slowdown(plan)}"
        ),
        rules=plan.decisions.rules,
        taken=tuple(
            TakenOffer(
                trade=t.trade,
                label=t.label,
                pays=_about(t.pays_seconds, Unit.SECONDS, _PAID_IN.get(t.trade, "computation")),
                buys=_about(t.buys_bytes, Unit.BYTES, "memory"),
                rules=t.rules,
            )
            for t in plan.taken
        ),
        taken_is=_taken_is(plan),
        num_offers=plan.num_offers,
        refused_is=_refused_is(plan),
        refused=plan.refused,
        as_of=_as_of(plan),
        next_cent=_next_cent(plan),
        least=_exactly(plan.least_bytes, Unit.BYTES),
        least_within=plan.least_within,
        least_is=_least_is(plan),
        largest=plan.largest,
        ran=_ran(measured) if measured else (),
        notes=(*_probe(plan), *plan.notes, *(measured.notes if measured else ()), *_outside(rows)),
        peak=_peak(plan.predicted.peak),
        unplanned_peak=_peak(plan.unplanned.peak) if plan.decisions.rules else None,
        curve=_curve(plan),
        timeline=plan.predicted.timeline,
        unplanned_timeline=plan.unplanned.timeline,
    )


# --- the table ------------------------------------------------------------------------------------


def _rows(plan: Plan, measured: Measured | None) -> tuple[Row, ...]:
    before, bare, after = plan.before.quad, plan.unplanned.quad, plan.predicted.quad
    found = measured or Measured()
    rows = [
        Row(
            key="accuracy_loss",
            label="accuracy loss",
            before=before.accuracy_loss,
            unplanned=bare.accuracy_loss,
            # How it was probed is said in a note.
            plan=after.accuracy_loss.partition(" (")[0],
        ),
        _row("memory_bytes", "memory (peak/rank)", plan, found.memory_bytes),
        _row("communication_seconds", "communication", plan, found.communication_seconds),
        _row("computation_seconds", "computation", plan, found.computation_seconds),
        _row("step_seconds", "step, overlapped", plan, found.step_seconds),
    ]
    worst = max(rows, key=lambda r: abs(r.miss or 0.0))
    if abs(worst.miss or 0.0) < _LEAST_MISS:
        return tuple(rows)
    return tuple(replace(r, is_largest=r is worst) for r in rows)


def _row(key: str, label: str, plan: Plan, measured: float | None) -> Row:
    unit = Unit.BYTES if key == "memory_bytes" else Unit.SECONDS
    before, bare, after = (
        _estimate(p.quad, key) for p in (plan.before, plan.unplanned, plan.predicted)
    )
    has_miss = measured is not None and after.value > 0
    return Row(
        key=key,
        label=label,
        before=_cell(before, unit),
        unplanned=_cell(bare, unit),
        plan=_cell(after, unit),
        measured="-" if measured is None else Figure(value=measured, unit=unit),
        miss=measured / after.value - 1 if has_miss and measured is not None else None,
        is_outside=has_miss and measured is not None and not after.contains(measured),
    )


def _estimate(quad: Quad, key: str) -> Estimate:
    found: Estimate = getattr(quad, key)
    return found


def _slowdown(plan: Plan) -> str:
    """The plan beside its own graph without trades: known better than either time."""
    ratio = plan.slowdown
    if ratio is None or not plan.decisions.rules:
        return ""
    times = f"~{ratio.value:.2f} times as long ({ratio.low:.2f} to {ratio.high:.2f})"
    # The optimizer's step is in both and changes in neither, so it is not in the ratio.
    return f"; the plan's forward and backward pass take {times}"


def _cell(estimate: Estimate, unit: Unit) -> Figure:
    return Figure(value=estimate.value, unit=unit, low=estimate.low, high=estimate.high)


def _outside(rows: Sequence[Row]) -> list[str]:
    """On one device computation is the whole step; what they missed alike is said once."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.is_outside and isinstance(row.plan, Figure):
            said = f"measured {row.measured}, predicted {row.plan.interval}"
            labels.setdefault(said, []).append(row.label)
    return [f"{' and '.join(names)}: {said}" for said, names in labels.items()]


# --- the lines below it ---------------------------------------------------------------------------


def _probe(plan: Plan) -> list[str]:
    """What stands behind the word for a lossy plan's accuracy."""
    _, _, probe = plan.predicted.quad.accuracy_loss.partition(" (")
    said = "how far the loss drifted from that of a twin without; no promise of a final accuracy"
    return [f"accuracy loss ({probe}: {said}"] if probe else []


def _verdict(plan: Plan, measured: Measured | None) -> tuple[str, bool]:
    """Whether it fits, which is the question most people came with."""
    said, fits = _memory_verdict(plan, measured)
    bound = plan.decisions.budget.accuracy_loss
    lost = plan.predicted.quad.accuracy_loss
    match keeps(lost, bound):
        case None:
            said += "; how much accuracy it loses is not known"
        case False:
            short = lost.partition(" (")[0]
            said = f"DOES NOT FIT: accuracy loss {short}, at most {bound * 100:g} % allowed; {said}"
            fits = False
    return said, fits


def _memory_verdict(plan: Plan, measured: Measured | None) -> tuple[str, bool]:
    budget = plan.decisions.budget.memory_bytes
    if budget is None:
        return "no bound on memory was given", True
    held = plan.predicted.quad.memory_bytes.value
    figure = f"~{format_bytes(held)}"
    if measured is not None and measured.memory_bytes is not None:
        held, figure = measured.memory_bytes, format_bytes(measured.memory_bytes)
    fits = held <= budget
    said = f"{'fits' if fits else 'DOES NOT FIT'}: {figure} of {format_bytes(budget)}"
    over = plan.before.quad.memory_bytes.value - budget
    eager = f"eager PyTorch is ~{format_bytes(over)} over" if over > 0 else "so does eager PyTorch"
    return f"{said}; {eager}" if over > 0 or fits else said, fits


def _with_verb(verb: str, opposite: str, about: str) -> str:
    """Beside the plan without it a trade may pay less than nothing: cut in parts, a batch may stay
    in the processor's cache."""
    return f"{opposite} {about.replace('~-', '~')}" if about[:2] == "~-" else f"{verb} {about}"


def _about(value: float, unit: Unit, of: str) -> str:
    sign = "-" if value < 0 else ""
    return f"~{sign}{amount(abs(value), unit)} {of}" if abs(value) > _NO_TIME else "nothing"


def _least_is(plan: Plan) -> str:
    if not plan.least_within:
        return "is the least found"
    most = plan.least_within
    cut = "with the batch in one piece" if most == 1 else f"in at most {most} micro-batches"
    return f"is the least found {cut}"


def _taken_is(plan: Plan) -> str:
    """What is taken, what is taken in part and what is not, add up to all that was on offer."""
    left = Counter(r.left for r in plan.refused)
    whole = max(0, plan.num_offers - left[Left.WHOLE] - left[Left.REST])
    in_part = f", and {left[Left.REST]} in part" if left[Left.REST] else ""
    return f"{whole} of {plan.num_offers} offers{in_part}"


def _refused_is(plan: Plan) -> str:
    left = Counter(r.left for r in plan.refused)
    said = f"{left[Left.WHOLE]} of {plan.num_offers} offers"
    if left[Left.REST]:
        said += f", the rest of {left[Left.REST]}"
    if left[Left.NEVER]:
        said += f", and {left[Left.NEVER]} that cannot be offered"
    return said


def refused_label(refusal: Refusal) -> str:
    return f"the rest of {refusal.label}" if refusal.left is Left.REST else refusal.label


def _as_of(plan: Plan) -> str:
    """Of when the reasons are, where they speak of other times than the table does."""
    if plan.planned_seconds is None:
        return ""
    then = format_seconds(plan.planned_seconds)
    if then == format_seconds(plan.predicted.quad.step_seconds.value):
        return ""
    return f"offers, curve and next cent are of when it was planned, at ~{then} a step"


def _next_cent(plan: Plan) -> str:
    cent = plan.next_cent
    if cent is None or cent.saved_seconds < _NO_TIME:
        return ""
    return (
        f"{format_bytes(cent.more_bytes)} more memory would save "
        f"~{format_seconds(cent.saved_seconds)} a step"
    )


def _ran(measured: Measured) -> tuple[str, ...]:
    count = measured.steps - measured.first_step + 1
    said = [f"{count} step{'s' if count != 1 else ''}"]
    if measured.first_step > 1 and count:
        said[0] += f" ({measured.first_step} to {measured.steps})"
    if measured.first_loss is not None and measured.last_loss is not None:
        said.append(f"loss {measured.first_loss:.6g} to {measured.last_loss:.6g}")
    if measured.rss_bytes is not None:
        said.append(f"the whole process held {format_bytes(measured.rss_bytes)} (RSS)")
    return tuple(said)


def _exactly(value: float, unit: Unit) -> Figure:
    return Figure(value=value, unit=unit, low=value, high=value)


def rule_in_words(rule: Rule) -> str:
    """A decision as one line, for plans whose reasons are not known."""
    if rule.trade == "accumulate":
        return f"{rule.trade}: micro_batches {rule.degree}"
    if rule.trade == "offload_state":
        return f"{rule.trade}: {rule.op} of {rule.module} ({rule.count})"
    if rule.degree:
        return f"{rule.trade}: {rule.op} in {rule.module or 'the loss'}, {rule.degree} slices"
    return f"{rule.trade}: {rule.op} #{rule.nth} in {rule.module or 'the loss'} ({rule.count})"


# --- what is alive at the peak --------------------------------------------------------------------


def short_op(op: str) -> str:
    """``aten.bmm.default`` -> ``bmm``; what is no operator's name is left alone."""
    name, _, again = op.partition(" ")
    parts = name.split(".")
    short = parts[1] if len(parts) == 3 and all(parts) else name
    return f"{short} {again}" if again else short


def alike(path: str) -> str:
    """``blocks.3.mlp`` -> ``blocks.*.mlp``: modules that differ in an index only read as one.

    A last index below another stays: layers of one Sequential inside a block are not alike.
    """
    parts = path.split(".")
    starred = ["*" if part.isdigit() else part for part in parts]
    if starred[-1] == "*" and "*" in starred[:-1]:
        starred[-1] = parts[-1]
    return ".".join(starred)


def _peak(peak: Peak) -> PeakTree:
    members: dict[tuple[str, str, str], list[Holding]] = {}
    for holding in peak.alive:
        named = bool(holding.path or holding.line)
        key = (alike(holding.path), holding.line, "" if named else holding.what)
        members.setdefault(key, []).append(holding)
    groups = sorted((_group(m, peak) for m in members.values()), key=lambda g: -g.nbytes)
    rest = groups[_MOST_GROUPS:]
    return PeakTree(
        nbytes=peak.nbytes,
        resident_bytes=peak.resident_bytes,
        workspace_bytes=peak.workspace_bytes,
        at=short_op(peak.at) if peak.at else "the optimizer's step",
        where=peak.path,
        line=peak.line,
        phase=peak.phase.value,
        groups=tuple(groups[:_MOST_GROUPS]),
        num_rest=len(rest),
        rest_bytes=sum(g.nbytes for g in rest),
    )


def _group(members: list[Holding], peak: Peak) -> Group:
    first = members[0]
    nbytes = sum(m.nbytes for m in members)
    paths = dict.fromkeys(m.path for m in members)
    where = first.path if len(paths) == 1 else f"{alike(first.path)} ({len(paths)})"
    if not first.path:
        where = "(the loss)" if first.line else f"({first.role.value})"
    return Group(
        nbytes=nbytes,
        share=nbytes / peak.nbytes if peak.nbytes else 0.0,
        count=len(members),
        where=where,
        line=first.line,
        what=tuple(dict.fromkeys(short_op(m.what) for m in members)),
        role=first.role.value,
    )


# --- the memory-time curve ------------------------------------------------------------------------


def _curve(plan: Plan) -> tuple[CurvePoint, ...]:
    """The curve with this plan on it: few plans stand for many, and it may lie between two."""
    points = list(plan.frontier)
    if points and not any(_is_of(plan, p) for p in points):
        points.append(_as_point(plan))
    return tuple(_point(p, plan) for p in sorted(points, key=_by_memory))


def _is_of(plan: Plan, point: FrontierPoint) -> bool:
    """By its rules: of one program, the search and a later prediction may count other times."""
    return sorted(point.rules) == sorted(plan.decisions.rules)


def _as_point(plan: Plan) -> FrontierPoint:
    quad, then, rules = plan.predicted.quad, plan.planned_seconds, plan.decisions.rules
    return FrontierPoint(
        memory_bytes=int(quad.memory_bytes.value),
        step_seconds=quad.step_seconds.value if then is None else then,
        flops=plan.predicted.flops,
        micro_batches=max((r.degree for r in rules if r.trade == "accumulate"), default=1),
        rules=rules,
        accuracy_loss=quad.accuracy_loss,
    )


def _by_memory(point: FrontierPoint) -> tuple[int, float]:
    return (-point.memory_bytes, point.step_seconds)


def _point(point: FrontierPoint, plan: Plan) -> CurvePoint:
    flops, is_this = plan.unplanned.flops, _is_of(plan, point)
    this = plan.predicted.quad.accuracy_loss
    return CurvePoint(
        memory=_predicted(point.memory_bytes, plan.predicted, "memory_bytes"),
        step=_predicted(point.step_seconds, plan.predicted, "step_seconds"),
        more_flops=point.flops / flops - 1 if flops else 0.0,
        micro_batches=point.micro_batches,
        is_this_plan=is_this,
        accuracy_loss=(this if is_this else point.accuracy_loss).partition(" (")[0],
    )


def _predicted(value: float, like: Prediction, key: str) -> Figure:
    """Points of the curve come from the same predictor, so their intervals are as wide."""
    around = _estimate(like.quad, key)
    unit = Unit.BYTES if key == "memory_bytes" else Unit.SECONDS
    if not around.value:
        return _exactly(value, unit)
    scale = value / around.value
    return Figure(value=value, unit=unit, low=around.low * scale, high=around.high * scale)
