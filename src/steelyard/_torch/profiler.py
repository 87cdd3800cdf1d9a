"""Profiler internals: detection of another active profiler in this process.

Not for profiling.
"""

import gc
from typing import Any

import torch


def profiler_is_on(*, is_quick: bool = False) -> bool:
    """True if another profiler records, or is prepared to record, in this process.

    torch 2.13 has one session per process. If a first profiler is recording, a second one takes its
    events. If the first is only prepared (the warm-up of a schedule), the process crashes. Only the
    Python object shows that a profiler is prepared, so this searches all objects, which takes some
    50 ms. An ``is_quick`` check skips the search if the step tracker lists no schedule; that is the
    case if none has begun, or if another one has ended since.
    """
    if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
        return True
    has_begun = "ProfilerStep" in torch.autograd.profiler.KinetoStepTracker._step_dict
    if is_quick and not has_begun:
        return False
    sessions = _instances(torch.autograd.profiler.profile)
    if any(getattr(s, "entered", False) and s.kineto_results is None for s in sessions):
        return True
    # With acc_events=True, a session that is prepared again still has its earlier results.
    if not has_begun:
        return False
    warming = torch.profiler.ProfilerAction.WARMUP
    schedules = _instances(torch.profiler.profile)
    return any(s.acc_events and s.current_action is warming for s in schedules)


def _instances(kind: type) -> list[Any]:
    """Return the live objects of ``kind`` and of its subclasses."""
    kinds: list[type] = [kind]
    for each in kinds:
        derived: list[type] = type.__subclasses__(each)
        kinds += [k for k in derived if k not in kinds]
    return [x for x in gc.get_referrers(*kinds) if issubclass(type(x), kind)]
