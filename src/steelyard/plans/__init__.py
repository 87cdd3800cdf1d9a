"""The data a user gives and gets: budget, trades, plan, plan file, predictions, receipt.

Not for finding a plan: see planner/ and search/.
"""
