"""Offload of a block's saved activations to host memory, in the analytic model.

The activations of a block are sent while the next block is computed, and fetched back while the
block behind it is computed in the backward pass. Not for programs that are run: see timeline.py.
"""

from dataclasses import replace

from steelyard.hardware.link import Link
from steelyard.predict.analytic.sections import Section


def with_offload(block: Section, host: Link) -> Section:
    """Return the section of a block whose saved activations are offloaded.

    Transfer time that exceeds the block's own pass is exposed. The device needs memory for the
    activations of two blocks: one in transfer and one in use.
    """
    transfer_seconds = host.seconds(block.saved_bytes, messages=1)
    send_wait = max(0.0, transfer_seconds - block.forward_seconds)
    fetch_wait = max(0.0, transfer_seconds - block.recompute_seconds - block.backward_seconds)
    return replace(
        block,
        forward_seconds=block.forward_seconds + send_wait,
        backward_seconds=block.backward_seconds + fetch_wait,
        exchange_seconds=block.exchange_seconds + send_wait + fetch_wait,
        exchanged_bytes=block.exchanged_bytes + 2 * block.saved_bytes,
        saved_bytes=0,
        recompute_bytes=block.recompute_bytes + 2 * block.saved_bytes,
        offloaded_bytes=block.saved_bytes,
    )
