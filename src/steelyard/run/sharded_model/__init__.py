"""A live model of which this rank holds some layers, or shards of tensors.

Not for offloaded tensors: see offload/.
"""
