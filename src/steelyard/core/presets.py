"""Devices, links and machines that can be had by name, from the TOML files beside this one.

Each table there says where its figures are from. Not for what a table means: see cluster_file.py.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from steelyard.core.untrusted import toml_tables

_FOLDER = "preset"
_FILES = {"device": "devices.toml", "link": "links.toml", "scope": "machines.toml"}
_MOST_BYTES = 2**20


@cache
def preset_tables() -> Mapping[str, Mapping[str, Any]]:
    """By kind and by name, as they are written."""
    folder = files("steelyard.core") / _FOLDER
    tables = {}
    for kind, name in _FILES.items():
        raw = (folder / name).read_bytes()
        tables[kind] = toml_tables(raw, source=name, most_bytes=_MOST_BYTES)[kind]
    return tables
