"""The profiler: whether another one records in this process.

Not for profiling.
"""

import gc
from typing import Any

import torch


def profiler_is_on(*, is_quick: bool = False) -> bool:
    """Another profiler records, or is prepared to record, in this process.

    torch 2.13 has one session for a process. A second profiler takes the events of a first that
    records; where the first is only prepared (the warm-up of a schedule), the process crashes.
    That one is prepared stands in the Python object alone, so that is looked for, in a walk over
    all objects of some 50 ms. An ``is_quick`` look leaves it out where no schedule has begun, or
    another one has ended since.
    """
    if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
        return True
    has_begun = "ProfilerStep" in torch.autograd.profiler.KinetoStepTracker._step_dict
    if is_quick and not has_begun:
        return False
    sessions = _instances(torch.autograd.profiler.profile)
    if any(getattr(s, "entered", False) and s.kineto_results is None for s in sessions):
        return True
    # With acc_events=True one session is prepared again, and still has its earlier results.
    if not has_begun:
        return False
    warming = torch.profiler.ProfilerAction.WARMUP
    schedules = _instances(torch.profiler.profile)
    return any(s.acc_events and s.current_action is warming for s in schedules)


def _instances(kind: type) -> list[Any]:
    """Those that live, of ``kind`` and of what is derived from it."""
    kinds: list[type] = [kind]
    for each in kinds:
        derived: list[type] = type.__subclasses__(each)
        kinds += [k for k in derived if k not in kinds]
    return [x for x in gc.get_referrers(*kinds) if issubclass(type(x), kind)]
