"""Plans as the search would make them, with figures chosen for display. Not tests."""

from dataclasses import replace

from steelyard.ir.graph import Phase, Role
from steelyard.ir.metrics import Estimate, Metrics
from steelyard.plans.budget import Budget
from steelyard.plans.lifetimes import Lifetime, MemoryHistory, StepDetail
from steelyard.plans.peak_memory import LiveTensor, PeakMemory, Timeline
from steelyard.plans.plan import (
    BatchEntry,
    Decisions,
    FrontierPoint,
    NextCent,
    Plan,
    Prediction,
    SelectedTrade,
    Target,
)
from steelyard.plans.receipt import Receipt, RunMeasurement
from steelyard.plans.trace_span import DEVICE, WAITING, Span
from steelyard.plans.trade import Rejection
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.recompute import RecomputeRule

MIB = 2**20

DECISIONS = Decisions(
    target=Target(
        model="3f21a0c45b7e9d10",
        graph="9c44d1b2a7f03e58",
        decomposition="python-1",
        runner="python",
        cluster="51d0c2f3a4b59687",
        torch="2.13.0+cpu",
        batch=(
            BatchEntry(name="[0]", shape=(8, 256), dtype="int64"),
            BatchEntry(name="[1]", shape=(8, 256), dtype="int64"),
        ),
    ),
    budget=Budget(memory="300 MiB"),
    rules=(
        AccumulateRule(micro_batches=2),
        RecomputeRule(module="blocks.*.attn", op="aten.bmm.default", nth=1, count=4),
        RecomputeRule(module="blocks.*.mlp", op="aten.gelu.default", count=4),
    ),
)


def metrics(mib: float, seconds: float) -> Metrics:
    took = Estimate.within(seconds, share=0.12)
    return Metrics(
        memory_bytes=Estimate.within(mib * MIB, share=0.01),
        computation_seconds=took,
        step_seconds=took,
    )


def timeline(count: int, peak_bytes: int) -> Timeline:
    """Return levels that rise through the forward pass and fall again, with the peak between the
    passes."""
    turn = count // 2
    low = peak_bytes // 4

    def held(index: int) -> int:
        return peak_bytes - (peak_bytes - low) * abs(index - turn) // max(1, turn)

    return Timeline(
        seconds=tuple(i * 1e-4 for i in range(count)),
        nbytes=tuple(held(i) for i in range(count)),
        phases=tuple(Phase.FORWARD if i < turn else Phase.BACKWARD for i in range(count)),
    )


def held(
    mib: float, what: str, path: str = "", line: str = "", role: Role = Role.ACTIVATION
) -> LiveTensor:
    return LiveTensor(
        nbytes=int(mib * MIB), what=what, path=path, line=line, phase=Phase.FORWARD, role=role
    )


def prediction(
    mib: float, seconds: float, *, instants: int = 60, flops: int = 10**12
) -> Prediction:
    alive = (
        held(64, "optimizer state", role=Role.STATE),
        held(32, "parameters", role=Role.PARAMETER),
        *(
            held(0.1 * (mib - 100), "aten.gelu.default", f"blocks.{i}.mlp", "gpt.py:41")
            for i in range(4)
        ),
        *(
            held(0.05 * (mib - 100), "aten.bmm.default", f"blocks.{i}.attn", "gpt.py:27")
            for i in range(4)
        ),
        held(0.4 * (mib - 100), "aten._log_softmax.default", "", "train.py:18"),
        held(2, "the batch", role=Role.BATCH),
    )
    return Prediction(
        metrics=metrics(mib, seconds),
        peak=PeakMemory(
            nbytes=int(mib * MIB),
            resident_bytes=98 * MIB,
            workspace_bytes=2 * MIB,
            at="aten._log_softmax_backward_data.default",
            path="",
            line="train.py:18",
            phase=Phase.BACKWARD,
            alive=tuple(sorted(alive, key=lambda h: -h.nbytes)),
        ),
        flops=flops,
        timeline=timeline(instants, int(mib * MIB)),
    )


PLAN = Plan(
    title="gpt-small, batch 8x256",
    decisions=DECISIONS,
    before=prediction(487, 1.10),
    unplanned=prediction(441, 1.06),
    predicted=prediction(296, 1.24),
    taken=(
        SelectedTrade(
            trade="accumulate",
            label="2 micro-batches",
            rules=DECISIONS.rules[:1],
            buys_bytes=96 * MIB,
            pays_seconds=0.05,
        ),
        SelectedTrade(
            trade="recompute",
            label="blocks.*.mlp: gelu (4)",
            rules=DECISIONS.rules[1:],
            buys_bytes=49 * MIB,
            pays_seconds=0.13,
        ),
    ),
    refused=(
        Rejection(
            trade="recompute",
            label="blocks.*.attn: softmax (4)",
            reason="would buy 12.0 MiB for ~30.0 ms a step, and the budget is met without it",
        ),
        Rejection(
            trade="accumulate",
            label="4 micro-batches",
            reason="would add ~90.0 ms a step and save no peak memory",
        ),
    ),
    num_offers=4,
    frontier=tuple(
        FrontierPoint(
            memory_bytes=mib * MIB,
            step_seconds=seconds,
            flops=10**12,
            micro_batches=parts,
            rules=DECISIONS.rules if mib == 296 else (),
        )
        for mib, seconds, parts in (
            (441, 1.06, 1),
            (380, 1.09, 1),
            (330, 1.16, 1),
            (296, 1.24, 2),
            (240, 1.33, 4),
            (188, 1.52, 8),
        )
    ),
    next_cent=NextCent(more_bytes=34 * MIB, saved_seconds=0.08),
    least_bytes=171 * MIB,
    notes=("costs of 12 of 214 operators are declared, not measured",),
)


def history(count: int, peak_bytes: int, what: str = "aten.gelu.default") -> MemoryHistory:
    """Return the lifetimes of ``timeline(count, peak_bytes)``: weights, and one tensor a step."""
    levels = timeline(count, peak_bytes)
    weights = min(levels.nbytes)
    lifetimes = [
        Lifetime(
            tensor=LiveTensor.of(weights, "parameters", Role.PARAMETER), first=0, last=count - 1
        )
    ]
    turn = levels.nbytes.index(max(levels.nbytes))
    for born in range(1, turn + 1):
        last = max(i for i in range(count) if levels.nbytes[i] >= levels.nbytes[born])
        nbytes = levels.nbytes[born] - levels.nbytes[born - 1]
        tensor = replace(held(0, what, f"blocks.{born % 4}.mlp", "gpt.py:41"), nbytes=nbytes)
        lifetimes.append(
            Lifetime(
                tensor=tensor, first=born, last=last, last_use="aten.mm.default",
                last_path=tensor.path, is_saved=last >= turn,
            )
        )  # fmt: skip
    return MemoryHistory(timeline=levels, lifetimes=tuple(lifetimes))


def schedule(ranks: int = 2, count: int = 40) -> tuple[Span, ...]:
    """Return the same work on each rank, with a wait in the middle."""
    return tuple(
        Span(
            rank=rank,
            stream=WAITING if i == count // 2 else DEVICE,
            name="waiting for all_reduce" if i == count // 2 else "aten.mm.default",
            where=f"blocks.{i % 4}.mlp",
            begin_seconds=i * 1e-3,
            seconds=1e-3,
        )
        for rank in range(ranks)
        for i in range(count)
    )


DETAIL = StepDetail(
    planned=history(60, 296 * MIB), unplanned=history(60, 441 * MIB), spans=schedule()
)

MEASURED = RunMeasurement(
    steps=200,
    memory_bytes=297 * MIB,
    rss_bytes=812 * MIB,
    communication_seconds=0.0,
    computation_seconds=1.31,
    step_seconds=1.45,
    first_loss=9.013,
    last_loss=6.482,
)
RECEIPT = Receipt(plan=PLAN, measured=MEASURED)


def hostile(text: str) -> Plan:
    """Return the same plan with every name replaced by ``text``."""
    bad = prediction(296, 1.24)
    alive = tuple(replace(h, what=text, path=text, line=text) for h in bad.peak.alive)
    peak = replace(bad.peak, at=text, path=text, line=text, alive=alive)
    return replace(
        PLAN,
        title=text,
        predicted=replace(bad, peak=peak),
        taken=tuple(replace(t, trade=text, label=text) for t in PLAN.taken),
        refused=tuple(replace(r, trade=text, label=text, reason=text) for r in PLAN.refused),
        largest=text,
        notes=(text,),
    )
