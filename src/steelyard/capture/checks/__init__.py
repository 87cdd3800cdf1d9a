"""Checks of a captured step: what could make it train otherwise than the model's own code.

Not for whether the batch may be split: see batch/.
"""
