"""A live model of which this rank holds only some layers, or only shards of tensors.

Not for offloaded tensors: see offload/.
"""
