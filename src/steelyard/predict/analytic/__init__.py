"""An analytic model of a deep model's step on a declared cluster, from a few of its blocks.

Not for steps that are priced line by line: see predict/step.py.
"""
