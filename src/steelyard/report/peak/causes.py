"""The answer of ``steelyard why``: the tensors at the peak of a step, before and after a plan.

Each row has the bytes of a module and source line, why they are alive, and the trades that were
taken there. Not for rendering them: see rendering.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.ir.rule import CallRule, Rule
from steelyard.plans.lifetimes import Lifetime, MemoryHistory, StepDetail
from steelyard.plans.peak_memory import LiveTensor, PeakMemory
from steelyard.plans.plan import Plan
from steelyard.report.document import describe_rule
from steelyard.report.page.chart_table import reason_of, where_of
from steelyard.report.peak_groups import short_op, starred_path

_MOST_REASONS = 2

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCause:
    """The tensors of one module and source line that are alive at a peak.

    ``after_bytes`` is None if there is no plan, or a plan without trades. ``trades`` are those that
    name the module; a trade of the whole step, such as micro-batches, is in none.
    """

    where: str
    line: str
    count: int
    what: tuple[str, ...]
    before_bytes: int
    after_bytes: int | None
    why: tuple[str, ...]
    trades: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCauses:
    """The peaks of a step in eager PyTorch, as a graph without trades, and planned.

    ``refusal`` says why no plan fits the budget, if none does.
    """

    title: str
    budget_bytes: int | None
    eager_bytes: int
    before: PeakMemory
    after: PeakMemory | None
    rows: tuple[PeakCause, ...]
    step_trades: tuple[str, ...]
    refusal: str = ""

    @property
    def fits_untouched(self) -> bool:
        """True if eager PyTorch keeps the budget."""
        return self.budget_bytes is None or self.eager_bytes <= self.budget_bytes


def causes_of(
    plan: Plan, detail: StepDetail, *, budget_bytes: int | None, refusal: str = ""
) -> PeakCauses:
    """Compare the peak of the graph without trades with that of the plan, tensor by tensor."""
    before = plan.unplanned.peak
    after = plan.predicted.peak if plan.decisions.rules else None
    old = _grouped(before.alive)
    new = {} if after is None else _grouped(after.alive)
    history = detail.unplanned or (None if after is not None else detail.planned)
    reasons = _reasons(history)
    later = _reasons(detail.planned) if after is not None else {}
    by_module, of_step = _trades(plan)
    rows = [
        PeakCause(
            where=where,
            line=line,
            count=len(members := old.get((where, line)) or new[where, line]),
            what=tuple(dict.fromkeys(short_op(one.what) for one in members)),
            before_bytes=sum(one.nbytes for one in old.get((where, line), ())),
            after_bytes=None
            if after is None
            else sum(one.nbytes for one in new.get((where, line), ())),
            why=reasons.get((where, line)) or later.get((where, line), ()),
            trades=tuple(by_module.get(where, ())),
        )
        for where, line in dict.fromkeys((*old, *new))
    ]
    return PeakCauses(
        title=plan.title,
        budget_bytes=budget_bytes,
        eager_bytes=int(plan.before.metrics.memory_bytes.value),
        before=before,
        after=after,
        rows=tuple(sorted(rows, key=lambda row: (-row.before_bytes, -(row.after_bytes or 0)))),
        step_trades=of_step,
        refusal=refusal,
    )


def _key(tensor: LiveTensor) -> _Key:
    if not tensor.path and not tensor.line:
        return f"({tensor.what})", ""
    return starred_path(where_of(tensor)), tensor.line


def _grouped(alive: Iterable[LiveTensor]) -> dict[_Key, list[LiveTensor]]:
    groups: dict[_Key, list[LiveTensor]] = {}
    for tensor in alive:
        groups.setdefault(_key(tensor), []).append(tensor)
    return groups


def _reasons(history: MemoryHistory | None) -> dict[_Key, tuple[str, ...]]:
    """Return why the tensors of each group are alive at the peak; the most bytes come first."""
    if history is None or not history.timeline.nbytes:
        return {}
    nbytes = history.timeline.nbytes
    groups: dict[_Key, list[Lifetime]] = {}
    for one in history.alive_at(max(range(len(nbytes)), key=nbytes.__getitem__)):
        groups.setdefault(_key(one.tensor), []).append(one)
    found = {}
    for key, members in groups.items():
        weight: dict[str, int] = {}
        for one in members:
            weight[reason_of(one)] = weight.get(reason_of(one), 0) + one.tensor.nbytes
        ordered = sorted(weight, key=lambda reason: -weight[reason])
        more = len(ordered) - _MOST_REASONS
        shown = ordered[:_MOST_REASONS] + ([f"and {more} more"] if more > 0 else [])
        found[key] = tuple(shown)
    return found


def _trades(plan: Plan) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Return the applied trades by starred module path, and those of the whole step."""
    by_module: dict[str, list[str]] = {}
    of_step: list[str] = []
    taken = [(f"{one.trade} {one.label}", one.rules) for one in plan.taken]
    for said, rules in taken or [(describe_rule(rule), (rule,)) for rule in plan.decisions.rules]:
        modules = dict.fromkeys(module for rule in rules for module in _modules(rule))
        for module in modules:
            by_module.setdefault(module, []).append(said)
        if not modules:
            of_step.append(said)
    return by_module, tuple(dict.fromkeys(of_step))


def _modules(rule: Rule) -> Iterable[str]:
    return (starred_path(rule.module),) if isinstance(rule, CallRule) and rule.module else ()
