"""Exports: the nearest configuration of other tools to a plan, and files that launch a plan.

Not for the price of such a configuration: see planner/export/price.py. Not for plan files: see
plan_files/.
"""
