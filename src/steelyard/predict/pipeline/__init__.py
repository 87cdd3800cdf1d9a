"""Predictions for steps in pipeline stages, made by replaying the schedule.

Not for the schedules themselves: see ir/pipeline_schedule.py.
"""
