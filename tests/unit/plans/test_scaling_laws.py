"""The laws of Amdahl and Gustafson, and the shares that fit the results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import BadInput
from steelyard.hardware.cluster import Cluster
from steelyard.plans.scaling_laws import (
    Run,
    ScalePoint,
    Scaling,
    amdahl,
    amdahl_share,
    check_devices,
    gustafson,
    gustafson_share,
)
from steelyard.report.scaling import rendered, to_json
from steelyard.report.styled_text import plain

_TIMES = (1, 2, 4, 8, 92)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_fitting_a_scaling_law_recovers_its_parameter(share: float) -> None:
    assert amdahl_share([(n, amdahl(n, share)) for n in _TIMES]) == pytest.approx(share)
    assert gustafson_share([(n, gustafson(n, share)) for n in _TIMES]) == pytest.approx(share)


def test_the_laws_at_their_ends() -> None:
    assert [amdahl(n, 0.0) for n in _TIMES] == pytest.approx(list(_TIMES))
    assert [gustafson(n, 0.0) for n in _TIMES] == pytest.approx(list(_TIMES))
    assert amdahl(1e9, 0.05) == pytest.approx(20, rel=1e-3)
    # Gustafson's own example: ten devices, and a serial share of a tenth.
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


def _scaling(seconds: list[float], grown: list[float]) -> Scaling:
    points = [
        ScalePoint(
            devices=2**n,
            same_batch=Run(layout="d", samples=64, step_seconds=same),
            grown_batch=Run(layout="d", samples=64 * 2**n, step_seconds=more),
        )
        for n, (same, more) in enumerate(zip(seconds, grown, strict=True))
    ]
    return Scaling(title="t", cluster="c", points=tuple(points))


_SECONDS = st.lists(st.floats(0.01, 100), min_size=3, max_size=3)


@given(same=_SECONDS, grown=_SECONDS)
def test_a_fitted_share_is_within_0_and_1_or_missing(same: list[float], grown: list[float]) -> None:
    scaling = _scaling(same, grown)
    for share, slow in (
        (scaling.serial_share, scaling.slowest_of_the_same_batch),
        (scaling.constant_share, scaling.slowest_of_the_grown_batch),
    ):
        assert (share is None and slow is not None) or 0 <= (share or 0) <= 1
    said = plain(rendered(scaling, width=100))
    assert (scaling.serial_share is None) == ("Amdahl: no serial share" in said)
    assert (scaling.constant_share is None) == ("Gustafson: no constant share" in said)
    assert to_json(scaling)["serial_share"] == scaling.serial_share


def test_slower_scaling_is_described_in_words() -> None:
    """In this small step, exchanges take more time than sharing the work saves."""
    scaling = _scaling([1.0, 1.01, 1.004], [1.0, 2.3, 3.9])
    said = " ".join(plain(rendered(scaling, width=100)).split())
    assert "2 devices take longer than 1, because of their communication" in said
    assert "2 devices process fewer samples a second than 1" in said or scaling.constant_share
    assert "100." not in said


def test_one_number_of_devices_fits_no_law() -> None:
    scaling = _scaling([1.0], [1.0])
    assert scaling.serial_share is scaling.constant_share is None
    assert "a law needs" in plain(rendered(scaling, width=100))


@pytest.mark.parametrize(("fewest", "most"), [(0, 4), (4, 2), (1, 9)])
def test_devices_that_the_cluster_does_not_have_are_refused(fewest: int, most: int) -> None:
    check_devices(Cluster.named("dgx-h100"), 1, 8)
    with pytest.raises(BadInput, match="are not in a cluster of 8"):
        check_devices(Cluster.named("dgx-h100"), fewest, most)
