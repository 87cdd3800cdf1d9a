"""torch.distributed: the flight recorder and torchrun's agent.

Not for process groups, which are public.
"""

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch


def exchanges_issued() -> list[dict[str, Any]]:
    """What the flight recorder kept of this process's exchanges, oldest first; gloo's too."""
    dump = attrgetter("_dump_fr_trace_json")(torch._C._distributed_c10d)
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    return entries


def supervised_agent(
    spec: Any,
    logs: Any,
    *,
    have_ended: Callable[[Mapping[int, int]], bool],
    shutdown_seconds: int,
) -> Any:
    """torchrun's agent for this host, which asks before it looks at its workers itself.

    ``have_ended`` is given the process of each rank. Left to itself the agent reaps whoever ended
    first, then waits up to 30 seconds, a figure that cannot be set, for ranks that wait in an
    exchange and heed no SIGTERM, or that are stopped.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Supervised(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if not have_ended({w.global_rank: w.id for w in worker_group.workers}):
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

    return Supervised(spec, logs, shutdown_timeout=shutdown_seconds)
