"""Capture of deep models from three of their equal blocks, for planning on declared clusters.

Not for pricing them: see predict/analytic/.
"""
