"""Tracing: from Python code to the graph of one training step, with the optimizer's step.

Not for cutting that graph among ranks: see spmd/ and pipeline_stages.py.
"""
