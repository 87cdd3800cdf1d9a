"""Parsing and checking of command-line arguments.

Not for acting on them: see commands.py.
"""

import difflib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.cli.training_script import script_path
from steelyard.errors import BadInput, PlanFileError
from steelyard.hardware.cluster import Cluster, OffloadMemory
from steelyard.plans.budget import Maximize, Minimize
from steelyard.report.progress import TrainingProgress
from steelyard.safe_text import printable
from steelyard.units import parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from cyclopts import Token

    from steelyard.plans.plan_on_file import Asked


def plan_path(train: str) -> Path:
    """Return the default plan path next to the script; each workload of a script has its own."""
    script = script_path(train)
    if not script.name:
        raise BadInput(
            f"{train!r} is not a script",
            expected="a Python script with a function workload()",
            remedy="give a script such as train.py; if it has several workloads, name one as "
            "train.py:name",
        )
    name = train[len(str(script)) + 1 :]
    return script.with_name(f"{script.stem}{f'.{name}' if name else ''}.plan.toml")


def title(train: str) -> str:
    return plan_path(train).name.removesuffix(".plan.toml")


def parse_what_if(what_if: str | None) -> dict[str, str]:
    if what_if is None:
        return {}
    name, equals, value = (part.strip() for part in what_if.partition("="))
    if name != "memory" or not equals or not value:
        close = difflib.get_close_matches(name, ["memory"])
        raise BadInput(
            f"--what-if {what_if!r} is not supported"
            + (f"; did you mean {close[0]}?" if close and name != "memory" else ""),
            expected="another memory budget, as memory=SIZE",
            remedy="write it as --what-if memory=4GiB",
        )
    parse_bytes(value, what="--what-if memory")
    return {name: value}


def offload_memory_of(
    folder: Path | None, rate: str | None, size: str | None
) -> OffloadMemory | None:
    """Return the offload memory if all three options are given; none of them has a default."""
    given = {"--offload-dir": folder, "--offload-rate": rate, "--offload-size": size}
    missing = [name for name, value in given.items() if value is None]
    if folder is None and len(missing) == len(given):
        return None
    if folder is None or rate is None or size is None:
        raise BadInput(
            f"{missing[0]} is missing",
            expected="a folder, its transfer rate and its size limit",
            remedy="write --offload-dir /scratch --offload-rate 500MB/s --offload-size 20GiB",
        )
    return OffloadMemory(folder, rate=rate, size=size)


def cluster_of(
    cluster: str | None,
    ranks: int,
    offload_memory: OffloadMemory | None,
    *,
    hosts: int = 1,
    speeds: str | None = None,
) -> Cluster:
    """Return this machine, the cluster that a file declares, or a preset cluster of this name."""
    if cluster is None:
        if speeds is not None:
            _refuse_other_number(speeds_of(speeds), ranks)
        return Cluster.here(
            ranks=ranks, hosts=hosts, speeds=speeds_of(speeds), offload_memory=offload_memory
        )
    if ranks > 1 or offload_memory is not None or speeds is not None:
        other = (
            "--ranks"
            if ranks > 1
            else "--offload-dir"
            if offload_memory is not None
            else "--speeds"
        )
        raise BadInput(
            f"--cluster and {other} both declare the devices",
            expected="only one of them",
            remedy="leave out one of them",
        )
    return Cluster.load(cluster) if cluster.endswith(".toml") else Cluster.named(cluster)


def cluster_or_gpu(
    cluster: str | None, gpu: str | None, host_memory: str | None = None
) -> str | None:
    """Return the cluster's name, or the whole name of one GPU, which names a cluster too."""
    if gpu is None:
        if host_memory is not None:
            raise BadInput(
                "--host-memory was given without --gpu",
                expected="the memory of the host of one GPU that is not here",
                remedy="name the GPU with --gpu, or declare host_memory in the cluster file",
            )
        return cluster
    if cluster is not None:
        raise BadInput(
            "--cluster and --gpu both declare the devices",
            expected="only one of them",
            remedy="leave out one of them",
        )
    return Cluster.gpu(gpu, host_memory=host_memory).tree.name


def planned_for(
    named: str, plan: Path | None, cluster: str | None, *, verb: str = "simulate"
) -> tuple[str, Path, Cluster | None]:
    """Return the script, the plan file and the declared cluster of a plan.

    ``named`` is the script or the plan file. Missing values are read from the JSON file next to the
    plan, which stores the arguments of ``steelyard plan``.
    """
    is_plan = named.endswith(".toml")
    if is_plan and plan is not None:
        raise BadInput(
            f"{printable(named)} is a plan file, and --plan names one too",
            expected="only one of them",
            remedy="leave out --plan, or name the script first",
        )
    path = Path(named) if is_plan else plan or plan_path(named)
    stored = _stored_arguments(path, needs_script=is_plan)
    script = _script_next_to(stored.script, path) if is_plan else named
    if not script:
        raise BadInput(
            f"the predictions file of {printable(str(path))} does not name its script",
            expected=f"the {path.with_suffix('.json').name} that steelyard plan writes",
            remedy=f"name the script: steelyard {verb} train.py --plan {path.name}",
        )
    declared = cluster or stored.cluster
    return script, path, cluster_of(declared, 1, None) if declared else None


def _script_next_to(script: str, plan: Path) -> str:
    """Return the script as it was typed, or, if that does not exist, next to its plan file."""
    path = script_path(script)
    next_to_plan = plan.with_name(path.name) if path.name else path
    if not script or path.exists() or not next_to_plan.exists():
        return script
    return str(next_to_plan) + script[len(str(path)) :]


def refuse_elsewhere(declared: Cluster | None, plan: Path) -> None:
    """Raise BadInput if the plan is for a declared cluster.

    On a machine that is part of that cluster, the plan can be run by naming its script.
    """
    if declared is not None:
        name = printable(str(plan))
        raise BadInput(
            f"{name} is a plan for the declared cluster {printable(declared.tree.name)}",
            expected="a plan for this machine",
            remedy=f"plan for this machine, or draw the schedule with steelyard simulate {name} "
            "--trace step.json",
        )


def refuse_contradictions(
    *,
    maximize: Maximize | None,
    minimize: Minimize | None,
    runner: str,
    ranks: int,
    cluster: str | None,
) -> None:
    """Raise BadInput for options that contradict each other, before anything is imported."""
    several = "--ranks" if ranks > 1 else "--cluster"
    contradiction = ""
    if maximize is not None and minimize is not None:
        contradiction = "--maximize and --minimize exclude each other"
    elif maximize is not None and (ranks > 1 or cluster is not None):
        contradiction = f"--maximize plans for one device, but {several} gives several"
    elif minimize is not None and cluster is None:
        contradiction = (
            "--minimize devices plans for a declared cluster, but no --cluster was given"
        )
    elif runner == "inductor" and cluster is not None:
        contradiction = (
            "--runner inductor measures compiled kernels here, but --cluster declares other devices"
        )
    if contradiction:
        raise BadInput(
            contradiction,
            expected="options that can be combined",
            remedy="see steelyard plan --help, and leave out only one of them",
        )


def _stored_arguments(path: Path, *, needs_script: bool) -> "Asked":
    """Return the stored arguments of ``steelyard plan``.

    Damaged predictions are ignored if the user names the script, because they will be replaced.
    """
    from steelyard.plan_files.plan_file import read_decisions
    from steelyard.plan_files.prediction_file import read_plan
    from steelyard.plans.plan_on_file import Asked

    try:
        return read_plan(path).asked
    except PlanFileError:
        if needs_script:
            raise
    read_decisions(path)
    return Asked()


def device_range(devices: str) -> tuple[int, int]:
    """Parse ``16..1472``, or one number."""
    fewest, dots, most = devices.partition("..")
    ends = [fewest, most] if dots else [fewest, fewest]
    # At most nine digits: Python refuses to parse thousands of them.
    if not all(end.isascii() and end.isdecimal() and len(end) <= 9 for end in ends):
        raise BadInput(
            f"--devices {printable(devices[:40])} is not a range",
            expected="the fewest and the most devices, with two dots between them",
            remedy="write --devices 16..1472",
        )
    first, last = map(int, ends)
    if not 1 <= first <= last:
        raise BadInput(
            f"--devices {printable(devices)} is an empty range",
            expected="at least one device, with the smaller number first",
            remedy="write --devices 16..1472",
        )
    return first, last


def training_length(tokens: str | None, samples: str | None) -> dict[str, int]:
    """Return the one of two amounts that was given, parsed."""
    amounts = {"tokens": tokens, "samples": samples}
    given = {name: amount for name, amount in amounts.items() if amount is not None}
    if len(given) > 1:
        raise BadInput(
            "--tokens and --samples both give the length of the training",
            expected="only one of them",
            remedy="leave out one of them",
        )
    return {name: parse_count(amount, what=name) for name, amount in given.items()}


def speeds_of(text: str | None) -> tuple[float, ...]:
    """Parse one speed for each rank."""
    if text is None:
        return ()
    try:
        return tuple(float(speed) for speed in text.split(","))
    except ValueError:
        raise BadInput(
            f"--speeds {printable(text, most=60)} is not a list of numbers",
            expected="the relative speed of each rank",
            remedy="write --speeds 1,0.5 for two ranks, or leave it out to have speeds measured",
        ) from None


def _refuse_other_number(speeds: tuple[float, ...], ranks: int) -> None:
    if len(speeds) != ranks:
        each = ",".join("1" * ranks)
        if ranks > 1:
            remedy = (
                f"write --speeds {each} for equal ranks, or leave it out to have speeds measured"
            )
        else:
            remedy = f"write --ranks {len(speeds)} as well, or leave out --speeds"
        raise BadInput(
            f"--speeds has {len(speeds)} numbers, but there {_ranks_text(ranks)}",
            expected="one relative speed for each rank",
            remedy=remedy,
        )


def _ranks_text(ranks: int) -> str:
    return f"are {ranks} ranks" if ranks != 1 else "is 1 rank"


def resume_from(resume: list[Path] | None, folder: Path | None) -> tuple[Path | bool, Path | None]:
    """Return the checkpoint to resume from (True: the newest), and the folder for new ones."""
    if resume is None:
        return False, folder
    if not resume:
        if folder is None:
            raise BadInput(
                "--resume names no folder",
                expected="a folder with checkpoints",
                remedy="write --resume DIR, or give --checkpoint DIR as well",
            )
        return True, folder
    given = resume[0]
    if given.name.startswith("step-"):
        return given, folder or given.parent
    if folder not in (None, given):
        raise BadInput(
            f"--resume {given} and --checkpoint {folder} are different folders",
            expected="the same folder for both, or one checkpoint of another folder",
            remedy=f"name the checkpoint itself: --resume {shlex.quote(str(given))}/step-...",
        )
    return True, given


def refuse_unwritable(path: Path | None, remedy: str) -> None:
    """Check that output can be written, before the work that produces it."""
    if path is None:
        return
    name, folder = printable(str(path)), path.parent
    # A file is replaced by a new one in its folder; a device is written to directly.
    written = path if path.exists() and not path.is_file() else folder
    if path.is_dir():
        problem = "is a directory"
    elif not folder.is_dir():
        problem = f"cannot be written: the folder {printable(str(folder))} does not exist"
    elif not os.access(written, os.W_OK):
        problem = f"cannot be written: no permission to write to {printable(str(written))}"
    else:
        return
    raise BadInput(
        f"{name} {problem}",
        expected="a file name in a folder that can be written to",
        remedy=remedy,
    )


def whole_number(_: type, tokens: "Sequence[Token]") -> int:
    """Parse decimal digits only: cyclopts rounds 2.5 and accepts 0x10."""
    (token,) = tokens
    if not re.fullmatch(r"[+-]?[0-9][0-9_]{0,99}", token.value):
        given = printable(token.value, most=40)
        raise ValueError(f"{token.keyword or 'the value'} {given} is not a whole number")
    return int(token.value)


def check_range(
    name: str, value: int, *, least: int = 1, most: int = 2**62, write: int = 100
) -> None:
    """Raise BadInput for a number out of range; ``write`` is a valid example for the message."""
    if not least <= value <= most:
        raise BadInput(
            f"{name} {_digits(value)} is not possible",
            expected=f"a whole number from {least} to {most}",
            remedy=f"write {name} {write}",
        )


def _digits(value: int) -> str:
    """Format the number for a message: Python refuses to format thousands of digits."""
    return str(value) if abs(value) < 10**30 else "of more than 30 digits"


def waits_seconds(rank_timeout: str) -> float:
    """Parse the time that one rank may wait for another."""
    seconds = parse_seconds(rank_timeout, what="--rank-timeout")
    if not _MIN_WAIT <= seconds <= _MAX_WAIT:
        raise BadInput(
            f"--rank-timeout {printable(rank_timeout, most=40)} is not possible",
            expected="from 1 ms to 30 days",
            remedy="write --rank-timeout 5min",
        )
    return seconds


_MIN_WAIT, _MAX_WAIT = 1e-3, 30 * 86400.0


def checkpoint_interval(every: int | None, folder: Path | None) -> int:
    """Return the number of steps between two checkpoints."""
    if every is None:
        return 100
    check_range("--checkpoint-every", every)
    if folder is None:
        raise BadInput(
            f"--checkpoint-every {every} was given without --checkpoint",
            expected="a folder for the checkpoints as well",
            remedy="write --checkpoint DIR as well, or leave out --checkpoint-every",
        )
    return every


def refuse_no_folder(option: str, folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise BadInput(
            f"{option} {printable(str(folder))} is not a folder",
            expected="a folder, or a name that does not exist yet",
            remedy=f"choose another name with {option}",
        )


def refuse_same_file(option: str, path: Path | None, *others: Path) -> None:
    """Raise BadInput if an output file would overwrite an input file."""
    if path is None:
        return
    for other in others:
        if _is_same_place(path, other):
            raise BadInput(
                f"{option} {printable(str(path))} would overwrite an input file",
                expected="a different file",
                remedy=f"choose another name with {option}",
            )


def explanation_of(plan: Path) -> Path:
    """Return the JSON file next to a plan file, for any file name; see plans/plan_on_file.py."""
    return plan.with_suffix(".json") if plan.name else plan


def _is_same_place(one: Path, other: Path) -> bool:
    try:
        return one.resolve() == other.resolve()
    except (OSError, RuntimeError, ValueError):  # a cycle of links, a null byte in a name
        return False


def stopped_at(progress: TrainingProgress, checkpoint: Path | None) -> str:
    last = progress.last
    where = f" after step {last.step} of {last.steps}" if last else " before the first step"
    if checkpoint is None or not any(checkpoint.glob("step-*")):
        return where
    return f"{where}; continue with --resume {shlex.quote(str(checkpoint))}"
