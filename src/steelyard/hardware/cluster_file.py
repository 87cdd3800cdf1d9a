"""Reads cluster files: devices, links and scopes in hand-written TOML.

A table may inherit keys from a preset, and a preset may be named instead of a table. Not for the
schema of tables: see cluster_schema.py; nor for presets: see presets.py.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from steelyard.errors import ClusterFileError, PlanFileError, SteelyardError
from steelyard.hardware.calibration import Calibration, Domain, Pairs, Score
from steelyard.hardware.cluster_schema import (
    KINDS,
    CalibrationTable,
    DeviceTable,
    DomainTable,
    Head,
    LinkTable,
    PairsTable,
    ReachedTable,
    ScopeTable,
)
from steelyard.hardware.device import Device
from steelyard.hardware.efficiency import AchievedFraction
from steelyard.hardware.link import Link
from steelyard.hardware.presets import preset_tables
from steelyard.hardware.topology import LevelMember, TopologyLevel
from steelyard.safe_files import close_to, problems_of, read_bytes, refusal, toml_tables
from steelyard.safe_text import printable

FORMAT = 1
MOST_BYTES = 2**20
# Ten times the largest cluster ever trained on; a larger number is a typing error.
MOST_DEVICES = 1_000_000

_Table = TypeVar("_Table", bound=BaseModel)


def read_tree(path: Path) -> TopologyLevel:
    try:
        raw = read_bytes(path, most_bytes=MOST_BYTES)
    except PlanFileError as error:
        raise _as_cluster_error(error, remedy="check the name") from None
    return decode_tree(raw, source=str(path))


def decode_tree(raw: bytes | str, *, source: str = "the cluster file") -> TopologyLevel:
    try:
        return _ClusterReader(toml_tables(raw, source=source, most_bytes=MOST_BYTES), source).tree()
    except PlanFileError as error:
        raise _as_cluster_error(error, remedy="restore the file, or write it again") from None


def preset_tree(name: str) -> TopologyLevel:
    """Return a preset machine by its name, or one preset device by its whole name."""
    machines = preset_tables()["scope"]
    if name in preset_tables()["device"]:
        return gpu_tree(name)
    if name not in machines:
        raise ClusterFileError(
            f"unknown cluster preset {printable(str(name), most=60)}",
            expected=f"one of {', '.join(machines)}",
            remedy="choose a preset, or declare the cluster in a file: see docs/cluster-files.md",
        )
    return _ClusterReader({"preset": name}, name).tree()


def gpu_tree(name: str) -> TopologyLevel:
    """Return one preset device; see ``preset_device``."""
    device = preset_device(name)
    member = LevelMember(of=device, count=1, link=None)
    return TopologyLevel(name=device.kind, members=(member,))


def preset_device(name: str) -> Device:
    """Return a preset device by its name, or by parts of it that fit no other: ``A100-40``.

    A family name, such as ``H100``, gives the device of that name, or the first one of the family
    if all of them have the same memory.
    """
    presets = preset_tables()["device"]
    devices = list(presets)
    found = [d for d in devices if d.lower() == name.lower()]
    found = found or [d for d in devices if _family(name, d)]
    families = {_family(name, d) for d in found}
    if len(families) == 1:
        same_memory = len({presets[d]["memory"] for d in found}) == 1
        found = [d for d in found if d in families] or (found[:1] if same_memory else found)
    if len(found) == 1:
        tables = {"scope": {"gpu": {"members": {found[0]: 1}}}}
        device = _ClusterReader(tables, name).tree().members[0].of
        assert isinstance(device, Device)
        return device
    close = difflib.get_close_matches(name.upper(), devices, n=1)
    problem = "is unknown" + (f"; did you mean {close[0]}?" if close else "")
    raise ClusterFileError(
        f"the GPU {printable(name, most=60)} "
        + (f"could be {' or '.join(found)}" if found else problem),
        expected=f"one of {', '.join(found)}"
        if found
        else "a preset, such as RTX-4090, A100-40 or H100: see docs/cluster-presets.md",
        remedy="choose one, or declare the device in a file: see docs/cluster-files.md",
    )


def _family(given: str, name: str) -> str:
    """Return the name up to the last part that ``given`` abbreviates, or nothing.

    Each part of ``given`` starts a part of the name, in the same order.
    """
    parts, end = name.split("-"), 0
    for prefix in given.lower().split("-"):
        fits = (i for i in range(end, len(parts)) if parts[i].lower().startswith(prefix))
        end = next(fits, -1) + 1
        if not end:
            return ""
    return "-".join(parts[:end])


def _as_cluster_error(error: PlanFileError, *, remedy: str) -> ClusterFileError:
    """Convert an error of the generic file reader, whose remedies are for plan files."""
    return ClusterFileError(
        error.happened,
        expected="devices, links and scopes, as docs/cluster-files.md describes them",
        remedy=remedy,
    )


class _InvalidTable(Exception):
    """The error for an unusable table; the reason has already been recorded."""


class _ClusterReader:
    """Builds the tree of one file; problems are collected and raised together."""

    def __init__(self, tables: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._tables = tables
        self._presets = preset_tables()
        self._problems: list[str] = []
        self._own: dict[str, dict[str, Any]] = {}
        self._links: dict[str, Link] = {}
        self._scopes: dict[str, TopologyLevel] = {}

    def tree(self) -> TopologyLevel:
        root = self._root()
        try:
            tree = self._scope(root, within=()) if root else None
            # Check unused tables too, because a loop of scopes cannot be reached from a root.
            for name in self._own["scope"]:
                self._scope(name, within=())
            for name in self._own["device"]:
                self._device_table(name)
            for name in self._own["link"]:
                self._link(name)
        except _InvalidTable:
            tree = None
        if tree is not None and tree.num_devices > MOST_DEVICES:
            self._problems.append(
                f"declares {tree.num_devices:.3g} devices; at most {MOST_DEVICES} are supported"
            )
        if self._problems or tree is None:
            raise refusal(self._source, list(dict.fromkeys(self._problems)))
        return tree

    def _root(self) -> str:
        """Return the scope that no other scope contains, or the preset that is the whole
        cluster.
        """
        given = self._tables.get("format")
        if type(given) is int and given > FORMAT:
            raise refusal(self._source, ["was written for a later version of Steelyard"])
        try:
            head = Head.model_validate(self._tables)
        except ValidationError as error:
            raise refusal(self._source, problems_of(error, Head)) from None
        self._own = {kind: dict(getattr(head, kind)) for kind in KINDS}
        scopes = self._own["scope"]
        if head.preset is not None and not scopes:
            self._own["scope"] = {head.preset: {"preset": head.preset}}
            return head.preset
        if head.preset is not None:
            self._problems.append("names a preset and also declares scopes")
        members = [table.get("members") for table in scopes.values() if isinstance(table, dict)]
        member_names = {name for inner in members if isinstance(inner, dict) for name in inner}
        roots = [name for name in scopes if name not in member_names]
        if len(roots) > 1:
            names = " and ".join(printable(name, most=60) for name in roots[:3])
            self._problems.append(f"has {len(roots)} root scopes: no scope contains {names}")
        if not scopes:
            self._problems.append("declares neither a scope ([scope.NAME]) nor a preset")
        if scopes and not roots:
            roots = [next(iter(scopes))]  # a loop, which _scope detects
        return roots[0] if len(roots) == 1 else ""

    # --- tables, with what they take from presets -------------------------------------------------

    def _table(self, kind: str, name: str, model: type[_Table]) -> _Table:
        given = self._own[kind].get(name)
        place = f"{kind}.{printable(name, most=60)}"
        if given is None:
            return model.model_validate(self._presets[kind][name])
        if not isinstance(given, dict):
            raise self._problem(f"{place} is not a table")
        base: dict[str, Any] = {}
        preset = given.get("preset")
        if isinstance(preset, str):
            if preset not in self._presets[kind]:
                known = _suggestion(preset, list(self._presets[kind]))
                raise self._problem(f"{place}.preset is not a known {kind}{known}")
            base = _without_overridden(self._presets[kind][preset], by=given)
        try:
            return model.model_validate({**base, **given, **_peaks(base, given)})
        except ValidationError as error:
            self._problems += problems_of(error, model, within=(kind, name))
            raise _InvalidTable from None

    def _problem(self, problem: str) -> _InvalidTable:
        self._problems.append(problem)
        return _InvalidTable()

    def _unknown_name(self, place: str, name: str, *kinds: str) -> _InvalidTable:
        known = [known for kind in kinds for known in (*self._own[kind], *self._presets[kind])]
        suggestion = _suggestion(name, known)
        # The list of all presets would be too long to read.
        hint = suggestion if "did you mean" in suggestion else ", nor is it a preset"
        return self._problem(
            f"{place} names {printable(name, most=60)}, which is not declared{hint}"
        )

    # --- from tables to values --------------------------------------------------------------------

    def _link(self, name: str, place: str = "") -> Link:
        if name in self._links:
            return self._links[name]
        if name not in self._own["link"] and name not in self._presets["link"]:
            raise self._unknown_name(place, name, "link")
        table = self._table("link", name, LinkTable)
        self._links[name] = self._to_link(table, name)
        return self._links[name]

    def _to_link(self, table: LinkTable, name: str) -> Link:
        place, kind = f"link.{printable(name, most=60)}", table.preset or name
        rate, latency = table.rate, table.latency
        if table.curve is not None:
            if rate is not None or latency is not None:
                raise self._problem(f"{place} has both a curve and a rate or latency")
            try:
                return Link.curve(table.curve, kind=kind, doubt=table.doubt)
            except SteelyardError as error:
                raise self._problem(f"{place}.curve cannot be used: {error.happened}") from None
        if rate is None or latency is None:
            missing = "rate" if rate is None else "latency"
            raise self._problem(f"{place}.{missing} is missing")
        return Link(kind=kind, latency_seconds=latency, bytes_per_second=rate, doubt=table.doubt)

    def _device_table(self, name: str) -> DeviceTable:
        return self._table("device", name, DeviceTable)

    def _device(self, name: str, *, scope: ScopeTable, within: str, count: int) -> Device:
        """Return the device, with the share of host memory and the host link that its scope
        declares.
        """
        table = self._device_table(name)
        place = f"device.{printable(name, most=60)}"
        for key in ("host_memory", "host_link"):
            if getattr(table, key) is not None and getattr(scope, key) is not None:
                raise self._problem(f"{place} and scope.{within} both set {key}")
        link = table.host_link or scope.host_link
        shared = None if scope.host_memory is None else scope.host_memory // count
        return Device(
            kind=table.preset or name,
            flops_per_second=table.peak.float32,
            bytes_per_second=table.memory_bandwidth,
            memory_bytes=table.memory,
            call_seconds=table.call,
            peaks=table.peak.pairs(),
            host_memory_bytes=table.host_memory or shared,
            host_link=None if link is None else self._link(link, f"{place}.host_link"),
            usd_per_hour=table.price,
            reached=_reached(table.reached),
        )

    def _scope(self, name: str, *, within: tuple[str, ...]) -> TopologyLevel:
        if name in within:
            loop = " > ".join(printable(n, most=30) for n in (*within[within.index(name) :], name))
            raise self._problem(f"scope.{printable(name, most=60)} contains itself: {loop}")
        if name in self._scopes:
            return self._scopes[name]
        table = self._table("scope", name, ScopeTable)
        if not table.members:
            raise self._problem(f"scope.{printable(name, most=60)}.members is empty")
        members = [
            self._member(member, table=table, name=name, within=(*within, name))
            for member in table.members
        ]
        scope = TopologyLevel(name=name, members=tuple(members), own_usd_per_hour=table.price)
        self._scopes[name] = scope
        return scope

    def _member(
        self, member: str, *, table: ScopeTable, name: str, within: tuple[str, ...]
    ) -> LevelMember:
        place, num_members = f"scope.{printable(name, most=60)}", sum(table.members.values())
        link, ports = table.link, table.ports
        of: Device | TopologyLevel
        if self._kind_of(member, f"{place}.members") == "scope":
            of = self._scope(member, within=within)
            if link is None:
                inner = self._table("scope", member, ScopeTable)
                link, ports = inner.out_link, inner.out_ports
        else:
            of = self._device(member, scope=table, within=name, count=num_members)
        if link is None and num_members > 1:
            raise self._problem(f"{place}.link is missing: {num_members} members need a link")
        member_link = None if link is None else self._link(link, f"{place}.link")
        return LevelMember(of=of, count=table.members[member], link=member_link, ports=ports)

    def _kind_of(self, name: str, place: str) -> str:
        """Return the kind of a name; declarations in the file take precedence over presets."""
        for known in (self._own, self._presets):
            kinds = [kind for kind in ("scope", "device") if name in known[kind]]
            if len(kinds) > 1:
                raise self._problem(f"{printable(name, most=60)} is both a device and a scope")
            if kinds:
                return kinds[0]
        raise self._unknown_name(place, name, "scope", "device")


def _reached(table: ReachedTable | None) -> AchievedFraction | None:
    if table is None:
        return None
    return AchievedFraction(
        share=table.share,
        attention_share=table.attention,
        call_seconds=table.call,
        source=table.fitted,
        median_error=table.error,
        calibration=None if table.calibration is None else _calibration(table.calibration),
    )


def _calibration(table: CalibrationTable) -> Calibration:
    def pairs(found: PairsTable | None) -> Pairs | None:
        if found is None:
            return None
        return Pairs(count=found.count, high_error=found.high_error)

    return Calibration(
        fitted=_domain(table.fitted),
        scores=tuple(
            Score(
                kind=score.kind,
                inside=score.inside,
                domain=_domain(score),
                median_error=score.median_error,
                high_error=score.high_error,
                bias=score.bias,
                doubt=score.doubt,
                worst_software=score.worst_software,
                worst_error=score.worst_error,
            )
            for score in table.score
        ),
        alike=pairs(table.alike),
        unlike=pairs(table.unlike),
    )


def _domain(table: DomainTable) -> Domain:
    (fewest, most), (least, largest) = table.devices, table.parameters
    return Domain(
        rows=table.rows,
        software=tuple(table.software),
        models=tuple(table.models),
        kinds=tuple(table.kinds),
        precisions=tuple(table.precisions),
        parameters=(least, largest),
        devices=(fewest, most),
    )


def _suggestion(given: str, known: Sequence[str]) -> str:
    """Suggest completions of a prefix, such as ``A100``, or else the closest known name."""
    completions = [name for name in known if given and name.lower().startswith(given.lower())]
    return (
        f"; did you mean {' or '.join(completions[:3])}?" if completions else close_to(given, known)
    )


def _without_overridden(base: Mapping[str, Any], *, by: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset without the keys that the keys in ``by`` replace."""
    dropped = {"rate", "latency"} if "curve" in by else {"curve"} if "rate" in by else set()
    return {key: value for key, value in base.items() if key not in dropped}


def _peaks(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset's peak rates updated by the given ones, so that a single one can be
    corrected.
    """
    own = given.get("peak")
    return {"peak": {**base["peak"], **own}} if isinstance(own, dict) and "peak" in base else {}
