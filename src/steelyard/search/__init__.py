"""Offers + predict + a budget -> the trades to strike, the curve they lie on, and why not the rest.
Torch-free, and handed its trades. Not for capturing, measuring or running."""

from steelyard.search.found import Found, Gap
from steelyard.search.layouts import Layouts
from steelyard.search.pipelines import Pipelines
from steelyard.search.search import ALLOWS_NONE, Search, search

__all__ = ["ALLOWS_NONE", "Found", "Gap", "Layouts", "Pipelines", "Search", "search"]
