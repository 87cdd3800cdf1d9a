"""Bandwidth and latency between ranks, and the speed of each rank.

Not for operators: see operators/.
"""
