"""Plans for several ranks: how the step lies on them, and how they exchange gradients.

Not for what one rank's program trades: see single/.
"""
