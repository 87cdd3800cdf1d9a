"""Measures costs of operators, workspace and links on the local devices, with a cache.

Not for adding costs up: see predict/.
"""
