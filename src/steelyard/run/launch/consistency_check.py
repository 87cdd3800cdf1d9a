"""Checks, before the first step, that all ranks have the same plan, parameters and batch.

Each rank writes a plain text item for each of these into the rendezvous store, because ranks that
disagree on their number or on shapes could not exchange a tensor. Digests are compared; the text is
read only if two digests differ. The caller chooses the items, with ``words_for``.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.errors import RankFailed, RanksDiffer
from steelyard.run.launch.environment import RankInfo
from steelyard.safe_text import printable

Named = Iterable[tuple[str, torch.Tensor]]
_SIZE = "number of ranks"


def words_for(*, plan_digest: str, parameters: Named, batch: Named) -> dict[str, str]:
    """Return the items that must be equal on all ranks, in the order in which differences are
    reported.
    """
    return {
        "torch": torch.__version__,
        "plan": plan_digest,
        "parameters": _describe(parameters),
        "batch": _describe(batch),
    }


def _describe(tensors: Named) -> str:
    return "\n".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in tensors
    )


def agree(store: Store, who: RankInfo, words: Mapping[str, str], *, timeout_seconds: float) -> None:
    """Raise ``RanksDiffer`` on every rank if items differ, or ``RankFailed`` if a rank does not
    come."""
    words = {_SIZE: str(who.size), **words}
    for item, text in words.items():
        store.set(_key(who.rank, item), text)
    store.set(_key(who.rank), json.dumps({item: _digest(text) for item, text in words.items()}))
    digests: list[Mapping[str, str]] = []
    for rank in range(who.size):
        digests.append(_digests_of(rank, store, who, timeout_seconds))
        # This is checked first, because a rank that expects too many ranks would wait for them
        # forever.
        _refuse_difference(_SIZE, digests, store)
    for item in words:
        _refuse_difference(item, digests, store)


def _digests_of(
    rank: int, store: Store, who: RankInfo, timeout_seconds: float
) -> Mapping[str, str]:
    try:
        store.wait([_key(rank)], timedelta(seconds=timeout_seconds))
    except DistError as error:
        raise RankFailed(
            f"rank {rank} of {who.size} did not connect within {timeout_seconds:g} s",
            expected="all ranks before the first step",
            remedy=f"read the output of rank {rank}, or give the ranks more time",
            rank=rank,
            cause="absent",
        ) from error
    try:
        found = json.loads(store.get(_key(rank)))
    except (ValueError, RecursionError):
        found = None
    is_ours = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    if not is_ours:
        raise RankFailed(
            f"the process connected as rank {rank} sent data that is not a digest",
            expected="digests of its configuration, as JSON",
            remedy="install the same version on all hosts; docs/security.md says who may connect",
            rank=rank,
            cause="absent",
        )
    return dict(found)


def _refuse_difference(item: str, digests: Sequence[Mapping[str, str]], store: Store) -> None:
    values = [digest.get(item, "") for digest in digests]
    # The most frequent value; if several are equally frequent, that of the lowest rank.
    most = Counter(values).most_common(1)[0][0]
    odd = next((rank for rank, value in enumerate(values) if value != most), None)
    if odd is None:
        return
    other = values.index(most)
    here, there = (
        store.get(_key(rank, item)).decode(errors="replace") if values[rank] else ""
        for rank in (odd, other)
    )
    mine, theirs = first_difference(here, there)
    raise RanksDiffer(
        f"rank {odd} differs from rank {other} in the {item}: {mine} and {theirs}",
        expected=f"the same {item} on all ranks",
        remedy=_REMEDIES.get(item, "start all ranks with the same script, plan and arguments"),
        rank=odd,
        item=item,
    )


_REMEDIES = {
    _SIZE: "start all ranks with the same number of ranks, from one launcher",
    "torch": "install the same torch on every host",
    "plan": "give all ranks the same plan file",
    "kind of device": "put the model on CPUs, or on GPUs of one kind, on all hosts",
}


def first_difference(here: str, there: str) -> tuple[str, str]:
    """Return the first line in which the texts differ, from each text; a missing line is empty."""
    ours, others = here.split("\n"), there.split("\n")
    for i in range(max(len(ours), len(others))):
        pair = tuple(lines[i] if i < len(lines) else "" for lines in (ours, others))
        if pair[0] != pair[1]:
            return _shown(pair[0]), _shown(pair[1])
    return _shown(ours[0]), _shown(others[0])


def _shown(line: str) -> str:
    return printable(line, most=80) if line else "nothing"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _key(rank: int, item: str = "") -> str:
    return f"held/{rank}/{item}"
