"""Graph rewrites for offloading: transfers to and from offload memory, and sliced products.

Not for the live tensors in offload memory: see offload/.
"""
