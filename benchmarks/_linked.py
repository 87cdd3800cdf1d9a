"""Runs ranks on hosts of their own, and gives the measured rates of their link to a planner.

Not for making hosts: see hosts.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.hosts import Hosts

# The file that the first rank makes when all ranks are ready; they wait until it is removed.
READY = "ready"


def run_on(
    pair: Hosts,
    folder: Path,
    commands: Sequence[Sequence[str]],
    *,
    when_ready: Callable[[], None] = lambda: None,
) -> None:
    """Run the Python command of each rank on its host; call ``when_ready`` when they are ready."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [pair.start(n, [sys.executable, *own], environ) for n, own in enumerate(commands)]
    codes: list[int | None] = [None]
    while None in codes:
        if (folder / READY).exists():
            when_ready()
            (folder / READY).unlink()
        time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
        if any(codes):  # the others would wait for the failed one
            for rank in ranks:
                rank.kill()
            codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"{folder.name}: ranks ended with {codes}")


def know_link(pair: Hosts, folder: Path, *, ranks: int) -> None:
    """Measure the link and write it to the cost cache, in place of the loopback's.

    The measurement is valid for this link only, so callers must set STEELYARD_CACHE to a file of
    their own.
    """
    from steelyard.measure.cache import CostCache
    from steelyard.measure.links.link_fit import fitted
    from steelyard.measure.links.local_ranks import command_of
    from steelyard.measure.links.probe import context_of

    commands = [command_of(rank, folder=str(folder), num_ranks=ranks) for rank in range(ranks)]
    run_on(pair, folder, commands)
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    CostCache().write_rates(context_of(ranks), fitted(said))
    (folder / "rendezvous").unlink(missing_ok=True)
