"""The demonstration behind ``steelyard demo``, and the model it is given on.
Not for plans of a user's own."""

from steelyard.api.demo.scenario import Scene, demo

__all__ = ["Scene", "demo"]
