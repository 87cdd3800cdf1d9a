"""Batches of other sizes, and the proof that a batch may be split.

Not for the trade that splits it: see trades/accumulate.py.
"""
