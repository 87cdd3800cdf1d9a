"""Operators applied to some rows or columns of their arguments at a time.

Not for what is sliced: see trades/stream.py and passes/offload/.
"""
