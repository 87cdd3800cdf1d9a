"""Ranks of one command: launching, rendezvous, monitoring, and diagnosis of failures.

Not for what a rank runs: that is a step like any other, see run/step.py.
"""
