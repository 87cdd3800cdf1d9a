"""What is alive at a peak, in groups that people can read.

Not for how they are drawn: see text.py and html.py.
"""

from dataclasses import dataclass

from steelyard.plans.peak_memory import LiveTensor, PeakMemory

_MOST_GROUPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is alive at the peak and was made by one source line, in modules that look alike."""

    nbytes: int
    share: float
    count: int
    where: str
    line: str
    what: tuple[str, ...]
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTree:
    nbytes: int
    resident_bytes: int
    workspace_bytes: int
    at: str
    where: str
    line: str
    phase: str
    groups: tuple[Group, ...]
    num_rest: int
    rest_bytes: int


def short_op(op: str) -> str:
    """``aten.bmm.default`` -> ``bmm``; what is no operator's name is left alone."""
    name, _, again = op.partition(" ")
    parts = name.split(".")
    short = parts[1] if len(parts) == 3 and all(parts) else name
    return f"{short} {again}" if again else short


def alike(path: str) -> str:
    """``blocks.3.mlp`` -> ``blocks.*.mlp``: modules that differ in an index only read as one.

    A last index below another stays: layers of one Sequential inside a block are not alike.
    """
    parts = path.split(".")
    starred = ["*" if part.isdigit() else part for part in parts]
    if starred[-1] == "*" and "*" in starred[:-1]:
        starred[-1] = parts[-1]
    return ".".join(starred)


def peak_of(peak: PeakMemory) -> PeakTree:
    members: dict[tuple[str, str, str], list[LiveTensor]] = {}
    for holding in peak.alive:
        named = bool(holding.path or holding.line)
        key = (alike(holding.path), holding.line, "" if named else holding.what)
        members.setdefault(key, []).append(holding)
    groups = sorted((_group(m, peak) for m in members.values()), key=lambda g: -g.nbytes)
    rest = groups[_MOST_GROUPS:]
    return PeakTree(
        nbytes=peak.nbytes,
        resident_bytes=peak.resident_bytes,
        workspace_bytes=peak.workspace_bytes,
        at=short_op(peak.at) if peak.at else "the optimizer's step",
        where=peak.path,
        line=peak.line,
        phase=peak.phase.value,
        groups=tuple(groups[:_MOST_GROUPS]),
        num_rest=len(rest),
        rest_bytes=sum(g.nbytes for g in rest),
    )


def _group(members: list[LiveTensor], peak: PeakMemory) -> Group:
    first = members[0]
    nbytes = sum(m.nbytes for m in members)
    paths = dict.fromkeys(m.path for m in members)
    where = first.path if len(paths) == 1 else f"{alike(first.path)} ({len(paths)})"
    if not first.path:
        where = "(the loss)" if first.line else f"({first.role.value})"
    return Group(
        nbytes=nbytes,
        share=nbytes / peak.nbytes if peak.nbytes else 0.0,
        count=len(members),
        where=where,
        line=first.line,
        what=tuple(dict.fromkeys(short_op(m.what) for m in members)),
        role=first.role.value,
    )
