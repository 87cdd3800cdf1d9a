"""The work of each rank in a launcher test: exchanges, and the actions of the scenario.

``python one.py FOLDER SCENARIO SECONDS`` gives the time limit of an exchange. Results are written
into the folder, one file each.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.run.launch.environment import RankInfo, rank_info
from steelyard.run.launch.rendezvous import joined

STEPS = 6
# The rank that fails, and the step in which it fails.
CULPRIT, BREAKS_AT = 1, 3


def main(folder: Path, scenario: str, seconds: float) -> None:
    who = rank_info(os.environ)
    (folder / f"pid-{who.attempt}-{who.rank}").write_text(str(os.getpid()))
    plan = f"plan {who.rank}" if scenario == "differ" else "plan"
    with joined(who, {"plan": plan}, timeout_seconds=seconds):
        saved = folder / "step"
        first = int(saved.read_text()) if saved.exists() else 0
        for step in range(first, STEPS):
            if who.rank == CULPRIT and step == BREAKS_AT:
                break_as(scenario, who, folder)
            amounts = 5 if (scenario, who.rank, step) == ("amount", CULPRIT, BREAKS_AT) else 4
            total = torch.full((amounts,), float(who.rank + step))
            dist.all_reduce(total)
            (folder / f"sum-{step}-{who.rank}").write_text(str(total.tolist()))
            with (folder / f"steps-{who.rank}").open("a") as file:
                file.write(f"{who.attempt}:{step} ")
            if who.rank == 0:
                saved.write_text(str(step + 1))
            dist.barrier()
        if scenario == "go on":
            (folder / f"up-{who.rank}").touch()
            while True:
                dist.all_reduce(total)
                time.sleep(0.01)
    print(f"rank {who.rank} of {who.size}", flush=True)


def break_as(scenario: str, who: RankInfo, folder: Path) -> None:
    match scenario:
        case "kill once" if who.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(600)
        case "raise":
            child = subprocess.Popen(["sleep", "600"])
            (folder / "pid-of-child").write_text(str(child.pid))
            raise LookupError("no such sample")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
