"""Transfers to and from a slower tier as nodes of the graph, and products that read it in slices.

Not for the live tensors there: see offload/.
"""
