"""Compares messages through shared-memory slots with gloo's and with a raw connection's.

    python benchmarks/transfer.py [messages] [stages]

Two ranks of one host have a core each. Messages: a float32 tensor is received into allocated
memory, in turns through slots, by gloo's send and recv, and over a TCP connection on the loopback.
Eight messages of one kind follow each other, each sent when the one before has arrived, as those
of micro-batches are. The time of a message is from sending until it can be read, by a clock that
both processes share. The tensor either exists, or torch.neg computes it for each message as stages
do: in its slot, or in the sender's memory; then the time of computing it alone is subtracted.
Stages: plans of this machine run with [[shared_memory_transfer]] and without, in turns in the same
processes, for a model whose messages take half of its step and for a GPT, whose messages are
small. The figures are medians of paired ratios. Needs two idle cores.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _live_models, live
from benchmarks._looked import capture_and_price
from benchmarks._turns import in_turn
from benchmarks.runner import interval
from steelyard.comm.json_gather import gathered
from steelyard.ir.rule import Rule
from steelyard.trades.accumulate import AccumulateRule
from steelyard.trades.shard_pipeline import rules_for
from steelyard.trades.shared_memory_transfer import SharedMemoryTransferRule

if TYPE_CHECKING:
    from steelyard.api.step import Step

RANKS, TURNS, WARM_UP, IN_A_ROW = 2, 40, 4, 8
KIB, MIB = 2**10, 2**20
SIZES = {
    "4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "8 MiB": 8 * MIB, "64 MiB": 64 * MIB,
}  # fmt: skip
# The largest ratio of the time through slots to gloo's (from 1 MiB on) and to TCP's. Smaller
# messages are measured without a target.
GLOO_TARGET, TCP_TARGETS = 1 / 4, {"1 MiB": 1 / 3, "8 MiB": 1 / 4, "64 MiB": 1 / 4}
# The largest ratio of a step with slots to a step without.
STAGES_TARGETS = {"wide": 1 / 1.3, "gpt": 1.0}
STEPS, SIDES = 60, ("gloo", "slots")


def main() -> None:
    torch.set_num_threads(1)
    asked = sys.argv[1:] or ["messages", "stages"]
    figures = []
    for what in asked:
        for figure in {"messages": of_messages, "stages": of_stages}[what]():
            print(json.dumps(figure), file=sys.stderr, flush=True)
            figures.append(figure)
    judged = [f for f in figures if f["target"] is not None]
    worst = max(judged, key=lambda f: f["value"] / f["target"] if f["target"] else f["value"])
    print(
        json.dumps(
            {
                "name": f"transfer: the furthest from its target, {worst['name']}",
                "value": worst["value"],
                "interval": worst["interval"],
                "target": worst["target"],
                "ok": all(f["ok"] for f in judged),
                "figures": judged,
            }
        )
    )


def _on_ranks(what: str, folder: Path) -> Any:
    """Run all ranks and return the result of rank 0."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--rank", what, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environ) for rank in range(RANKS)]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{what}: ranks ended with {codes}")
    return json.loads((folder / "found.json").read_text())


def _figure(name: str, ratios: list[float], target: float | None, **more: Any) -> dict[str, Any]:
    low, value, high = interval(ratios)
    return {
        "name": name,
        "value": round(value, 4),
        "interval": [round(low, 4), round(high, 4)],
        "target": None if target is None else round(target, 4),
        "ok": target is None or value <= target or (target == 1.0 and low <= target),
        **more,
    }


# --- messages -------------------------------------------------------------------------------------


def of_messages() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        found = _on_ranks("messages", Path(folder))
    for (kind, size), seconds in (
        ((kind, size), seconds)
        for kind, sizes in found["seconds"].items()
        for size, seconds in sizes.items()
    ):
        for other, target in (
            ("gloo", GLOO_TARGET if SIZES[size] >= MIB else None),
            ("TCP", TCP_TARGETS.get(size)),
        ):
            ratios = [a / b for a, b in zip(seconds["slots"], seconds[other], strict=True)]
            micros = {way: round(1e6 * median(took), 1) for way, took in seconds.items()}
            beside = "gloo" if other == "gloo" else "a raw connection"
            name = f"{size}, {kind}, through slots / {beside}"
            yield _figure(name, ratios, target, microseconds=micros)
    yield {
        "name": "bytes allocated by a message through slots",
        "value": found["allocated"], "interval": None, "target": 0, "ok": not found["allocated"],
    }  # fmt: skip
    yield {
        "name": "rings of a message through slots",
        "value": found["rings"], "interval": None, "target": 1, "ok": found["rings"] == 1,
    }  # fmt: skip


def messages(folder: Path, rank: int) -> dict[str, Any]:
    from steelyard.comm.shared_memory.same_host import SharedMemoryTransport
    from steelyard.ir.message_slots import SlotSpec
    from steelyard.measure.operators.memory import meter_once

    link, back = _connected(folder / "port", rank), _connected(folder / "back", rank)
    seconds: dict[str, dict[str, dict[str, list[float]]]] = {"that lies there": {}, "made": {}}
    allocated = rings = 0
    for (kind, found), (size, nbytes) in product(seconds.items(), SIZES.items()):
        edge = SlotSpec(source=0, target=1, sizes=(nbytes,), count=2, holds_all=False)
        assert dist.group.WORLD is not None
        x = torch.randn(nbytes // 4)
        slots = SharedMemoryTransport([edge], group=dist.group.WORLD)
        slots.begin()
        ways = (_ways if kind == "that lies there" else _making_ways)(slots, x, link, rank)
        took = found[size] = {way: [] for way in ways}
        for turn in range(WARM_UP + TURNS):
            making = _making(x) if kind == "made" and rank == 0 else 0.0
            for way, carry in ways.items():
                each = _carried(carry, range(turn * IN_A_ROW, (turn + 1) * IN_A_ROW), back, rank)
                if turn >= WARM_UP:
                    took[way].append(each - making)
        number = (WARM_UP + TURNS) * IN_A_ROW
        metered = meter_once(lambda n=number, carry=ways["slots"]: carry(n))
        allocated += metered.peak_bytes
        rings = slots._to[1].num_sent / (number + 1) if rank == 0 else 1
        slots.settle()
        dist.barrier()
        slots.close()
    return {"seconds": seconds, "allocated": allocated, "rings": rings}


def _carried(
    carry: Callable[[int], object], numbers: range, back: socket.socket, rank: int
) -> float:
    """Return the mean seconds from sending a message until it can be read."""
    times = []
    dist.barrier()
    for number in numbers:
        if rank == 0:
            times.append(time.perf_counter())
            carry(number)
            back.recv(1)
        else:
            carry(number)
            times.append(time.perf_counter())
            back.sendall(b".")
    both = gathered(times, list[float])
    return sum(end - begin for begin, end in zip(*both, strict=True)) / len(numbers)


def _making(x: Tensor) -> float:
    """Return the seconds to compute a value that is not sent."""
    made = torch.neg(x)
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        torch.neg(x, out=made)
    return (time.perf_counter() - begin) / IN_A_ROW


def _ways(
    slots: Any, x: Tensor, link: socket.socket, rank: int
) -> dict[str, Callable[[int], object]]:
    """Return functions that carry ``x`` from rank 0 to rank 1, called with the message's number."""
    room, like = memoryview(x.numpy()).cast("B"), [(x.shape, x.dtype)]
    if rank == 0:
        return {
            "slots": lambda number: slots.send(0, number, [x]),
            "gloo": lambda _: dist.send(x, 1),
            "TCP": lambda _: link.sendall(room),
        }
    return {
        "slots": lambda number: slots.receive(0, number, like),
        "gloo": lambda _: dist.recv(x, 0),
        "TCP": lambda _: _fill(link, room),
    }


def _making_ways(
    slots: Any, x: Tensor, link: socket.socket, rank: int
) -> dict[str, Callable[[int], object]]:
    """Return the same functions for a value that rank 0 computes from ``x`` for each message."""
    made = torch.empty_like(x)
    ways = _ways(slots, made, link, rank)
    if rank == 1:
        return ways

    def make(way: str, number: int) -> None:
        torch.neg(x, out=made)
        ways[way](number)

    def make_in_slot(number: int) -> None:
        place = slots.place(0, number, 0, (x.shape, x.dtype))
        assert place is not None, "each was read before the next is made"
        slots.send(0, number, [torch.neg(x, out=place)])

    return {"slots": make_in_slot, "gloo": partial(make, "gloo"), "TCP": partial(make, "TCP")}


def _connected(path: Path, rank: int) -> socket.socket:
    """Return this rank's end of a TCP connection between the two ranks, on the loopback."""
    if rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            path.with_suffix(".new").write_text(str(server.getsockname()[1]))
            path.with_suffix(".new").rename(path)
            made, _ = server.accept()
    else:
        while not path.exists():
            time.sleep(0.01)
        made = socket.create_connection(("127.0.0.1", int(path.read_text())))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _fill(link: socket.socket, room: memoryview) -> None:
    done = 0
    while done < len(room):
        done += link.recv_into(room[done:])


# --- stages ---------------------------------------------------------------------------------------


def _wide() -> Any:
    """Return a model with little computation and large messages.

    Each micro-batch sends 4 MiB forward and 4 MiB back.
    """
    model = nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = model(batch["x"]).square().mean()
        return result

    return model, loss, {"x": torch.randn(512 * WIDE_PARTS, 16)}


WIDE_PARTS = 8
MODELS = {"wide": _wide, "gpt": _live_models.MODELS["gpt"]}


def of_stages() -> Iterator[dict[str, Any]]:
    for name, target in STAGES_TARGETS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            os.environ["STEELYARD_CACHE"] = str(folder / "costs.sqlite")
            said = _prepared(name, folder)
            found = _on_ranks(name, folder)
        seconds = found["seconds"]
        ratios = [a / b for a, b in zip(seconds["slots"], seconds["gloo"], strict=True)]
        exposed = 1 - median(seconds["alone"]) / median(seconds["gloo"])
        yield _figure(
            f"{name}, {said['schedule']}: a step with slots / without", ratios, target,
            predicted=said["seconds"], chosen=said["chosen"],
            seconds={way: round(median(took), 5) for way, took in seconds.items()},
            messages_share=round(exposed, 3), same_losses=found["same"],
        )  # fmt: skip


def _look(name: str) -> Any:
    return capture_and_price(MODELS[name], live.OPTIMIZER, ranks=RANKS, title=name)


def _prepared(name: str, folder: Path) -> dict[str, Any]:
    """Write a pipeline plan without slots and the same plan with slots; return predictions."""
    from steelyard.plan_files.plan_file import write_decisions
    from steelyard.plans.budget import Budget
    from steelyard.plans.plan import Decisions
    from steelyard.predict import step_seconds

    session = _look(name)
    rules = _wide_rules() if name == "wide" else _fastest(session)
    sides = {"gloo": rules, "slots": (*rules, SharedMemoryTransferRule(messages="stages"))}
    seconds = {}
    for side, own in sides.items():
        made = Decisions(target=session.target(), budget=Budget(), rules=tuple(sorted(own)))
        write_decisions(folder / f"{side}.plan.toml", made)
        seconds[side] = round(step_seconds(session.apply_rules(own), session.prices.costs).value, 5)
    schedule = next(rule.schedule for rule in rules if rule.trade == "shard_pipeline")
    return {
        "schedule": schedule,
        "seconds": seconds,
        "chosen": min(seconds, key=lambda side: seconds[side]),
    }


def _wide_rules() -> tuple[Rule, ...]:
    """Return rules that cut the model where its values are largest, which no search would."""
    cut = rules_for(["1"], schedule="1F1B", ranks=RANKS)
    return AccumulateRule(micro_batches=WIDE_PARTS), *cut


def _fastest(session: Any) -> tuple[Rule, ...]:
    """Return the rules of the fastest pipeline plan without slots."""
    ways = [way for staged in session.layouts.pipelines.values() for way in staged.candidates]
    fastest: tuple[Rule, ...]
    fastest = min((w for w in ways if not w.is_pinned), key=lambda w: w.seconds).rules
    return fastest


def stages(name: str, folder: Path) -> dict[str, Any]:
    session = _look(name)
    source = session.source.whole()
    batch = session.request.batch
    steps = {side: live._applied(session, source, folder / f"{side}.plan.toml") for side in SIDES}
    losses = [[float(step.live(batch)) for _ in range(3)] for step in steps.values()]
    sides = {side: partial(step.live, batch) for side, step in steps.items()}
    seconds = in_turn(sides, STEPS, warm_up=WARM_UP)
    alone = _alone(steps["slots"], batch)
    return {"seconds": {**seconds, "alone": alone}, "same": losses[0] == losses[1]}


def _alone(step: Step, batch: Any) -> list[float]:
    """Return the computing seconds of the busier rank in each step, without waiting."""
    found = []
    for _ in range(TURNS):
        begin, before = time.perf_counter(), step.traffic_counter.total()
        step.live(batch)
        took, after = time.perf_counter() - begin, step.traffic_counter.total()
        busy = torch.tensor(took - (after.waited - before.waited), dtype=torch.float64)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        found.append(float(busy))
    return found


def work(what: str, folder: Path, rank: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    found = messages(folder, rank) if what == "messages" else stages(what, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
