"""The demonstration behind ``steelyard demo``, and the model that it trains.

Not for the user's own plans: see api/planning.py.
"""

from steelyard.api.demo.scenario import Scene, demo

__all__ = ["Scene", "demo"]
