"""Tracing of Python code to the graph of one training step and of the optimizer's step.

Not for partitioning that graph among ranks: see spmd/ and pipeline_stages.py.
"""
