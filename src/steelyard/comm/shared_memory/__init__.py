"""Messages written directly into memory of the reader, once: host memory, GPU memory, or over RDMA.

Not for the plans that use it: see trades/shared_memory_transfer.py.
"""
