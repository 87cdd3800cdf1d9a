"""Measures steps for "will it fit", and the changes that would make them fit.

Not for the answer: see planner/memory_fit.py.
"""
