"""One of two ranks on two hosts that meet at rank 0's port; it prints the outcome.

See test_secret.py.
"""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist

from steelyard.errors import SteelyardError
from steelyard.run.launch.rendezvous import joined
from steelyard.run.launch.environment import rank_info
from tests.system.launch.test_launcher import listening


def main() -> None:
    who = rank_info(os.environ)
    try:
        with joined(who, {"plan": "7f3c"}, timeout_seconds=60, start_seconds=60):
            total = torch.tensor(float(who.rank + 1))
            dist.all_reduce(total)
            said = {"total": float(total), "listens": sorted(listening([os.getpid()]))}
    except SteelyardError as error:
        said = {"error": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
