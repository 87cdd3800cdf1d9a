"""Ranks of one command: started, joined, watched, and the one that broke named.

Not for what a rank then does: that is a step like any other, see run/step.py.
"""
