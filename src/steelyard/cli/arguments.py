"""What was typed, as what is meant: where plan files lie, what a question asks.

Not for acting on it: see verbs.py.
"""

import difflib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard.core.amounts import parse_count
from steelyard.core.cluster import Cluster, Far
from steelyard.core.errors import BadInput, PlanFileError
from steelyard.core.printable import printable
from steelyard.report.progress import Progress

if TYPE_CHECKING:
    from steelyard.core.explanation import Asked


def _script(train: str) -> Path:
    """``train.py:name`` -> ``train.py``."""
    path, _, name = train.rpartition(":")
    return Path(path if path.endswith(".py") and name.isidentifier() else train)


def plan_path(train: str) -> Path:
    """Beside the script; each workload of a script has its own."""
    script = _script(train)
    if not script.name:
        raise BadInput(
            f"{train!r} is no script",
            expected="a Python script with a function workload()",
            remedy="name it, such as train.py; of several workloads one, as train.py:name",
        )
    name = train[len(str(script)) + 1 :]
    return script.with_name(f"{script.stem}{f'.{name}' if name else ''}.plan.toml")


def title(train: str) -> str:
    return plan_path(train).name.removesuffix(".plan.toml")


def wish(what_if: str | None) -> dict[str, str]:
    if what_if is None:
        return {}
    name, equals, value = (part.strip() for part in what_if.partition("="))
    if name != "memory" or not equals or not value:
        near = difflib.get_close_matches(name, ["memory"])
        raise BadInput(
            f"--what-if {what_if!r} is no question that can be asked"
            + (f"; did you mean {near[0]}?" if near and name != "memory" else ""),
            expected="another memory budget",
            remedy="write it as --what-if memory=4GiB",
        )
    return {name: value}


def far_memory(folder: Path | None, rate: str | None, size: str | None) -> Far | None:
    """All three or none: what is not said would be guessed."""
    given = {"--far": folder, "--far-rate": rate, "--far-size": size}
    missing = [name for name, value in given.items() if value is None]
    if folder is None and len(missing) == len(given):
        return None
    if folder is None or rate is None or size is None:
        raise BadInput(
            f"{missing[0]} is missing",
            expected="a folder, the rate at which it is used, and how much it may hold",
            remedy="write --far /scratch --far-rate 500MB/s --far-size 20GiB",
        )
    return Far(folder, rate=rate, size=size)


def cluster_of(
    cluster: str | None,
    ranks: int,
    far: Far | None,
    *,
    hosts: int = 1,
    speeds: str | None = None,
) -> Cluster:
    """This machine, or the one in a file, or one of those that are known by name."""
    if cluster is None:
        return Cluster.here(ranks=ranks, hosts=hosts, speeds=_speeds(speeds), far=far)
    if ranks > 1 or far is not None or speeds is not None:
        other = "--ranks" if ranks > 1 else "--far" if far is not None else "--speeds"
        raise BadInput(
            f"--cluster says what there is, and so does {other}",
            expected="one of them",
            remedy="leave out the other",
        )
    return Cluster.load(cluster) if cluster.endswith(".toml") else Cluster.named(cluster)


def planned_for(
    named: str, plan: Path | None, cluster: str | None
) -> tuple[str, Path, Cluster | None]:
    """The script, the plan file and the declared cluster of a plan; ``named`` is either of the
    first two. What is not said here is what the plan was asked for with."""
    is_plan = named.endswith(".toml")
    if is_plan and plan is not None:
        raise BadInput(
            f"{printable(named)} is a plan file, and so is what --plan names",
            expected="one of them",
            remedy="leave out --plan, or name the script first",
        )
    path = Path(named) if is_plan else plan or plan_path(named)
    asked = _asked_for(path, needs_script=is_plan)
    script = asked.script if is_plan else named
    if not script:
        raise BadInput(
            f"beside {printable(str(path))} stands no name of its script",
            expected=f"the {path.with_suffix('.json').name} that steelyard plan writes",
            remedy=f"name the script: steelyard simulate train.py --plan {path.name} --trace ...",
        )
    declared = cluster or asked.cluster
    return script, path, cluster_of(declared, 1, None) if declared else None


def _asked_for(path: Path, *, needs_script: bool) -> "Asked":
    """Damaged predictions are in nobody's way who names the script: they are to be made anew."""
    from steelyard.core.explanation import Asked, read_plan
    from steelyard.core.planfile import read_decisions

    try:
        return read_plan(path).asked
    except PlanFileError:
        if needs_script:
            raise
    read_decisions(path)
    return Asked()


def between(devices: str) -> tuple[int, int]:
    """``16..1472``, or one number."""
    fewest, dots, most = devices.partition("..")
    if not fewest.isdigit() or (dots and not most.isdigit()):
        raise BadInput(
            f"--devices {printable(devices[:40])} is no range",
            expected="the fewest and the most, two dots between them",
            remedy="write --devices 16..1472",
        )
    return int(fewest), int(most or fewest)


def training_length(tokens: str | None, samples: str | None) -> dict[str, int]:
    """What there is of both, as it was said."""
    said = {"tokens": tokens, "samples": samples}
    given = {name: amount for name, amount in said.items() if amount is not None}
    if len(given) > 1:
        raise BadInput(
            "--tokens and --samples both say how long the training is",
            expected="one of them",
            remedy="leave out the other",
        )
    return {name: parse_count(amount, what=name) for name, amount in given.items()}


def _speeds(text: str | None) -> tuple[float, ...]:
    """One for each rank; what is no number is refused with those of another length."""
    if text is None:
        return ()
    try:
        return tuple(float(speed) for speed in text.split(","))
    except ValueError:
        raise BadInput(
            f"--speeds {printable(text, most=60)} is no list of numbers",
            expected="how fast each rank computes beside the others",
            remedy="write --speeds 1,0.5 for two ranks; or leave it out, and it is measured",
        ) from None


def resume_from(resume: list[Path] | None, folder: Path | None) -> tuple[Path | bool, Path | None]:
    """The checkpoint to go on from (True: the newest), and the folder that new ones go to."""
    if resume is None:
        return False, folder
    if not resume:
        if folder is None:
            raise BadInput(
                "--resume does not say from where",
                expected="a folder with checkpoints",
                remedy="write --resume DIR, or give --checkpoint DIR as well",
            )
        return True, folder
    given = resume[0]
    if given.name.startswith("step-"):
        return given, folder or given.parent
    if folder not in (None, given):
        raise BadInput(
            f"--resume {given} and --checkpoint {folder} are two folders",
            expected="one folder, or one checkpoint of another",
            remedy=f"name the checkpoint itself: --resume {shlex.quote(str(given))}/step-...",
        )
    return True, given


def refuse_unwritable(path: Path | None, remedy: str) -> None:
    """What is written after the work is looked at before it."""
    if path is None:
        return
    name, folder = printable(str(path)), path.parent
    # A file is replaced as a whole, in its folder; a device is written into.
    written = path if path.exists() and not path.is_file() else folder
    if path.is_dir():
        problem = "is a directory"
    elif not folder.is_dir():
        problem = f"cannot be written: there is no folder {printable(str(folder))}"
    elif not os.access(written, os.W_OK):
        problem = f"cannot be written: {printable(str(written))} does not permit it"
    else:
        return
    raise BadInput(
        f"{name} {problem}",
        expected="a file name in a folder that can be written to",
        remedy=remedy,
    )


def at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise BadInput(
            f"{name} {value} is not possible", expected="1 or more", remedy=f"write {name} 100"
        )


def stopped_at(progress: Progress, checkpoint: Path | None) -> str:
    last = progress.last
    where = f" after step {last.step} of {last.steps}" if last else " before the first step"
    if checkpoint is None or not any(checkpoint.glob("step-*")):
        return where
    return f"{where}; go on with --resume {shlex.quote(str(checkpoint))}"
