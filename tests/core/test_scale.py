"""The laws of Amdahl and Gustafson, and the shares that fit what was found."""

from __future__ import annotations

import pytest

from steelyard.core.scale import (
    Run,
    ScalePoint,
    Scaling,
    amdahl,
    amdahl_share,
    gustafson,
    gustafson_share,
)

_TIMES = (1, 2, 4, 8, 92)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_what_keeps_a_law_gives_its_share_back(share: float) -> None:
    assert amdahl_share([(n, amdahl(n, share)) for n in _TIMES]) == pytest.approx(share)
    assert gustafson_share([(n, gustafson(n, share)) for n in _TIMES]) == pytest.approx(share)


def test_the_laws_at_their_ends() -> None:
    assert [amdahl(n, 0.0) for n in _TIMES] == pytest.approx(list(_TIMES))
    assert [gustafson(n, 0.0) for n in _TIMES] == pytest.approx(list(_TIMES))
    assert amdahl(1e9, 0.05) == pytest.approx(20, rel=1e-3)
    # Ten devices, of which a tenth of the time is one's: Gustafson's own reckoning.
    assert gustafson(10, 0.1) == pytest.approx(9.1)


def test_a_point_that_does_not_fit_is_left_out() -> None:
    def run(seconds: float, samples: int) -> Run:
        return Run(layout="d", samples=samples, step_seconds=seconds)

    scaling = Scaling(
        title="t",
        cluster="c",
        points=(
            ScalePoint(devices=4, same_batch=run(8.0, 4), grown_batch=run(8.0, 4)),
            ScalePoint(devices=6, same_batch=None, grown_batch=run(8.0, 6)),
            ScalePoint(devices=8, same_batch=run(4.0, 4), grown_batch=run(16.0, 8)),
        ),
    )
    first, middle, last = scaling.points
    assert [scaling.speed_up(p) for p in scaling.points] == [1.0, None, 2.0]
    assert scaling.scaled_speed_up(last) == 1.0
    assert scaling.scaled_speed_up(middle) == 1.5
    assert scaling.serial_share == pytest.approx(0)
    assert 0 < scaling.constant_share < 1
    assert scaling.times(first) == 1
