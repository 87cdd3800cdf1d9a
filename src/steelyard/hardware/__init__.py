"""Devices, links and clusters in plain data, and the files that declare them.

Not for measuring any of them: see measure/.
"""
