"""Captures and prices a step on ranks of this machine, the same in all processes that plan for it.

Not for choosing or running a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def capture_and_price(make: Callable[[], Any], optimizer: Any, *, ranks: int, title: str) -> Any:
    import steelyard as sy
    from steelyard.planner.session import PlanRequest
    from steelyard.plans.budget import Budget

    torch.manual_seed(0)
    model, loss, batch = make()
    return PlanRequest(
        model=model, loss=loss, batch=batch, optimizer=optimizer, budget=Budget(),
        cluster=sy.Cluster.here(ranks=ranks), runner="python", title=title,
        on_progress=lambda _: None,
    ).capture_and_price()  # fmt: skip
