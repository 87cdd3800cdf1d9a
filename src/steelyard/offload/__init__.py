"""Offloaded live tensors on a slower tier: weights, gradients, optimizer state and activations.

Not for the graph rewrites that offload them: see passes/offload/.
"""
