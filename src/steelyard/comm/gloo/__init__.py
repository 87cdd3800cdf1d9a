"""Collectives and messages over gloo that are faster than gloo's own.

Not for ranks that share memory: see shared_memory/.
"""
