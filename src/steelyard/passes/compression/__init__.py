"""Gradients that are exchanged in few bits, as nodes of the graph.

Not for the codecs' arithmetic: see operators/gradient_codecs.py.
"""
