"""Writes the tables of docs/cluster-presets.md from the presets: devices, links, machines, sources.

    python -m tests.system.docs.clusters

Not for changing a figure: see src/steelyard/hardware/preset/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steelyard.hardware.calibration import percent
from steelyard.hardware.presets import preset_tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cluster-presets.md"
_BEGIN, _END = "<!-- presets -->", "<!-- end of presets -->"
_DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")

Table = dict[str, Any]


def section() -> str:
    tables = preset_tables()
    parts = (
        ("Devices", "device", _device_head(), _device),
        ("Links", "link", ("link", "rate", "latency"), _link),
        (
            "Machines",
            "scope",
            ("machine", "devices", "joined by", "out by", "host", "price"),
            _machine,
        ),
    )
    return "\n".join(_part(name, tables[kind], head, row) for name, kind, head, row in parts)


def page(now: str, presets: str) -> str:
    head, rest = now.split(_BEGIN)
    return f"{head}{_BEGIN}\n\n{presets}\n{_END}{rest.split(_END)[1]}"


def _part(
    name: str, tables: Table, head: tuple[str, ...], row: Callable[[Table], tuple[str, ...]]
) -> str:
    lines = [f"## {name}\n", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| `{key}` | {' | '.join(row(table))} |" for key, table in tables.items()]
    return "\n".join([*lines, "", *_sources(tables)])


def _sources(tables: Table) -> Iterator[str]:
    yield "Where these figures are from:\n"
    for key, table in tables.items():
        yield f"- `{key}`: {'; '.join((*table['source'], *_fit(table)))}."
    yield ""


def _fit(table: Table) -> Iterator[str]:
    known = table.get("reached", {}).get("calibration")
    if known is None:
        return
    fitted = known["fitted"]
    of = "; ".join(", ".join(fitted[key]) for key in ("models", "software", "kinds", "precisions"))
    yield f"reached: fitted on {fitted['rows']} published steps ({of})"
    for score in known["score"]:
        if not score["kind"]:
            where = "like those" if score["inside"] else "unlike those"
            software = ", ".join(score["software"])
            yield (
                f"{score['rows']} steps {where} ({software}) missed by a median of "
                f"{percent(score['median_error'])}, 90th percentile {percent(score['high_error'])}"
            )


def _device_head() -> tuple[str, ...]:
    return (
        "device",
        "memory",
        "bandwidth",
        *(f"{dtype}, TFLOP/s" for dtype in _DTYPES),
        "host",
        "reached",
    )


def _device(table: Table) -> tuple[str, ...]:
    peaks = (table["peak"].get(dtype, "").removesuffix(" TFLOP/s") for dtype in _DTYPES)
    reached = table.get("reached", {}).get("share", "")
    return (table["memory"], table["memory_bandwidth"], *peaks, table["host_link"], reached)


def _link(table: Table) -> tuple[str, ...]:
    return (table["rate"], table["latency"])


def _machine(table: Table) -> tuple[str, ...]:
    devices = ", ".join(f"{count} {name}" for name, count in table["members"].items())
    ports = table.get("out_ports", 1)
    out = f"{ports} x {table['out_link']}" if ports > 1 else table["out_link"]
    unknown = "not known"
    return (
        devices, table["link"], out, table.get("host_memory", unknown), table.get("price", unknown),
    )  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), section()), encoding="utf-8")
