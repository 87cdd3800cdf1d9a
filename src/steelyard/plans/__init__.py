"""What a user asks and gets: budget, trade, plan, plan file, predictions, receipt.

Not for how a plan is found: see planner/ and search/.
"""
