"""Cluster files: valid ones are read as written, and all others give one short error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import BadInput, ClusterFileError
from steelyard.hardware.cluster import Cluster
from steelyard.hardware.cluster_file import MOST_BYTES, decode_tree
from steelyard.hardware.efficiency import AchievedFraction
from steelyard.hardware.presets import preset_tables

GIB = 1 << 30
GOOD = """
[device.mine]
memory = "80 GiB"
memory_bandwidth = "2039 GB/s"
peak = { float32 = "19.5 TFLOP/s", bfloat16 = "312 TFLOP/s" }
price = "2.5 USD/h"

[link.inside]
rate = "300 GB/s"
latency = "3 us"

[link.outside]
curve = [["4 KiB", "20 us"], ["1 MiB", "120 us"], ["64 MiB", "6 ms"]]
doubt = "20 %"

[scope.node]
members = { mine = 8 }
link = "inside"
host_memory = "1 TiB"
host_link = "pcie4-x16"

[scope.rack]
members = { node = 4 }
link = "outside"
ports = 2
"""


def refused(text: bytes | str) -> str:
    """Return the message of a file that must be refused: three lines or a few more, never long
    ones."""
    with pytest.raises(ClusterFileError) as caught:
        decode_tree(text)
    said = str(caught.value)
    assert said.count("\n") < 9, said
    assert all(len(line) < 400 for line in said.split("\n")), said
    assert said.replace("\n", "").isprintable()
    assert "plan" not in said
    return said


def test_a_cluster_file_gives_the_declared_devices() -> None:
    tree = decode_tree(GOOD)
    assert tree.num_devices == 32
    assert tree.usd_per_hour == 32 * 2.5
    device = tree.device_of(31)
    assert (device.kind, device.memory_bytes) == ("mine", 80 * GIB)
    assert device.bytes_per_second == pytest.approx(2.039e12)
    assert device.flops_per_second == device.peak_flops_per_second("float32") == 19.5e12
    assert device.peak_flops_per_second("bfloat16") == 312e12
    assert device.host_memory_bytes == 128 * GIB
    assert device.host_link is not None
    assert device.host_link.bytes_per_second == pytest.approx(24e9)
    inside, outside = (member.link for member in reversed(tree.path_to(0)))
    assert inside is not None
    assert outside is not None
    assert (inside.latency_seconds, inside.bytes_per_second) == pytest.approx((3e-6, 3e11))
    assert (outside.seconds(1 << 20, messages=1), outside.doubt) == pytest.approx((120e-6, 0.2))
    assert tree.members[0].ports == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("mine = 8", "rack = 8", "scope.node contains itself: node > rack > node"),
        ("mine = 8", "node = 8", "scope.node contains itself: node > node"),
        ("node = 4", "rack = 4", "scope.rack contains itself: rack > rack"),
        ("[scope.rack]", "[scope.a]\nmembers = {b = 1}\n[scope.b]\nmembers = {a = 1}\n[scope.rack]",
         "scope.a contains itself: a > b > a"),
        ("mine = 8", "mina = 8", "names mina, which is not declared; did you mean mine?"),
        ("mine = 8", '"" = 8', "names , which is not declared"),
        ('link = "inside"', "", "scope.node.link is missing: 8 members need a link"),
        ('link = "inside"', 'link = "insid"', "names insid, which is not declared; did you mean"),
        ("[scope.rack]", "[scope.other]\nmembers = {mine = 1}\n[scope.rack]", "2 root scopes"),
        ("mine = 8", "mine = 0", "members.mine is 0, not 1 or more"),
        ("mine = 8", "mine = -1", "members.mine is -1, not 1 or more"),
        ("mine = 8", "mine = 80000000", "not 1000000 or less"),
        ("mine = 8", "mine = 999999", "devices; at most 1000000"),
        ("mine = 8", "mine = 8.5", "is 8.5, not a whole number"),
        ("{ mine = 8 }", "{}", "scope.node.members is empty"),
        ("{ mine = 8 }", "8", "scope.node.members is 8, not a table"),
        ('memory = "80 GiB"', "", "device.mine.memory is missing"),
        ('"80 GiB"', "80", "memory = '80' has no unit"),
        ('"80 GiB"', '"80"', "memory = '80' has no unit"),
        ('"80 GiB"', '"-80 GiB"', "not a possible amount"),
        ('"80 GiB"', "true", "device.mine.memory is true, not a whole number"),
        ('"3 us"', "3", "time = '3' has no unit"),
        ("price =", 'reached = { share = "0 %" }\nprice =', "share is '0 %', not more than 0"),
        ("price =", 'reached = { share = "120 %" }\nprice =', "120 %, more than 100 %"),
        ("price =", 'reached = { share = 0.8 }\nprice =', "share = '0.8' has no unit"),
        ("price =", 'reached = "80 %"\nprice =', "reached"),
        ("price =", 'reached = { call = "9 us" }\nprice =', "reached.share is missing"),
        ("price =", 'reached = { shar = "8 %" }\nprice =', "did you mean share?"),
        ('"3 us"', '"3 fortnights"', "unknown unit 'fortnights'"),
        ('"300 GB/s"', '"300 GB"', "does not end in /s"),
        ('"300 GB/s"', '"300 Gb/s"', "may be bits or bytes"),
        ('"300 GB/s"', '"300 Gbps"', "may be bits or bytes"),
        ('"312 TFLOP/s"', '"312 TB/s"', "unknown unit"),
        ("USD", "EUR", "unknown unit 'EUR'"),
        ('"6 ms"', '"100 us"', "has times that decrease"),
        ('"6 ms"', '"120 us"', "flat at its end"),
        ('["4 KiB", "20 us"]', '["4 KiB"]', "a size and a time"),
        ('["4 KiB", "20 us"]', '["4 KiB", 20]', "time = '20' has no unit"),
        ("curve =", 'rate = "1 GB/s"\ncurve =', "a curve and a rate or latency"),
        ("latency", "latencey", "latencey is not a known key; did you mean latency?"),
        ("bfloat16", "bflot16", "bflot16 is not a known key; did you mean bfloat16?"),
        ("[link.", "[links.", "links is not a known key; did you mean link?"),
        ("[device.mine]", "[device.mine]\npreset = 'A100'", "A100-SXM4-40GB or A100-SXM4-80GB"),
        ("[device.mine]", "[scope.mine]\nmembers = {T4 = 1}\n[device.mine]", "both a device and a"),
        ("[device.mine]", "preset = 'dgx-a100'\n[device.mine]", "and also declares scopes"),
        ("[device.mine]", "format = 2\n[device.mine]", "later version of Steelyard"),
        ("[device.mine]", "[link.x]\nlatency = '1 us'\n[device.mine]", "link.x.rate is missing"),
        ("[scope.rack]", "[scope.rack]\nhost_link = 3", "scope.rack.host_link is 3, not a string"),
        ('price = "2.5', 'host_memory = "1 GiB"\nprice = "2.5', "both set host_memory"),
        (GOOD, "", "declares neither a scope"),
        (GOOD, "scope = 3", "scope is 3, not a table"),
        (GOOD, "[scope]\nx = 3", "scope.x is not a table"),
        (GOOD, "preset = 'dgx-h10'", "did you mean dgx-h100?"),
        (GOOD, "[[[", "is not TOML"),
        (GOOD, "a.b" + ".c" * 1000 + " = 1", "more than 32 parts"),
        (GOOD, "[scope.'\u202e']\nmembers = { }", "members is empty"),
    ],
)  # fmt: skip
def test_errors_name_the_wrong_key(old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert said in refused(GOOD.replace(old, new))


def test_several_problems_are_reported_at_once() -> None:
    text = GOOD.replace('"80 GiB"', "80").replace('"2.5 USD/h"', '"2.5 USD"')
    assert "has 2 problems" in refused(text)


def test_a_file_that_is_large_or_no_text_is_refused() -> None:
    assert "larger than 1 MiB" in refused("#" * (MOST_BYTES + 1))
    assert "not UTF-8" in refused(b"\xff")
    chain = "".join(f"[scope.s{i}]\nmembers = {{ s{i + 1} = 9 }}\n" for i in range(62))
    assert "devices; at most 1000000" in refused(
        f"{chain}[scope.s62]\nmembers = {{ T4 = 9 }}\n".replace("}", '}\nlink = "pcie3-x16"')
    )


@settings(deadline=None)
@given(
    st.text(max_size=60)
    | st.tuples(st.integers(0, len(GOOD)), st.integers(0, 40), st.text(max_size=8)).map(
        lambda cut: GOOD[: cut[0]] + cut[2] + GOOD[cut[0] + cut[1] :]
    )
)
def test_any_text_gives_a_tree_or_one_error(text: str) -> None:
    try:
        tree = decode_tree(text)
    except ClusterFileError:
        assert refused(text)
    else:
        assert tree.num_devices > 0


# --- presets --------------------------------------------------------------------------------------


def test_keys_of_a_preset_can_be_overridden() -> None:
    tree = decode_tree(
        """
        [device.cool]
        preset = "H100-SXM5"
        memory = "60 GiB"
        peak = { bfloat16 = "700 TFLOP/s" }
        [link.slow]
        preset = "infiniband-ndr"
        curve = [["1 MiB", "1 ms"], ["2 MiB", "2 ms"]]
        [scope.node]
        preset = "dgx-h100"
        members = { cool = 4 }
        [scope.all]
        members = { node = 2, dgx-h100 = 1 }
        link = "slow"
        """
    )
    cool = tree.device_of(0)
    assert cool.memory_bytes == 60 * GIB
    assert cool.peak_flops_per_second("bfloat16") == pytest.approx(700e12)
    assert cool.peak_flops_per_second("float32") == pytest.approx(66.9e12)
    assert [count for _, count in tree.classes] == [8, 8]
    assert tree.members[0].link is not None
    assert tree.members[0].link.seconds(2 << 20, messages=1) == 2e-3


def test_the_reached_share_is_that_of_the_preset_unless_overridden() -> None:
    tree = decode_tree(
        """
        [device.as_fitted]
        preset = "A100-SXM4-80GB"
        memory = "78 GiB"
        [device.mine]
        preset = "A100-SXM4-80GB"
        reached = { share = "55 %" }
        [device.unknown]
        memory = "24 GiB"
        memory_bandwidth = "600 GB/s"
        peak = { float32 = "35 TFLOP/s" }
        [scope.all]
        members = { A100-SXM4-80GB = 1, as_fitted = 1, mine = 1, unknown = 1 }
        link = "infiniband-ndr"
        """
    )
    preset, as_fitted, mine, unknown = (tree.device_of(rank) for rank in range(4))
    assert preset.reached == as_fitted.reached
    assert preset.reached is not None
    assert preset.reached.calibration is not None
    # A declared share replaces the whole fit.
    assert mine.reached == AchievedFraction(share=0.55)
    assert unknown.reached is None
    assert "which was fitted on" in preset.rates_said
    assert "Megatron-LM" in preset.rates_said
    assert mine.rates_said.endswith(
        "at 55 % of its declared rates, as declared in the cluster file"
    )
    assert "which programs do not reach" in unknown.rates_said
    assert mine.identity != replace(mine, reached=None).identity
    # A value that was not declared does not change the fingerprint of a plan.
    known = replace(unknown, reached=AchievedFraction(share=1.0)).identity
    assert known.startswith(unknown.identity.removesuffix(")"))
    for share in (0.0, 1.5):
        with pytest.raises(BadInput, match="shares above 0 and at most 1"):
            AchievedFraction(share=share)


def test_machines_of_different_networks_use_their_own_links() -> None:
    tree = decode_tree('[scope.all]\nmembers = { dgx-h100 = 2, "p3dn.24xlarge" = 3 }')
    kinds = [(m.link.kind, m.ports, m.count) for m in tree.members if m.link]
    assert kinds == [("infiniband-ndr", 8, 2), ("efa-100g", 1, 3)]


@pytest.mark.parametrize("name", preset_tables()["scope"])
def test_every_preset_machine_can_be_named(name: str, tmp_path: Path) -> None:
    tree = Cluster.named(name).tree
    assert tree.num_devices > 1
    assert all(device.host_link for device, _ in tree.classes)
    file = tmp_path / "cluster.toml"
    file.write_text(f'preset = "{name}"\n')
    assert Cluster.load(file).tree == tree
    file.write_text(f'[scope.two]\nmembers = {{ "{name}" = 2 }}\n')
    assert Cluster.load(file).num_devices == 2 * tree.num_devices


def test_every_device_and_link_can_be_used() -> None:
    for device in preset_tables()["device"]:
        for link in preset_tables()["link"]:
            tree = decode_tree(f'[scope.x]\nmembers = {{ {device} = 2 }}\nlink = "{link}"')
            assert tree.device_of(1).kind == device
            assert tree.members[0].link is not None
            assert tree.members[0].link.kind == link


@pytest.mark.parametrize("kind", ["device", "link", "scope"])
def test_every_preset_names_its_sources(kind: str) -> None:
    named = r"https?://\S+: \S|NCCL, src/\S+ at \w+: |NVIDIA .*: |remembered: \S|no product: "
    named += "|the rate is its name"
    for name, table in preset_tables()[kind].items():
        assert table["source"], name
        for source in table["source"]:
            assert re.match(named, source) or re.match(r"https?://\S+, .*: \S", source), source
        priced = any(re.search(r"USD an hour.* 20\d\d", source) for source in table["source"])
        assert ("price" in table) == priced, f"{name}: a price has a date, or there is none"


def test_a_newer_generation_is_no_slower() -> None:
    """This detects a wrong digit."""
    for devices in (
        ("K80", "T4", "V100-SXM2-16GB", "A100-SXM4-40GB", "H100-PCIe", "H100-SXM5", "B200"),
        ("RTX-3060", "RTX-3070", "RTX-3080", "RTX-3090"),
        ("RTX-4060", "RTX-4060-Ti-16GB", "RTX-4070", "RTX-4070-Ti", "RTX-4080", "RTX-4090"),
        ("RTX-3080", "RTX-4080", "RTX-5080", "RTX-5090"),
        ("A10", "A40", "RTX-A6000", "L40", "RTX-6000-Ada", "L40S"),
    ):
        trees = [decode_tree(f"[scope.x]\nmembers = {{ {name} = 1 }}") for name in devices]
        rates = [tree.device_of(0).flops_per_second for tree in trees]
        assert rates == sorted(rates)
    for order in (
        ("pcie3-x16", "pcie4-x16", "pcie5-x16", "nvlink-c2c"),
        ("pcie4-x8", "pcie4-x16"),
        ("nvlink-v100", "nvlink-a100", "nvlink-h100", "nvlink-b200"),
        ("ethernet-1g", "ethernet-10g", "ethernet-25g", "ethernet-100g"),
        ("infiniband-edr", "infiniband-hdr", "infiniband-ndr", "infiniband-xdr"),
    ):
        text = "[scope.x]\nmembers = {{ T4 = 2 }}\nlink = '{}'"
        links = [decode_tree(text.format(name)).members[0].link for name in order]
        sizes = [link.seconds(1 << 26, messages=1) for link in links if link]
        assert sizes == sorted(sizes, reverse=True)


def test_peaks_of_tensor_cores_are_dense_and_in_order() -> None:
    """This detects a peak with sparsity, or with the accumulation of another one."""
    for name, table in preset_tables()["device"].items():
        peak = {dtype: float(rate.split()[0]) for dtype, rate in table["peak"].items()}
        half = peak.get("float16")
        if "bfloat16" not in peak or half is None:
            continue
        assert peak["bfloat16"] == half, name
        assert half / peak.get("tf32", half / 2) == pytest.approx(2, rel=0.03), name
        assert peak.get("float8", 2 * half) / half == pytest.approx(2, rel=0.03), name
        # GeForce cards accumulate integers at the full rate, and FP16 in FP32 at half of it.
        assert peak.get("int8", 2 * half) / half == pytest.approx(2, rel=0.03) or (
            name.startswith("RTX-") and peak["int8"] / half == pytest.approx(4, rel=0.03)
        ), name


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ClusterFileError, match="unknown cluster preset dgx-h10"):
        Cluster.named("dgx-h10")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "absent.toml", "does not exist"), (tmp_path, "is not a file")):
        with pytest.raises(ClusterFileError, match=rf"{said}(.|\n)*next: check the name$"):
            Cluster.load(path)
