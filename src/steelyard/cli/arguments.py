"""What was typed, as what is meant: where plan files lie, what a question asks.

Not for acting on it: see commands.py.
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
from steelyard.plans.plan_file import TRADES, read_decisions
from steelyard.report.progress import TrainingProgress
from steelyard.safe_text import printable
from steelyard.units import parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from cyclopts import Token

    from steelyard.plans.prediction_file import Asked


def plan_path(train: str) -> Path:
    """Beside the script; each workload of a script has its own."""
    script = script_path(train)
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
    parse_bytes(value, what="--what-if memory")
    return {name: value}


def offload_memory_of(
    folder: Path | None, rate: str | None, size: str | None
) -> OffloadMemory | None:
    """All three or none: what is not said would be guessed."""
    given = {"--offload-dir": folder, "--offload-rate": rate, "--offload-size": size}
    missing = [name for name, value in given.items() if value is None]
    if folder is None and len(missing) == len(given):
        return None
    if folder is None or rate is None or size is None:
        raise BadInput(
            f"{missing[0]} is missing",
            expected="a folder, the rate at which it is used, and how much it may hold",
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
    """This machine, or the one in a file, or one of those that are known by name."""
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
            f"--cluster says what there is, and so does {other}",
            expected="one of them",
            remedy="leave out the other",
        )
    return Cluster.load(cluster) if cluster.endswith(".toml") else Cluster.named(cluster)


def planned_for(
    named: str, plan: Path | None, cluster: str | None, *, verb: str = "simulate"
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
    script = _found(asked.script, path) if is_plan else named
    if not script:
        raise BadInput(
            f"beside {printable(str(path))} stands no name of its script",
            expected=f"the {path.with_suffix('.json').name} that steelyard plan writes",
            remedy=f"name the script: steelyard {verb} train.py --plan {path.name}",
        )
    declared = cluster or asked.cluster
    return script, path, cluster_of(declared, 1, None) if declared else None


def _found(script: str, plan: Path) -> str:
    """The script as it was typed; from another folder, where it stands beside its plan."""
    path = script_path(script)
    beside = plan.with_name(path.name) if path.name else path
    if not script or path.exists() or not beside.exists():
        return script
    return str(beside) + script[len(str(path)) :]


def refuse_elsewhere(declared: Cluster | None, plan: Path) -> None:
    """A plan for a declared cluster is named with its script, by whoever has that cluster here."""
    if declared is not None:
        name = printable(str(plan))
        raise BadInput(
            f"{name} is for the declared cluster {printable(declared.tree.name)}",
            expected="a plan for this machine",
            remedy=f"plan for this machine; steelyard simulate {name} --trace step.json draws it",
        )


def refuse_contradictions(
    *,
    maximize: Maximize | None,
    minimize: Minimize | None,
    runner: str,
    ranks: int,
    cluster: str | None,
) -> None:
    """Options that cannot stand together, before anything is imported for them."""
    several = "--ranks" if ranks > 1 else "--cluster"
    both = ""
    if maximize is not None and minimize is not None:
        both = "--maximize and --minimize ask for opposite things"
    elif maximize is not None and (ranks > 1 or cluster is not None):
        both = f"--maximize asks of one device, and {several} gives several"
    elif minimize is not None and cluster is None:
        both = "--minimize devices asks of a declared cluster, and no --cluster is given"
    elif runner == "inductor" and cluster is not None:
        both = "--runner inductor measures what it compiles, and --cluster is not here"
    if both:
        raise BadInput(
            both,
            expected="options that can stand together",
            remedy="see steelyard plan --help, and leave out one of them",
        )


def refuse_no_trade(name: str) -> None:
    """Before minutes of planning; needs no torch."""
    if name not in TRADES:
        near = difflib.get_close_matches(name, TRADES, n=1)
        raise BadInput(
            f"there is no trade {printable(repr(name), most=60)}"
            + (f"; did you mean {near[0]}?" if near else ""),
            expected=f"one of {', '.join(sorted(TRADES))}",
            remedy="see docs/trades for what each pays and buys",
        )


def _asked_for(path: Path, *, needs_script: bool) -> "Asked":
    """Damaged predictions are in nobody's way who names the script: they are to be made anew."""
    from steelyard.plans.prediction_file import Asked, read_plan

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
    ends = [fewest, most] if dots else [fewest, fewest]
    # Nine digits: Python refuses to read thousands of them.
    if not all(end.isascii() and end.isdecimal() and len(end) <= 9 for end in ends):
        raise BadInput(
            f"--devices {printable(devices[:40])} is no range",
            expected="the fewest and the most, two dots between them",
            remedy="write --devices 16..1472",
        )
    first, last = map(int, ends)
    if not 1 <= first <= last:
        raise BadInput(
            f"--devices {printable(devices)} is a range of nothing",
            expected="at least one device, and the fewer ones first",
            remedy="write --devices 16..1472",
        )
    return first, last


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


def speeds_of(text: str | None) -> tuple[float, ...]:
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


def _refuse_other_number(speeds: tuple[float, ...], ranks: int) -> None:
    if len(speeds) != ranks:
        each = ",".join("1" * ranks)
        if ranks > 1:
            remedy = f"write --speeds {each} where they are alike; or leave it out: it is measured"
        else:
            remedy = f"write --ranks {len(speeds)} as well, or leave out --speeds"
        raise BadInput(
            f"--speeds has {len(speeds)} numbers, and there {_are(ranks)}",
            expected="one for each rank: how fast it computes beside the others",
            remedy=remedy,
        )


def _are(ranks: int) -> str:
    return f"are {ranks} ranks" if ranks != 1 else "is 1 rank"


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


def whole_number(_: type, tokens: "Sequence[Token]") -> int:
    """Digits alone: cyclopts rounds 2.5 and reads 0x10."""
    (token,) = tokens
    if not re.fullmatch(r"[+-]?[0-9][0-9_]{0,99}", token.value):
        given = printable(token.value, most=40)
        raise ValueError(f"{token.keyword or 'the value'} {given} is no whole number")
    return int(token.value)


def within(name: str, value: int, *, least: int = 1, most: int = 2**62, write: int = 100) -> None:
    """Refuse a whole number that is none of these; ``write`` is one that is."""
    if not least <= value <= most:
        raise BadInput(
            f"{name} {_digits(value)} is not possible",
            expected=f"a whole number from {least} to {most}",
            remedy=f"write {name} {write}",
        )


def _digits(value: int) -> str:
    """Python refuses to spell out thousands of digits."""
    return str(value) if abs(value) < 10**30 else "of more than 30 digits"


def waits_seconds(rank_timeout: str) -> float:
    """How long one rank may wait for another."""
    seconds = parse_seconds(rank_timeout, what="--rank-timeout")
    if not _LEAST_WAIT <= seconds <= _MOST_WAIT:
        raise BadInput(
            f"--rank-timeout {printable(rank_timeout, most=40)} is not possible",
            expected="from 1 ms to 30 days",
            remedy="write --rank-timeout 5min",
        )
    return seconds


_LEAST_WAIT, _MOST_WAIT = 1e-3, 30 * 86400.0


def how_often(every: int | None, folder: Path | None) -> int:
    """Steps between two checkpoints."""
    if every is None:
        return 100
    within("--checkpoint-every", every)
    if folder is None:
        raise BadInput(
            f"--checkpoint-every {every} says how often, and nothing says where to",
            expected="a folder for the checkpoints as well",
            remedy="write --checkpoint DIR as well, or leave out --checkpoint-every",
        )
    return every


def refuse_no_folder(option: str, folder: Path | None) -> None:
    if folder is not None and folder.exists() and not folder.is_dir():
        raise BadInput(
            f"{option} {printable(str(folder))} is no folder",
            expected="a folder, or a name that nothing has yet",
            remedy=f"give another name with {option}",
        )


def refuse_same_file(option: str, path: Path | None, *others: Path) -> None:
    """What is written for people must not take the place of what is read."""
    if path is None:
        return
    for other in others:
        if _is_same_place(path, other):
            raise BadInput(
                f"{option} {printable(str(path))} would overwrite a file that is read",
                expected="a file of its own",
                remedy=f"give another name with {option}",
            )


def explanation_of(plan: Path) -> Path:
    """The JSON beside a plan file, under whatever name that was given; see explanation.py."""
    return plan.with_suffix(".json") if plan.name else plan


def _is_same_place(one: Path, other: Path) -> bool:
    try:
        return one.resolve() == other.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name with a zero byte
        return False


def stopped_at(progress: TrainingProgress, checkpoint: Path | None) -> str:
    last = progress.last
    where = f" after step {last.step} of {last.steps}" if last else " before the first step"
    if checkpoint is None or not any(checkpoint.glob("step-*")):
        return where
    return f"{where}; go on with --resume {shlex.quote(str(checkpoint))}"
