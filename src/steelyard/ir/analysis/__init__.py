"""Properties computed from a graph or from the body of a node.

Not for the graph itself: see ../graph.py.
"""
