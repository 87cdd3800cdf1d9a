"""Graph rewrites that several trades share, without torch.

Not for deciding where they are applied: see trades/ and search/.
"""
