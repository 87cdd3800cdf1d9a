"""The verdict on a need and a capacity, and the changes that are left out."""

from __future__ import annotations

import pytest

from steelyard.errors import ClusterFileError
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.presets import preset_tables
from steelyard.plans.memory_fit import (
    DOUBT,
    SHARDED_DOUBT,
    Capacity,
    FitVerdict,
    Lever,
    without_needless,
)

GPU = Capacity(kind="RTX-4090", memory_bytes=24 * 2**30, is_gpu=True)


def test_it_fits_only_if_the_error_of_the_estimate_fits_too() -> None:
    usable = GPU.usable_bytes
    assert usable < GPU.memory_bytes
    assert GPU.verdict(usable + 1) is FitVerdict.DOES_NOT_FIT
    assert GPU.verdict(usable) is FitVerdict.TIGHT
    assert GPU.verdict(int(usable / (1 + DOUBT)) - 1) is FitVerdict.FITS


def test_a_cpu_has_no_context_beside_the_tensors() -> None:
    assert Capacity(kind="cpu", memory_bytes=2**30, is_gpu=False).usable_bytes == 2**30


def test_several_devices_are_estimated_less_precisely() -> None:
    two = Capacity.of(Cluster.gpu("RTX-4090").device, count=2)
    nbytes = int(two.usable_bytes / (1 + SHARDED_DOUBT))
    assert SHARDED_DOUBT > DOUBT
    assert two.verdict(nbytes - 1) is FitVerdict.FITS
    assert two.verdict(nbytes + 2) is FitVerdict.TIGHT
    assert GPU.verdict(nbytes + 2) is FitVerdict.FITS


def test_the_memory_of_a_host_is_offload_memory_only_if_it_is_known() -> None:
    assert Cluster.gpu("RTX-4090").host_memory is None, "no preset of a card knows its host"
    known = Cluster.gpu("RTX-4090", host_memory="64 GiB")
    memory, link = known.host_memory, known.device.host_link
    assert memory is not None
    assert link is not None
    assert (memory.size_bytes, memory.is_host) == (64 * 2**30, True)
    assert memory.bytes_per_second == link.bytes_per_second
    assert Cluster.named("dgx-h100").host_memory is None, "several devices have their own search"
    assert Cluster.here().host_memory is None


def test_a_change_that_contains_another_one_is_left_out() -> None:
    a = Lever(changes=("a",), pays="", nbytes=1)
    b_and_c = Lever(changes=("b", "c"), pays="", nbytes=1)
    a_and_c = Lever(changes=("a", "c"), pays="", nbytes=1)
    assert without_needless([a_and_c, a, b_and_c]) == (a, b_and_c)
    assert a_and_c.name == "a, and c"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("RTX-4090", "RTX-4090"), ("rtx-4090", "RTX-4090"), ("4090", "RTX-4090"),
        ("A100-40", "A100-SXM4-40GB"), ("h100-p", "H100-PCIe"), ("A6000", "RTX-A6000"),
        # The first one of a family with the same memory, and the one with the family's name.
        ("h100", "H100-SXM5"), ("4060", "RTX-4060"), ("L40", "L40"), ("A10", "A10"),
    ],
)  # fmt: skip
def test_a_gpu_is_found_by_a_part_of_its_name(given: str, kind: str) -> None:
    device = Cluster.gpu(given).device
    assert device.kind == kind
    assert device.memory_bytes > 2**30


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("A100", "the GPU A100 could be A100-SXM4-40GB or A100-SXM4-80GB"),
        ("RTX-4060-Ti", "the GPU RTX-4060-Ti could be RTX-4060-Ti-8GB or RTX-4060-Ti-16GB"),
        # The same memory does not make one family of two.
        ("16GB", "the GPU 16GB could be V100-SXM2-16GB or RTX-4060-Ti-16GB"),
        ("RTX-4091", r"the GPU RTX-4091 is unknown; did you mean RTX-4090\?"),
        ("", "the GPU  is unknown|could be"),
    ],
)
def test_an_unclear_gpu_is_refused_by_name(given: str, said: str) -> None:
    with pytest.raises(ClusterFileError, match=said):
        Cluster.gpu(given)


def test_each_preset_gpu_is_found_by_its_own_name() -> None:
    for name in preset_tables()["device"]:
        assert Cluster.gpu(name).device.kind == name
