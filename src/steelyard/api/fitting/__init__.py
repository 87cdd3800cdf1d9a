"""Answers whether a step fits a device, for models, scripts and transformers configurations.

Not for measuring the step: see planner/memory_fit.py.
"""
