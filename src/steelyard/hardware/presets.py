"""Presets of devices, links and machines by name, from the TOML files in this folder.

Each table names the source of its figures. Not for the meaning of a table: see cluster_file.py.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from steelyard.safe_files import toml_tables

_FOLDER = "preset"
_FILES = {"device": "devices.toml", "link": "links.toml", "scope": "machines.toml"}
# The accuracy of each device's "reached" table; benchmarks/published/presets.py writes it.
_CALIBRATION = "calibration.toml"
_MOST_BYTES = 2**20


@cache
def preset_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the raw tables, by kind and by name."""
    tables: dict[str, dict[str, Any]] = {k: _read(name)[k] for k, name in _FILES.items()}
    for device, calibration in _read(_CALIBRATION)["device"].items():
        tables["device"][device]["reached"]["calibration"] = calibration
    return tables


def _read(name: str) -> dict[str, Any]:
    raw = (files("steelyard.hardware") / _FOLDER / name).read_bytes()
    return toml_tables(raw, source=name, most_bytes=_MOST_BYTES)
