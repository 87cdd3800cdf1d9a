"""Deep models captured from three of their equal blocks, for clusters that are only declared.

Not for pricing them: see predict/analytic/.
"""
