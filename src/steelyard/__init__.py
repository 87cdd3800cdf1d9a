"""Steelyard: say what you have; it makes your model fit and tells the price before you pay it.

The public names, loaded when first used, so that importing steelyard does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steelyard.api import Planned, Workload, load, plan
    from steelyard.core.budget import Budget
    from steelyard.core.cluster import Cluster, Far
    from steelyard.core.errors import SteelyardError

__version__ = "0.1.0"
__all__ = ["Budget", "Cluster", "Far", "Planned", "SteelyardError", "Workload", "load", "plan"]

_HOMES = {
    "Budget": "steelyard.core.budget",
    "Cluster": "steelyard.core.cluster",
    "Far": "steelyard.core.cluster",
    "Planned": "steelyard.api",
    "SteelyardError": "steelyard.core.errors",
    "Workload": "steelyard.api",
    "load": "steelyard.api",
    "plan": "steelyard.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steelyard' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
