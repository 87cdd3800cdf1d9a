"""The data that users give and get: budget, trades, plan, plan file, predictions, receipt.

Not for finding a plan: see planner/ and search/.
"""
