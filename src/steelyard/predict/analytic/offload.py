"""What a block keeps for its backward pass, moved to the memory of the host and back.

Each block's goes while the next one is computed, and comes back while the one behind it is. Not for
programs that are run: see timeline.py.
"""

from dataclasses import replace

from steelyard.hardware.link import Link
from steelyard.predict.analytic.sections import Section


def moved(block: Section, host: Link) -> Section:
    """What of a transfer takes longer than the block's own pass is waited for. Of what is on its
    way, and of what is computed with, there is one block's each."""
    taken = host.seconds(block.kept_bytes, messages=1)
    out = max(0.0, taken - block.forward_seconds)
    back = max(0.0, taken - block.again_seconds - block.backward_seconds)
    return replace(
        block,
        forward_seconds=block.forward_seconds + out,
        backward_seconds=block.backward_seconds + back,
        exchange_seconds=block.exchange_seconds + out + back,
        exchanged_bytes=block.exchanged_bytes + 2 * block.kept_bytes,
        kept_bytes=0,
        again_bytes=block.again_bytes + 2 * block.kept_bytes,
        far_bytes=block.kept_bytes,
    )
