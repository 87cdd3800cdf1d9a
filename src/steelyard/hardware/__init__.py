"""Plain-data descriptions of devices, links and clusters, and the files that declare them.

Not for measuring any of them: see measure/.
"""
