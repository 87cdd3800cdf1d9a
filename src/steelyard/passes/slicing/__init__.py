"""Rules for applying operators to slices of their arguments, in rows or columns.

Not for choosing values to slice: see trades/chunk.py and passes/offload/.
"""
