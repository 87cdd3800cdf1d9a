"""Operators applied to some rows or columns of their arguments at a time.

Not for what is sliced: see trades/chunk.py and passes/offload/.
"""
