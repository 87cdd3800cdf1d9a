"""Steelyard: say what you have; it makes your model fit and tells the price before you pay it.

The public names, loaded when first used, so that importing steelyard does not import torch.
"""

import gc
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.api import Planned, Workload, load, plan
    from steelyard.errors import SteelyardError
    from steelyard.hardware.cluster import Cluster, OffloadMemory
    from steelyard.plans.budget import Budget

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "Cluster",
    "OffloadMemory",
    "Planned",
    "SteelyardError",
    "Workload",
    "load",
    "plan",
]

_HOMES = {
    "Budget": "steelyard.plans.budget",
    "Cluster": "steelyard.hardware.cluster",
    "OffloadMemory": "steelyard.hardware.cluster",
    "Planned": "steelyard.api",
    "SteelyardError": "steelyard.errors",
    "Workload": "steelyard.api",
    "load": "steelyard.api",
    "plan": "steelyard.api",
}


def __getattr__(name: str) -> Any:
    # ``from steelyard import api`` asks here, too, before it imports anything.
    if name == "api":
        return _imported("steelyard.api")
    if name not in _HOMES:
        raise AttributeError(f"module 'steelyard' has no attribute {name!r}")
    return getattr(_imported(_HOMES[name]), name)


def _imported(home: str) -> ModuleType:
    """What is imported with torch are half a million objects that stay: a quarter of the time went
    into looking for garbage among them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(home)
    finally:
        if collects:
            gc.enable()
