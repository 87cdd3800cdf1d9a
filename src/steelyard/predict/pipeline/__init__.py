"""A step in pipeline stages, priced by replaying its schedule.

Not for the schedules themselves: see ir/pipeline_schedule.py.
"""
