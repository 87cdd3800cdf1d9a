"""Steelyard: plan a training step for your memory and time, and know its price in advance.

The public names are loaded when they are first used, so that importing steelyard does not import
torch.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.api import Planned, Workload, fit, load, plan
    from steelyard.errors import SteelyardError
    from steelyard.hardware.cluster import Cluster, OffloadMemory
    from steelyard.plans.budget import Budget
    from steelyard.plans.stop_request import StopRequest

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "Cluster",
    "OffloadMemory",
    "Planned",
    "SteelyardError",
    "StopRequest",
    "Workload",
    "fit",
    "load",
    "plan",
]

_MODULES = {
    "Budget": "steelyard.plans.budget",
    "Cluster": "steelyard.hardware.cluster",
    "OffloadMemory": "steelyard.hardware.cluster",
    "Planned": "steelyard.api",
    "SteelyardError": "steelyard.errors",
    "StopRequest": "steelyard.plans.stop_request",
    "Workload": "steelyard.api",
    "fit": "steelyard.api",
    "load": "steelyard.api",
    "plan": "steelyard.api",
}


def __getattr__(name: str) -> Any:
    # ``from steelyard import api`` calls this too, before it imports the submodule.
    if name == "api":
        return _import("steelyard.api")
    if name not in _MODULES:
        raise AttributeError(f"module 'steelyard' has no attribute {name!r}")
    return getattr(_import(_MODULES[name]), name)


def _import(module_name: str) -> ModuleType:
    from steelyard.garbage_collection import without_collection

    with without_collection():
        return import_module(module_name)
