"""Boundaries between pipeline stages, and what is sent across them.

Not for cutting the graph there: see capture/pipeline_stages.py.
"""
