"""Which rank weighs other plans while a run goes on, and what becomes of that when links change
again meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from steelyard.api.adapting import Adapting, _Seen
from steelyard.core.link import Link

FAST = Link(kind="network", latency_seconds=1e-4, bytes_per_second=118e6)
SLOW = Link(kind="network", latency_seconds=1e-4, bytes_per_second=5.9e6)


def adapting(*, hosts: int = 2, each: int = 1, members: tuple[int, ...] = (0,)) -> Any:
    """Of the first rank; nothing of it was measured."""
    one: Any = Adapting.__new__(Adapting)
    one._home, one._is_compiled = torch.device("cpu"), False
    one._hosts, one._num_ranks, one._members = hosts, hosts * each, members
    one._rank = one._weigher = one._unseen = 0
    one._next_unseen = 3
    one._seen, one._looked, one._beside = _Seen(link=FAST), None, None
    one._waited = 0.0
    one._look = SimpleNamespace(over=lambda link: link)
    one._together = SimpleNamespace(flagged=0, flag=mock.Mock(), each=lambda n: [n])
    one._step = SimpleNamespace(
        traffic=lambda: SimpleNamespace(waited=0.0),
        plan=SimpleNamespace(decisions=SimpleNamespace(rules=())),
        is_as_planned=False,
    )
    one._pace = mock.Mock()
    return one


@pytest.mark.parametrize(
    ("members", "weigher"),
    [((0, 1, 2, 3, 4, 5), 0), ((0, 1, 2, 3), 4), ((0, 1, 4, 5), 2), ((0, 1), 2)],
)
def test_a_host_that_stands_by_weighs_other_plans(members: tuple[int, ...], weigher: int) -> None:
    own = adapting(hosts=3, each=2, members=members)
    assert own._least_busy() == weigher
    own._is_compiled = True  # then all ranks wait while the first one weighs
    assert own._least_busy() == 0


def test_links_that_change_while_plans_are_weighed_are_weighed_anew() -> None:
    own = adapting()
    weighed = mock.Mock(**{"is_done.return_value": False})
    own._looked, own._beside = (SLOW, _Seen(link=SLOW)), weighed
    with (
        mock.patch.object(Adapting, "_has_turned_at_once", return_value=True) as turned,
        mock.patch.object(Adapting, "_links_now", return_value=_Seen(link=SLOW)) as links,
    ):
        assert [own.after(number, 0.4) for number in range(4)] == [False] * 4
        assert links.call_count == 1, "links are measured in every third step"
        assert own._beside is weighed, "links are as they were: what is weighed is of use"
        links.return_value = _Seen(link=FAST)
        own._weigher = 0
        assert own.after(4, 0.4) is False
        assert own.after(5, 0.4) is True
    weighed.end.assert_called_once()
    assert own._looked == (FAST, _Seen(link=FAST))
    assert turned.call_args.args == (5, FAST, _Seen(link=FAST))


def test_a_turn_says_which_link_became_another() -> None:
    own = adapting()
    slow, fast = _Seen(link=SLOW), _Seen(link=FAST)
    assert own._changed(fast, slow) == (
        "host 1's link now carries 5.9 MB/s, 118 MB/s when the plan was made"
    )
    assert own._changed(slow, slow) == "every way over these links has been weighed"
