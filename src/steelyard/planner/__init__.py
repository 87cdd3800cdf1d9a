"""The planning stage: capture and price a step, search for a plan, probe lossy plans.

Not for the search itself: see search/. Not for running a plan: see run/ and api/.
"""
