"""Batches of other sizes, and the check that a batch may be split into parts.

Not for the trade that splits it: see trades/accumulate.py.
"""
