"""Compares the search with CP-SAT on small real steps: the fastest plan for the same peak.

The steps are blocks and short stacks of blocks, at declared costs. CP-SAT starts from the plan
that the search found. It may run each operator that a plan may recompute up to twice, before any
line of the backward pass, and may keep or drop each value at any time: more than a plan can
express. The figure is the worst of (seconds of the search's plan) / (seconds of CP-SAT's best
plan) - 1 over models and peaks. The proven bound on that share is printed too. The formulation
uses retention intervals (Bartan et al., Moccasin, ICML 2023). Needs two cores and no GPU.

    python benchmarks/exact.py [SECONDS FOR EACH PROOF]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from ortools.sat.python import cp_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steelyard.search.pareto_front import Point
from steelyard.search.single.estimator.fast_estimator import FastEstimator
from steelyard.search.single.step_plans import Explored
from tests.harness import Trial, trial_of
from tests.zoo.case import next_token_loss, tokens
from tests.zoo.own import GPT

# Limits as shares of the range from the least peak that the search found to the unplanned peak.
SHARES = (0.0, 0.1, 0.3, 0.6)
# Models of the zoo, in addition to GPTs of one and two blocks.
ZOO = ("resnet_bn", "convnet_bn", "hf_convnext", "hf_vit", "moe")
MOST_OVER = 0.02
_SECONDS, _WORKERS = 30.0, 2
_TIMES = 2
_PICO = 1e12


def main() -> None:
    torch.set_num_threads(1)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else _SECONDS
    figures = []
    for name, trial in trials():
        explored = trial.searching(trial.costs()).explored()
        for share in SHARES:
            least, plain = explored.least.peak_bytes, explored.plain.peak_bytes
            limit = round(least + share * (plain - least))
            point = explored.within(limit)
            assert point is not None
            proof = Proof(explored.estimator, limit)
            proof.begin_with(explored.choices_of(point))
            best, bound = proof.seconds(seconds, known=point)
            tell(name, share, explored, point, best, bound)
            over = point.seconds / best - 1
            figures.append(
                {
                    "name": f"{name}, {share:.0%} of the way: seconds over CP-SAT's, less one",
                    "value": round(over, 4),
                    "interval": None,
                    "target": MOST_OVER,
                    "ok": over <= MOST_OVER,
                    "proven within": round(point.seconds / bound - 1, 4),
                }
            )
    worst = max(figures, key=lambda f: f["value"])
    print(json.dumps({**worst, "ok": all(f["ok"] for f in figures), "figures": figures}))


def trials() -> Iterator[tuple[str, Trial]]:
    torch.manual_seed(0)
    words = tokens(4, 128, 256)
    for layers, fused in ((1, True), (1, False), (2, True)):
        model = GPT(
            layers=layers, width=128, heads=4, vocabulary=256, length=128, dropout=0.1, fused=fused
        )
        kind = "fused" if fused else "attention spelled out"
        yield f"GPT of {layers}, {kind}", Trial(model, next_token_loss, words)
    for name in ZOO:
        yield name, trial_of(name)


def tell(
    name: str, share: float, explored: Explored, point: Point, best: float, bound: float
) -> None:
    plain = explored.plain.seconds
    print(
        f"{name} ({len(explored.estimator.units)} operators) at {share:.0%}: "
        f"x{point.seconds / plain:.4f}; CP-SAT x{best / plain:.4f}, "
        f"no less than x{bound / plain:.4f}",
        file=sys.stderr,
    )


class Proof:
    """The CP-SAT model of one step under one peak: an interval for each value and each copy.

    Time is counted so that every operator has a place before each line of the backward pass, in the
    order of the operators.
    """

    def __init__(self, tally: FastEstimator, limit_bytes: int) -> None:
        self._tally = tally
        self._model = cp_model.CpModel()
        self._first = tally.backward_start
        self._room = len(tally.units) + 1
        self._end = self._time(tally.num_lines)
        self._intervals: list[cp_model.IntervalVar] = []
        self._demands: list[int] = []
        self._copies: dict[int, list[_Copy]] = {}
        for number in range(len(tally.units)):
            self._copies[number] = [self._copy(number, turn) for turn in range(_TIMES)]
        self._hold_values()
        self._hold_workspace()
        capacity = limit_bytes - tally.resident_bytes
        self._model.add_cumulative(self._intervals, self._demands, capacity)

    def seconds(self, limit: float, *, known: Point) -> tuple[float, float]:
        """Return the seconds of the fastest step that was found, and the proven lower bound."""
        tally = self._tally
        runs = [(c.runs, number) for number, own in self._copies.items() for c in own]
        prices = [round(tally.seconds_of([number]) * _PICO) for _, number in runs]
        more = sum(price * run for price, (run, _) in zip(prices, runs, strict=True))
        self._model.minimize(more)
        self._model.add(more <= round((known.seconds - tally.plain_seconds) * _PICO) + len(runs))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit
        solver.parameters.num_workers = _WORKERS
        status = solver.solve(self._model)
        assert status != cp_model.INFEASIBLE, "the model excludes the plan that the search found"
        found = known.seconds
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = tally.plain_seconds + solver.objective_value / _PICO
        return found, tally.plain_seconds + max(0.0, solver.best_objective_bound) / _PICO

    def begin_with(self, choice: frozenset[int]) -> None:
        """Give the solver the plan that the search found as a hint."""
        copies = self._tally.copies(choice)
        turns: dict[int, int] = defaultdict(int)
        for position, (number, line) in enumerate(zip(copies.units, copies.lines, strict=True)):
            turn = turns[number]
            turns[number] += 1
            if turn < _TIMES:
                self._model.add_hint(self._copies[number][turn].runs, 1)
                self._model.add_hint(self._copies[number][turn].line, line - position)
        for number, own in self._copies.items():
            for copy in own[turns[number] :]:
                self._model.add_hint(copy.runs, 0)

    def _time(self, line: int) -> int:
        late = max(0, line - self._first)
        return line if line < self._first else self._first + late * self._room + self._room - 1

    def _copy(self, number: int, turn: int) -> _Copy:
        model, first, room = self._model, self._first, self._room
        runs = model.new_bool_var(f"run {number}.{turn}")
        line = model.new_int_var(first, self._tally.num_lines - 1, f"line {number}.{turn}")
        return _Copy(runs, line, first + (line - first) * room + number)

    def _hold_values(self) -> None:
        tally = self._tally
        reads: dict[int, list[_Read]] = defaultdict(list)
        for number, unit in enumerate(tally.units):
            for copy in self._copies[number]:
                for storage in unit.reads + unit.touches:
                    reads[storage].append(_Read(copy.time, copy.time, copy.runs))
        for storage in tally.storages:
            stays = storage in tally.persistent
            if storage not in tally.unit_of:
                last = max(tally.forward_last[storage], tally.backward_last[storage])
                end = self._end if stays else self._time(last)
                self._keep(storage, end, [] if stays else reads[storage])
                continue
            for begin, end in tally.backward_reads[storage]:
                reads[storage].append(_Read(self._time(begin), self._time(end), None))
            self._make_again(storage, reads[storage])

    def _keep(self, storage: int, least_end: int, reads: list[_Read]) -> None:
        """Add one interval for a value that lasts as long as anything reads it."""
        begin = self._time(self._tally.born[storage])
        end: cp_model.LinearExprT = least_end
        if reads:
            end = self._model.new_int_var(least_end, self._end, f"end {storage}")
            for read in reads:
                read.only_if(self._model.add(end >= read.end))
        self._hold(storage, begin, end, None)

    def _make_again(self, storage: int, reads: list[_Read]) -> None:
        """Add intervals for a value and its copies; one of them must serve each read."""
        tally, model = self._tally, self._model
        born, forward_last = tally.born[storage], tally.forward_last[storage]
        lives: list[tuple[cp_model.LinearExprT, cp_model.IntVar, cp_model.IntVar | None]] = []
        end = model.new_int_var(self._time(forward_last), self._end, f"end {storage}")
        lives.append((self._time(born), end, None))
        self._hold(storage, self._time(born), end, None)
        for turn, copy in enumerate(self._copies[tally.unit_of[storage]]):
            end = model.new_int_var(0, self._end, f"end {storage}.{turn}")
            lives.append((copy.time, end, copy.runs))
            self._hold(storage, copy.time, end, copy.runs)
        for read in reads:
            served = []
            for begin, end, runs in lives:
                by = model.new_bool_var("")
                served.append(by)
                model.add(end >= read.end).only_enforce_if(by)
                model.add(begin <= read.begin - 1).only_enforce_if(by)
                if runs is not None:
                    model.add_implication(by, runs)
            if read.runs is None:
                model.add_exactly_one(served)
            else:
                model.add(sum(served) == read.runs)

    def _hold_workspace(self) -> None:
        tally = self._tally
        for line, nbytes in enumerate(tally.workspace.tolist()):
            self._hold_for(round(nbytes), self._time(line), self._time(line), None)
        for number, unit in enumerate(tally.units):
            for copy in self._copies[number]:
                self._hold_for(unit.workspace_bytes, copy.time, copy.time, copy.runs)

    def _hold(
        self,
        storage: int,
        begin: cp_model.LinearExprT,
        end: cp_model.LinearExprT,
        runs: cp_model.IntVar | None,
    ) -> None:
        self._hold_for(self._tally.nbytes[storage], begin, end, runs)

    def _hold_for(
        self,
        nbytes: int,
        begin: cp_model.LinearExprT,
        end: cp_model.LinearExprT,
        runs: cp_model.IntVar | None,
    ) -> None:
        if not nbytes:
            return
        model = self._model
        size = model.new_int_var(1, self._end + 1, "")
        after = end + 1
        if runs is None:
            interval = model.new_interval_var(begin, size, after, "")
        else:
            interval = model.new_optional_interval_var(begin, size, after, runs, "")
        self._intervals.append(interval)
        self._demands.append(nbytes)


class _Copy:
    def __init__(
        self, runs: cp_model.IntVar, line: cp_model.IntVar, time: cp_model.LinearExprT
    ) -> None:
        self.runs = runs
        self.line = line
        self.time = time


class _Read:
    """The interval in which a value must exist, and the copy that reads it.

    ``runs`` is None if the program itself reads it.
    """

    def __init__(
        self,
        begin: cp_model.LinearExprT,
        end: cp_model.LinearExprT,
        runs: cp_model.IntVar | None,
    ) -> None:
        self.begin = begin
        self.end = end
        self.runs = runs

    def only_if(self, constraint: cp_model.Constraint) -> None:
        if self.runs is not None:
            constraint.only_enforce_if(self.runs)


if __name__ == "__main__":
    main()
