"""The seconds of all micro-batches of a pipeline, from the passes of its stages.

A test verifies that they equal those of the replayed schedule (replay.py). For 1F1B there is a
closed form; for interleaved stages, the table is replayed for its times only. Messages count as
work of both ends. Not for memory or messages in flight: see replay.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.ir.pipeline_schedule import Action, ActionKind, schedule_order

# The seconds of the forward and the backward pass of one micro-batch.
Passes = tuple[float, float]


def pipeline_seconds(layout: ParallelLayout, passes: Sequence[Passes]) -> float:
    """Return the time at which the last action of the schedule ends.

    ``passes`` are those of the stages in the order of the model: first one run of blocks of each
    rank, then the next.
    """
    if layout.virtual == 1:
        return _one_forward_one_backward(layout.micro_batches, passes)
    seconds = [seconds for pair in passes for seconds in pair]
    ends = [0.0]
    for index, before, source in _table(layout.pipeline, layout.virtual, layout.micro_batches):
        free, arrived = ends[before], ends[source]
        ends.append((free if free > arrived else arrived) + seconds[index])
    return max(ends)


def _one_forward_one_backward(micro_batches: int, passes: Sequence[Passes]) -> float:
    """Return the longest path through the table of 1F1B.

    A stage with ``w`` others behind it begins with ``w + 1`` forward passes and ends with as many
    backward passes; in between it alternates. A longest path stays in one stage while that stage
    alternates. Its part before that is the longest path to the stage's first backward pass: either
    through forward passes alone, at the pace of the slowest stage so far, or through the first
    backward pass of the next stage. Its part after that is the same, backwards in time. With too
    few micro-batches, a stage never alternates, and its path takes at most one of the two detours
    behind it.
    """
    last, most = len(passes) - 1, micro_batches - 1
    forward_so_far = [*accumulate(forward for forward, _ in passes)]
    backward_so_far = [*accumulate(backward for _, backward in passes)]
    slowest_forward = [*accumulate((forward for forward, _ in passes), max)]
    slowest_backward = [*accumulate((backward for _, backward in passes), max)]
    to_first = from_last = longest = 0.0
    for stage in range(last, -1, -1):
        ahead = min(last - stage, most)
        filling = forward_so_far[stage] + ahead * slowest_forward[stage]
        draining = backward_so_far[stage] + ahead * slowest_backward[stage]
        if stage < last:
            forward, backward = passes[stage + 1]
            to_first, from_last = (
                max(filling, to_first + backward),
                max(draining, from_last + forward),
            )
        else:
            to_first, from_last = filling, draining
        if ahead < most or stage == last:
            alternating = (most - ahead) * sum(passes[stage])
            longest = max(longest, to_first + alternating + from_last)
        else:
            longest = max(longest, filling + from_last, to_first + draining)
    return longest


def least_pipeline_seconds(layout: ParallelLayout, *, slowest: float, total: float) -> float:
    """Return a lower bound for all sets of stages with the same slowest stage and the same sum.

    Each rank has one stage. With more micro-batches than ranks, the path of ``pipeline_seconds``
    through the slowest stage takes at least ``(m - p - 1) slowest + 2 total``, which is the time of
    equal stages.

    With fewer micro-batches, the path through the last ``m - 1`` stages takes their time in
    addition to the total. Each of the first ``p - m + 1`` stages ends all its forward passes before
    the last micro-batch goes on to the end and back, and has all its backward passes left when the
    first one is back: it adds ``m - 1`` times the longer of its passes to the total. This is at
    least half of its time, and the slowest of these stages takes at least an equal share of what
    the last ``m - 1`` stages leave. Both paths are shortest if these take ``(m - 1) / (2 p - m +
    1)`` of the total.
    """
    ranks, micro_batches = layout.pipeline, layout.micro_batches
    slowest = max(slowest, total / ranks)
    least = micro_batches * slowest
    if micro_batches > ranks:
        return max(least, (micro_batches - ranks - 1) * slowest + 2 * total)
    return max(least, total * 2 * ranks / (2 * ranks - micro_batches + 1))


def path_weights(layout: ParallelLayout, *, backward_share: float) -> list[Passes]:
    """Return weights of all passes: no pipeline takes less than the weighted sum of its passes.

    There are no more micro-batches than ranks. The weights average two paths: one through the last
    ``m - 1`` stages, and one through all backward passes of a stage before them (see
    ``least_pipeline_seconds``). If ``backward_share`` is the share of the backward pass in the time
    of a stage, each stage weighs the same, whether it is early or late. The weights are valid for
    any share.
    """
    late = layout.micro_batches - 1
    early = layout.pipeline - late
    more = late / (early + late * backward_share)
    early_stage = 1.0, 1.0 + more
    return [early_stage] * early + [(1.0 + more * backward_share,) * 2] * late


def least_interleaved_seconds(
    layout: ParallelLayout, *, slowest: float, last: float, first_runs: float
) -> float:
    """Return a lower bound if each rank has several stages.

    ``slowest`` and ``last`` are the seconds of all stages of the slowest and of the last rank. The
    last rank begins with its first stage, after the first stages of all other ranks
    (``first_runs``), and ends with it, before theirs.
    """
    return max(layout.micro_batches * slowest, layout.micro_batches * last + first_runs)


@lru_cache(maxsize=32)
def _table(num_ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[int, int, int], ...]:
    """Return the actions in an order in which each one comes after those that it waits for.

    An action consists of three indices: that of its seconds, that of the previous action on its
    rank, and that of the action on a neighbouring stage whose result it reads. Index 0 is the
    beginning of the step.
    """
    order = schedule_order(num_ranks=num_ranks, micro_batches=micro_batches, virtual=virtual)
    last = num_ranks * virtual - 1
    number_of: dict[Action, int] = {}
    before, pending = [0] * num_ranks, [[*reversed(actions)] for actions in order.ranks]
    found: list[tuple[int, int, int]] = []
    while any(pending):
        size = len(found)
        for rank, actions in enumerate(pending):
            while actions:
                action = actions[-1]
                is_back = action.work is ActionKind.BACKWARD
                stage = action.stage + (1 if is_back else -1)
                source = 0
                if 0 <= stage <= last:
                    read = Action(stage=stage, work=action.work, micro_batch=action.micro_batch)
                    if read not in number_of:
                        break
                    source = number_of[read]
                actions.pop()
                found.append((2 * action.stage + is_back, before[rank], source))
                before[rank] = number_of[action] = len(found)
        assert len(found) > size, "actions of the schedule wait for each other"
    return tuple(found)
