"""Seconds and workspace bytes of single operators on the local device.

Not for whole steps: see measure/step_calibration.py.
"""
