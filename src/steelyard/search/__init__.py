"""Offers + predict + a budget -> the trades to strike, the curve they lie on, and why not the rest.
Torch-free, and handed its trades. Not for capturing, measuring or running."""

from steelyard.search.deep import DeepSearch, Laid
from steelyard.search.deep_rules import rules_of
from steelyard.search.deep_stages import Again
from steelyard.search.deep_told import told
from steelyard.search.floor import Floor
from steelyard.search.found import Found, Gap
from steelyard.search.kinds import sets_again
from steelyard.search.layouts import Layouts
from steelyard.search.mixing import ALIKE
from steelyard.search.pipelines import Pipelines
from steelyard.search.search import ALLOWS_NONE, Search, search

__all__ = [
    "ALIKE",
    "ALLOWS_NONE",
    "Again",
    "DeepSearch",
    "Floor",
    "Found",
    "Gap",
    "Laid",
    "Layouts",
    "Pipelines",
    "Search",
    "rules_of",
    "search",
    "sets_again",
    "told",
]
