"""Chooses boundaries between pipeline stages, and finds values that can be written in place.

Not for splitting the graph: see capture/pipeline_stages.py.
"""
