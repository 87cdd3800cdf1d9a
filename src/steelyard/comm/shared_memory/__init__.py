"""Messages written once, into memory that the reader has too: of a host, of its GPUs, or over RDMA.

Not for when a plan uses it: see trades/shared_memory_transfer.py.
"""
