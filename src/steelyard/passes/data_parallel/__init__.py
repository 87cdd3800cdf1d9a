"""Data parallelism as graph rewrites: all-reduced gradients, sharded parameters, overlap.

Not for the live process groups: see comm/.
"""
