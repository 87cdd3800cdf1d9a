"""Plans for one rank's program: recompute, offload, quantize_activations, slice.

Not for layouts on ranks: see ranks/ and cluster/.
"""
