"""Plans for the program of one rank: recompute, offload, quantize_activations, slices.

Not for layouts on several ranks: see search/ranks/ and search/cluster/.
"""
