"""Offloaded live tensors in a slower memory: weights, gradients, optimizer state and activations.

Not for the graph rewrites that offload them: see passes/offload/.
"""
