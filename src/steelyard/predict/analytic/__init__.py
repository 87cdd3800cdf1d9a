"""An analytic model of a deep model's step on a declared cluster, based on a few of its blocks.

Not for steps that are priced line by line: see predict/step.py.
"""
