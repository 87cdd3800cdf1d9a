"""torch.distributed internals: the flight recorder and torchrun's agent.

Not for process groups, which are public.
"""

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from steelyard._torch.private_names import require


def exchanges_issued() -> list[dict[str, Any]]:
    """Return the flight recorder's entries of this process, oldest first, including gloo's."""
    require("distributed")
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
    """Return torchrun's agent for this host, calling ``have_ended`` before each worker check.

    ``have_ended`` receives the process id of each rank. The unmodified agent reaps the first rank
    that ended. It then waits up to 30 seconds for ranks that are stopped, or that hang in a
    collective and ignore SIGTERM. This time cannot be configured.
    """
    require("distributed")
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Supervised(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            if not have_ended({w.global_rank: w.id for w in worker_group.workers}):
                return RunResult(state=WorkerState.HEALTHY)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

    return Supervised(spec, logs, shutdown_timeout=shutdown_seconds)
