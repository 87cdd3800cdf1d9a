"""Capture of a model, a loss and a batch as one data-flow graph of the whole training step.

Not for rewriting that graph (see passes/) or for measuring it (see measure/).
"""
