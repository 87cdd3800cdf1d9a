"""Checks that refuse models whose captured step would train differently from their own code.

Not for deciding if the batch may be split: see batch/.
"""
