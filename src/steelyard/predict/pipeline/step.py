"""Prices a pipelined step: its replayed schedule, the bytes of each rank, and the peak's tensors.

Not for the schedule (see ir/pipeline_schedule.py) or for the cost of a stage (see stage_cost.py).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from steelyard.ir.collective import GLOO, GLOO_GETS, GLOO_SENDS, NCCL, Collective
from steelyard.ir.graph import Graph, Phase, Role
from steelyard.ir.metrics import Estimate, Metrics
from steelyard.ir.pipeline_schedule import Action, ActionKind
from steelyard.ir.program import Pipeline, Program
from steelyard.plans.peak_memory import LiveTensor, PeakMemory, Timeline
from steelyard.plans.plan import Prediction
from steelyard.plans.trace_span import DEVICE, Span
from steelyard.predict.cost_table import CostTable
from steelyard.predict.liveness import liveness
from steelyard.predict.pipeline.gradient_reduction import GradientReductions, Trained
from steelyard.predict.pipeline.messages import StageMessages
from steelyard.predict.pipeline.rank_memory import RankBytes, peak_memory_of
from steelyard.predict.pipeline.replay import GIVE_GRADIENTS, Replay, StageCost, replay
from steelyard.predict.pipeline.rng_cost import STATE_BYTES, skipping_seconds, states_bytes
from steelyard.predict.pipeline.spans import action_spans
from steelyard.predict.pipeline.stage_cost import graphs_by_action, stage_cost, with_seconds
from steelyard.predict.timeline import Pick, Playing, durations, high, low, play, value

# Relative error of a predicted peak of a pipeline: benchmarks/live.py found errors up to 4 %.
_PEAK_SHARE = 0.05


def pipelined(program: Program, pipeline: Pipeline, costs: CostTable) -> "PipelinePrediction":
    return PipelinePrediction(program, pipeline, costs)


class PipelinePrediction:
    """The prediction of a pipelined program; each figure is that of the rank with the largest."""

    def __init__(self, program: Program, pipeline: Pipeline, costs: CostTable) -> None:
        self._program, self._pipeline, self._costs = program, pipeline, costs
        self._graph, self._stages = pipeline.stages.graph, pipeline.stages.stages
        self._order, self._rank_of = pipeline.order, pipeline.order.rank_of
        self._messages = StageMessages(program.layout, pipeline, costs)
        self._stage_costs = [
            self._messages.without_slots(stage, stage_cost(stage, pipeline.stages.graph, costs))
            for stage in self._stages
        ]
        self._programs: dict[Graph, Program] = {}
        self._reductions = self._gradient_reductions()
        self._replay, self._ends = self._replayed(value, value)

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_peak_bytes)

    @property
    def rank_peak_bytes(self) -> tuple[int, ...]:
        """The peak bytes of the ranks of one pipeline, in order."""
        return tuple(rank.nbytes for rank in self._ranks)

    @property
    def seconds(self) -> float:
        return max(self._ends)

    @cached_property
    def step(self) -> Estimate:
        """The seconds of the step.

        For the bounds, all ranks and links are as fast as they may be, or as slow.
        """
        return Estimate(
            value=max(self._ends),
            low=max(self._replayed(low, low)[1]),
            high=max(self._replayed(high, high)[1]),
        )

    def prediction(self) -> Prediction:
        worst = max(self._ranks, key=lambda rank: rank.nbytes)
        alone = [max(self._replayed(pick, None)[1]) for pick in (value, low, high)]
        computation = Estimate(value=alone[0], low=alone[1], high=alone[2])
        waiting = max(0.0, self.step.value - computation.value)
        return Prediction(
            metrics=Metrics(
                memory_bytes=Estimate.within(worst.nbytes, share=_PEAK_SHARE),
                communication_bytes=Estimate.exactly(max(self._sent_bytes)),
                communication_seconds=Estimate.within(max(self._sending), share=0.5),
                exposed_communication_seconds=Estimate(
                    value=waiting,
                    low=min(waiting, max(0.0, self.step.low - computation.low)),
                    high=max(waiting, self.step.high - computation.high),
                ),
                computation_seconds=computation,
                step_seconds=self.step,
            ),
            peak=self._peak_memory(worst),
            flops=self.flops,
            timeline=self._timeline(worst),
        )

    @property
    def flops(self) -> int:
        """The FLOPs of the rank that computes the most."""
        return max(self._flops)

    @property
    def _rank_of_loss(self) -> int:
        return self._rank_of[len(self._stages) - 1]

    @property
    def bubble(self) -> float:
        """The share of their time in which ranks are idle."""
        return self._replay.bubble

    @cached_property
    def _ranks(self) -> list[RankBytes]:
        return [self._rank(number) for number in range(len(self._order.ranks))]

    def _rank(self, number: int) -> RankBytes:
        update = self._pipeline.updates[number] if self._pipeline.updates else None
        names, groups = self._pipeline.held(number), self._program.layout.data
        own = {self._storage_of[name] for name in names} | self._replicated
        parameters, buffers = (
            sum(self._graph.storages[s].nbytes for s in own if self._graph.storages[s].role is role)
            for role in (Role.PARAMETER, Role.BUFFER)
        )
        # Parameters that no stage uses are sharded too, and are never gathered.
        others = sum(
            self._graph.storages[s].nbytes for s in self._replicated & self._sharded_storages
        )
        gathered = self._gathered(number)
        parameters -= (sum(gathered) + others) * (groups - 1) // groups
        trained = self._pipeline.trained(number)
        in_shares = sum(self._gradients[n] for n in trained if n in self._program.in_shares)
        state = update.graph.resident_bytes(Role.STATE) if update is not None else 0
        draws = any(node.is_random for node in self._graph.nodes)
        return RankBytes(
            number=number,
            parameters=parameters,
            buffers=buffers,
            # The global batch stays allocated while its micro-batches are processed.
            batch=self._program.batch_bytes,
            others=self._graph.resident_bytes(Role.CONSTANT, Role.TANGENT)
            + self._messages.slots_bytes(number)
            + states_bytes(self._stages, self._order, number)
            # Replicas draw different numbers, and the state of the outer generator is saved in the
            # meantime.
            + (STATE_BYTES if draws and self._program.layout.data > 1 else 0),
            state=state,
            gradients=sum(self._gradients[name] for name in trained)
            - in_shares * (groups - 1) // groups,
            gathered=sum(gathered),
            pass_bytes=sum(gathered) + self._replay.peak_bytes[number],
            update=None if update is None else liveness(update, self._costs),
        )

    @cached_property
    def _storage_of(self) -> dict[str, int]:
        """The storage of each parameter and buffer, by name."""
        return {
            node.name: tensor.storage
            for node in self._graph.inputs()
            for tensor in node.outputs
            if self._graph.storages[tensor.storage].role in (Role.PARAMETER, Role.BUFFER)
        }

    @cached_property
    def _sharded_storages(self) -> frozenset[int]:
        return frozenset(self._storage_of[name] for name in self._program.in_shares)

    def _gathered(self, number: int) -> tuple[int, ...]:
        """Return the unsharded sizes of this rank's sharded weights."""
        own = sorted(self._pipeline.held(number) & self._program.in_shares)
        return tuple(self._graph.storages[self._storage_of[name]].nbytes for name in own)

    @cached_property
    def _replicated(self) -> frozenset[int]:
        """The storages that no stage uses, which all ranks hold."""
        ranks = range(len(self._order.ranks))
        used = {self._storage_of[name] for r in ranks for name in self._pipeline.held(r)}
        return frozenset(self._storage_of.values()) - used

    @cached_property
    def _gradients(self) -> dict[str, int]:
        outputs = (o for stage in self._stages for o in stage.backward.outputs)
        return {
            o.target: sum(t.nbytes for t in self._graph.by_name[o.target].outputs)
            for o in outputs
            if o.target.startswith("parameter:")
        }

    def _replayed(self, device: Pick, link: Pick | None) -> tuple[Replay, list[float]]:
        """Return the replay, and the time at which each rank is done, including its update.

        Without ``link``, all exchanges are free.
        """
        whole = device(self._costs.whole_step_in(self._program.parts))
        stages: list[StageCost] = [
            self._messages.with_overhead(stage, link, with_seconds(
                cost, stage, self._graph,
                seconds=lambda part: self._work_seconds(part, whole, device, link),
                send_seconds_of=lambda sizes: self._messages.transfer_seconds(sizes, link),
            ))
            for cost, stage in zip(self._stage_costs, self._stages, strict=True)
        ]  # fmt: skip
        skipping = skipping_seconds(
            self._stages, self._order, lambda n: whole * device(self._costs.seconds(n))
        )
        delayed = [_delayed(s, p) for s, p in zip(stages, skipping)]
        played = replay(
            self._order,
            delayed,
            disturbs=0.0 if link is None else self._messages.disturbs,
            is_by_host=self._pipeline.is_by_host and not self._pipeline.is_pinned,
        )
        ends = [ranked[-1].end_seconds for ranked in played.ranks]
        taken = (lambda _: 0.0) if link is None else lambda c: link(self._costs.exchange_seconds(c))
        begin = self._reductions.begin(taken)
        ends = self._reductions.ends([begin + end for end in ends], taken)
        loss_known = ends[self._rank_of_loss] + self._reductions.loss_seconds(taken)
        loss_known += self._messages.send_seconds([8], link)
        ends = [max(end, loss_known) for end in ends]
        updates = [device(durations(u, self._costs).step) for u in self._pipeline.updates]
        return played, [end + u for end, u in zip(ends, updates)] if updates else ends

    def _work_seconds(self, part: Graph, whole: float, device: Pick, link: Pick | None) -> float:
        """Return the seconds of one action.

        Tensor-parallel stages wait for their exchanges, so they are simulated line by line.
        """
        if not part.collectives:
            nodes = (n for n in part.nodes if not n.is_input)
            return whole * sum(device(self._costs.seconds(n)) for n in nodes)
        if part not in self._programs:
            self._programs[part] = Program.plain(part)
        playing = Playing(self._costs, whole, device, link or _free)
        return play(self._programs[part], self._costs, playing=playing).seconds

    def _gradient_reductions(self) -> GradientReductions:
        shared = []
        for name, stages in self._pipeline.stages.shared:
            ranks = frozenset(self._rank_of[index] for index in stages)
            if len(ranks) > 1:
                shared.append((ranks, self._gradients[name]))
        numbers = range(len(self._order.ranks))
        loss = self._graph.by_name[self._program.loss].outputs[0]
        return GradientReductions(
            layout=self._program.layout,
            shared=tuple(shared),
            trained=tuple(map(self._trained_bytes, numbers)),
            loss_bytes=loss.nbytes,
            gathered=tuple(map(self._gathered, numbers)),
            transport=NCCL if self._pipeline.is_by_host else GLOO,
        )

    def _trained_bytes(self, number: int) -> tuple[Trained, ...]:
        in_shares = self._program.in_shares
        names = self._pipeline.trained(number)
        return tuple(Trained(self._gradients[n], is_shared=n in in_shares) for n in names)

    @cached_property
    def _sent_bytes(self) -> list[int]:
        sent, repeats = [0] * len(self._order.ranks), self._program.repeats
        for rank, other, sizes, _ in self._messages.edges():
            sent[rank] += repeats * sum(sizes)
            if not self._messages.slots:  # slots need none of gloo's protocol messages
                sent[rank] += repeats * GLOO_SENDS * len(sizes)
                sent[other] += repeats * GLOO_GETS * len(sizes)
        for rank, exchanged in enumerate(self._exchanged):
            sent[rank] += sum(times * c.wire_bytes for c, times in exchanged.items())
        for rank in range(len(sent)):
            sent[rank] += sum(c.wire_bytes for c in self._reductions.collectives_of(rank))
            sent[rank] += self._reductions.loss_broadcast_bytes(rank, self._rank_of_loss)
        sent[self._rank_of_loss] += sum(c.wire_bytes for c in self._reductions.loss_collectives())
        return sent

    @cached_property
    def _sending(self) -> list[float]:
        """The seconds in which each rank's messages are in flight."""
        seconds = [0.0] * len(self._order.ranks)
        for rank, _, sizes, copied in self._messages.edges():
            seconds[rank] += self._program.repeats * self._messages.communication_seconds(
                sizes, copied
            )
        for rank, exchanged in enumerate(self._exchanged):
            for collective, times in exchanged.items():
                seconds[rank] += times * self._costs.exchange_seconds(collective).value
        return [
            taken
            + sum(
                self._costs.exchange_seconds(c).value for c in self._reductions.collectives_of(rank)
            )
            for rank, taken in enumerate(seconds)
        ]

    @cached_property
    def _exchanged(self) -> list[Counter[Collective]]:
        """The collectives within each rank's stages, with their numbers of calls."""
        found: list[Counter[Collective]] = [Counter() for _ in self._order.ranks]
        if self._graph.collectives:
            works = [graphs_by_action(stage) for stage in self._stages]
            for exchanged, actions in zip(found, self._order.ranks):
                for action in actions:
                    part = works[action.stage][action.work]
                    exchanged.update(n.collective for n in part.nodes if n.collective)
        return found

    @cached_property
    def _flops(self) -> list[int]:
        flops = [0] * len(self._order.ranks)
        for stage in self._stages:
            each = sum(n.flops for part in (stage.forward, stage.backward) for n in part.nodes)
            flops[self._rank_of[stage.index]] += self._program.repeats * each
        return flops

    def _peak_memory(self, rank: RankBytes) -> PeakMemory:
        if rank.is_in_update:
            assert rank.update is not None
            update = self._pipeline.updates[rank.number]
            base = LiveTensor.of(rank.gradients, "gradients", Role.GRADIENT)
            return peak_memory_of(update, rank.update, rank, extra=[base], phase=Phase.UPDATE)
        done = self._replay.ranks[rank.number]
        number = max(range(len(done)), key=lambda i: done[i].held_bytes)
        action = done[number].action
        program = Program.plain(graphs_by_action(self._stages[action.stage])[action.work])
        trained = {d.action.stage for d in done[:number] if d.action.work in GIVE_GRADIENTS}
        gradients = sum(self._stage_costs[stage].gradient_bytes for stage in trained)
        live_bytes = liveness(program, self._costs, accumulating=action.stage in trained)
        # The bytes that were already allocated when the stage began this micro-batch.
        saved = max(0, rank.pass_bytes - rank.gathered - live_bytes.peak_bytes - gradients)
        in_flight = _micro_batches_in_flight([d.action for d in done[: number + 1]])
        what = f"saved activations of {in_flight} micro-batches"
        extra = [
            LiveTensor.of(saved, what, Role.ACTIVATION),
            LiveTensor.of(gradients, "accumulated gradients", Role.GRADIENT),
            LiveTensor.of(rank.gathered, "gathered weights", Role.PARAMETER),
        ]
        phase = Phase.FORWARD if action.work is ActionKind.FORWARD else Phase.BACKWARD
        return peak_memory_of(program, live_bytes, rank, extra=extra, phase=phase)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of each rank's actions, the waits in between, and its update."""
        found: list[Span] = []
        for rank, done in enumerate(self._replay.ranks):
            found += action_spans(rank, done, waiting_for="waiting for another rank")
            if self._pipeline.updates:
                seconds = durations(self._pipeline.updates[rank], self._costs).step.value
                begin = self._ends[rank] - seconds
                found.append(
                    Span(rank=rank, stream=DEVICE, name="update", where="optimizer",
                         begin_seconds=begin, seconds=seconds)
                )  # fmt: skip
        return tuple(found)

    def _timeline(self, rank: RankBytes) -> Timeline:
        done = self._replay.ranks[rank.number]
        phases = [
            Phase.FORWARD if d.action.work is ActionKind.FORWARD else Phase.BACKWARD for d in done
        ]
        begins = [d.begin_seconds for d in done]
        nbytes = [rank.resident + rank.gathered + d.held_bytes for d in done]
        if rank.update is not None:
            begins.append(done[-1].end_seconds)
            nbytes.append(rank.nbytes_in_update)
            phases.append(Phase.UPDATE)
        return Timeline(seconds=tuple(begins), nbytes=tuple(nbytes), phases=tuple(phases))


def _delayed(cost: StageCost, seconds: float) -> StageCost:
    """Return the same cost with a longer forward pass."""
    return replace(
        cost,
        seconds={**cost.seconds, ActionKind.FORWARD: cost.seconds[ActionKind.FORWARD] + seconds},
    )


def _micro_batches_in_flight(done: Sequence[Action]) -> int:
    """Return how many micro-batches have begun but do not have all their gradients yet."""
    begun = {(a.stage, a.micro_batch) for a in done if a.work is ActionKind.FORWARD}
    over = (ActionKind.BACKWARD, ActionKind.BACK_TO_WEIGHTS)
    ended = {(a.stage, a.micro_batch) for a in done[:-1] if a.work in over}
    return len(begun - ended)


def _free(estimate: Estimate) -> float:  # noqa: ARG001 - of what is exchanged
    return 0.0
