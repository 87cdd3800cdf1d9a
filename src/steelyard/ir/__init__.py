"""The training step in plain data: its graph, its program, its collectives and the placement of its
tensors.

Not for rewriting it: see passes/. Not for budgets, plans and receipts: see plans/.
"""
