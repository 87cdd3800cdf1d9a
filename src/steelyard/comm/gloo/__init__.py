"""Collectives and messages through gloo that its own do slower.

Not for ranks that share memory: see shared_memory/.
"""
