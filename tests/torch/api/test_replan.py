"""``run --adapt``: the rank that compares plans, and links that change again in the meantime."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from steelyard.api.replan import Replanner
from steelyard.api.replan_search import LinkState
from steelyard.hardware.link import Link
from steelyard.ir.parallel_layout import ParallelLayout
from steelyard.search.ranks.layout_candidates import LayoutCandidate
from steelyard.trades.gradient_compression import TernaryGradientsRule
from steelyard.trades.shard_batch import ShardBatchRule

FAST = Link(kind="network", latency_seconds=1e-4, bytes_per_second=118e6)
SLOW = Link(kind="network", latency_seconds=1e-4, bytes_per_second=5.9e6)


def adapting(*, hosts: int = 2, each: int = 1, members: tuple[int, ...] = (0,)) -> Any:
    """Build the object of rank 0 without a step, links or measurements."""
    one: Any = Replanner.__new__(Replanner)
    one._torch_device, one._is_compiled = torch.device("cpu"), False
    one._hosts, one._num_ranks, one._members = hosts, hosts * each, members
    one._rank = one._search_rank = one._steps_unmeasured = one._left_at = 0
    one._has_fallen_back, one._free_bytes = False, 0
    one._measuring_interval = 3
    one._links, one._pending, one._background = LinkState(link=FAST), None, None
    one._waited_seconds = 0.0
    one._session = SimpleNamespace(with_link=lambda link: link)
    one._coordinator = SimpleNamespace(flagged=0, flag=mock.Mock(), each=lambda n: [n])
    one._step = SimpleNamespace(
        traffic_counter=SimpleNamespace(total=lambda: SimpleNamespace(waited=0.0)),
        plan=SimpleNamespace(decisions=SimpleNamespace(rules=())),
        is_as_planned=False,
        has_fallen_back=False,
    )
    one._pace = mock.Mock()
    return one


@pytest.mark.parametrize(
    ("members", "weigher"),
    [((0, 1, 2, 3, 4, 5), 0), ((0, 1, 2, 3), 4), ((0, 1, 4, 5), 2), ((0, 1), 2)],
)
def test_an_idle_host_searches_other_plans(members: tuple[int, ...], weigher: int) -> None:
    own = adapting(hosts=3, each=2, members=members)
    assert own._least_busy(50) == weigher
    assert own._least_busy(5000) == 0, "its weights are those of long ago"
    own._is_compiled = True  # all ranks wait while the first one compares plans
    assert own._least_busy(50) == 0


def test_a_link_that_changes_during_the_search_is_searched_again() -> None:
    own = adapting()
    own._rank = own._search_rank = 1  # the rank is on the host that does not train
    weighed = mock.Mock(**{"is_done.return_value": False})
    own._pending, own._background = (SLOW, LinkState(link=SLOW)), weighed
    with (
        mock.patch.object(Replanner, "_switch_at_once", return_value=True) as turned,
        mock.patch.object(Replanner, "_measure_links", return_value=LinkState(link=SLOW)) as links,
    ):
        assert [own.after_step(number, 0.4) for number in range(4)] == [False] * 4
        assert links.call_count == 1, "links are measured in every third step"
        assert own._background is weighed, "links are as they were: what is weighed is of use"
        links.side_effect = [LinkState(link=FAST), LinkState(link=SLOW)]
        assert [own.after_step(number, 0.4) for number in (4, 5)] == [False] * 2
        assert own._background is weighed, "the second look did not confirm the first"
        links.side_effect = [LinkState(link=FAST)] * 2
        own._members = (0, 1)  # the state behind a switch to all ranks, which is patched
        own._steps_unmeasured = 2
        with mock.patch.object(Replanner, "_is_time_to_measure", return_value=True):
            assert own.after_step(6, 0.4) is True
    weighed.end.assert_called_once()
    assert own._pending == (FAST, LinkState(link=FAST))
    assert turned.call_args.args == (6, FAST, LinkState(link=FAST))


def test_slow_steps_are_examined_while_plans_are_searched() -> None:
    own = adapting(members=(0, 1))
    own._rank = 1
    own._pending, own._coordinator.flagged = (SLOW, LinkState(link=SLOW)), 1
    with mock.patch.object(Replanner, "_measure_links", return_value=LinkState(link=SLOW)) as links:
        assert own.after_step(1, 0.4) is False
    links.assert_called_once()
    own._pace.settle.assert_called_once()


@pytest.mark.parametrize("gave_up", [False, True])
def test_a_restored_link_brings_all_hosts_back_to_the_plan_of_the_beginning(gave_up: bool) -> None:
    own = adapting()
    rule = ShardBatchRule(ranks=2, bucket=1 << 20)
    code = TernaryGradientsRule(parameter="a", count=1)
    candidates = SimpleNamespace(
        counted=lambda rules: LayoutCandidate(
            rules=rules, layout=ParallelLayout(data=2), seconds=0.2, nbytes=9
        )
    )
    session = SimpleNamespace(layouts=SimpleNamespace(candidates=candidates))
    session.without_measuring = lambda: session
    own._has_fallen_back, own._first_drift = gave_up, "1 ± 0.1 %"
    own._decisions = SimpleNamespace(rules=(rule, code), budget=SimpleNamespace(memory_bytes=None))
    own._coordinator.saves, own._coordinator.words = True, lambda text: text
    own._step.supports_standby = True
    own._search = SimpleNamespace(
        on_fewer_hosts=lambda *_: [], worth_trying=lambda session, now, choices, most: choices
    )
    with (
        mock.patch.object(Replanner, "_encode", lambda *_, drift: drift),
        mock.patch.object(Replanner, "_switch_to") as turned,
    ):
        assert own._switch_at_once(7, session, LinkState(link=FAST)) is not gave_up
    if not gave_up:
        turned.assert_called_once_with(7, session, "1 ± 0.1 %")


def test_a_replan_names_the_link_that_changed() -> None:
    own = adapting()
    slow, fast = LinkState(link=SLOW), LinkState(link=FAST)
    assert own._change_text(fast, slow) == (
        "host 1's link now carries 5.9 MB/s, it carried 118 MB/s when the plan was made"
    )
    assert own._change_text(slow, slow) == "plans were compared for the present links"
