"""Triton sources, and nothing else.
Not for choosing or calling them."""
