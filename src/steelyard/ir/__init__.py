"""The training step in plain data: its graph, its program, collectives and how tensors are placed.

Not for rewriting it: see passes/. Not for what a user asks and gets: see plans/.
"""
