"""Choose boundaries between pipeline stages, and find values that can be written in place.

Not for splitting the graph: see capture/pipeline_stages.py.
"""
