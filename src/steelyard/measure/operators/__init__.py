"""Seconds and workspace of single operators on the device at hand.

Not for whole steps: see step_calibration.py.
"""
