"""A live model of which this rank holds some layers, or parts of tensors.

Not for offloaded tensors: see offload/.
"""
