"""Plain-data descriptions of devices, links and clusters, and the files that declare them.

Not for measuring them: see measure/.
"""
