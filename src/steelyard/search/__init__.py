"""Offers + predict + a budget -> the trades to strike, the curve they lie on, and why not the rest.
Torch-free, and handed its trades. Not for capturing, measuring or running."""

from steelyard.search.found import Found, Gap
from steelyard.search.search import Search, search

__all__ = ["Found", "Gap", "Search", "search"]
