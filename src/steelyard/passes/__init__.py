"""Graph rewrites shared by several trades, without torch.

Not for deciding where they are applied: see trades/ and search/.
"""
