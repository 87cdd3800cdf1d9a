"""Tracing of Python code into the graphs of the training step and of the optimizer's step.

Not for partitioning that graph among ranks: see spmd/ and pipeline_stages.py.
"""
