"""Groups the tensors alive at a memory peak by module and source line.

Not for rendering the groups: see text.py and html.py.
"""

from dataclasses import dataclass

from steelyard.plans.peak_memory import LiveTensor, PeakMemory

_MOST_GROUPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors alive at the peak that one source line made in modules of equal ``starred_path``."""

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
    """Shorten an operator name: ``aten.bmm.default`` -> ``bmm``; other texts are unchanged."""
    name, _, suffix = op.partition(" ")
    parts = name.split(".")
    short = parts[1] if len(parts) == 3 and all(parts) else name
    return f"{short} {suffix}" if suffix else short


def starred_path(path: str) -> str:
    """Replace indices in a module path by stars: ``blocks.3.mlp`` -> ``blocks.*.mlp``.

    A final index below another index is kept, because the layers of a Sequential inside a block
    differ.
    """
    parts = path.split(".")
    starred = ["*" if part.isdigit() else part for part in parts]
    if starred[-1] == "*" and "*" in starred[:-1]:
        starred[-1] = parts[-1]
    return ".".join(starred)


def peak_of(peak: PeakMemory) -> PeakTree:
    members: dict[tuple[str, str, str], list[LiveTensor]] = {}
    for tensor in peak.alive:
        named = bool(tensor.path or tensor.line)
        key = (starred_path(tensor.path), tensor.line, "" if named else tensor.what)
        members.setdefault(key, []).append(tensor)
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
    where = first.path if len(paths) == 1 else f"{starred_path(first.path)} ({len(paths)})"
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
