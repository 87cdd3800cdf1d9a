"""Deciding on a plan: a step is captured, priced and searched, lossy plans are probed.

Not for the search itself: see search/. Not for running a plan: see run/ and api/.
"""
