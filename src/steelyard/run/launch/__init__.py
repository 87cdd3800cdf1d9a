"""Ranks of one command: launching, rendezvous, monitoring, and diagnosis of failures.

Not for the work of a rank, which is a step like any other: see run/step.py.
"""
