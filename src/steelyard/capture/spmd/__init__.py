"""Tensor parallelism: the graph that one rank runs when the tensors of a step are sharded.

Not for pipeline stages: see pipeline_stages.py.
"""
