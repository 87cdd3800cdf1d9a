"""Live tensors on a slower tier: weights, gradients, optimizer state and activations.

Not for the graph rewrites that put them there: see passes/offload/.
"""
