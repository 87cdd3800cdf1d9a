"""Data parallelism as graph rewrites: averaged gradients, sharded parameters, overlapped exchanges.

Not for the live process groups: see comm/.
"""
