"""Tensor parallelism: one rank's graph of a step whose tensors are sharded.

Not for pipeline stages: see pipeline_stages.py.
"""
