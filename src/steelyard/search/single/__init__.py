"""Plans for one rank's program: recompute, offload, quantise, slice.

Not for layouts on ranks: see ranks/ and cluster/.
"""
