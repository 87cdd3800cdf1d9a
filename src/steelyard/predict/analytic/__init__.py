"""The step of a deep model on a declared cluster, priced from a few of its blocks.

Not for steps that are priced line by line: see predict/step.py.
"""
