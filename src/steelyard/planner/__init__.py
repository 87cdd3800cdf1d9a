"""The planning stage: captures and prices a step, searches for a plan, probes lossy plans.

Not for the search itself: see search/. Not for running a plan: see run/ and api/.
"""
