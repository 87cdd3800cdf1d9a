"""The secret that all processes of a run share, ``STEELYARD_TOKEN``, and what is proved with it.

It comes from the environment of whoever starts the ranks and goes on to them by environment, never
by a command line, which other users of a machine can read. Not for how ranks prove to each other
that they know it: see run/launch/authenticated_store.py.
"""

import hmac
from collections.abc import Mapping

from steelyard.errors import BadInput

VARIABLE = "STEELYARD_TOKEN"
DIGEST_BYTES = 32
_FEWEST_CHARACTERS = 16


def token_of(environ: Mapping[str, str]) -> bytes:
    """The secret in the environment; empty where there is none."""
    text = environ.get(VARIABLE, "")
    if 0 < len(text) < _FEWEST_CHARACTERS:
        raise BadInput(
            f"{VARIABLE} has {len(text)} characters, which can be guessed",
            expected=f"a random text of at least {_FEWEST_CHARACTERS}",
            remedy=f"export {VARIABLE}=$(openssl rand -hex 32), the same on all hosts",
        )
    return text.encode(errors="surrogateescape")


def proof(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC-SHA256 of these parts, each with its length, so that no two lists have the same."""
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, message, "sha256")


def is_proof(given: bytes, secret: bytes, *parts: bytes) -> bool:
    """Whether it is the HMAC of these parts; compared in a time that tells nothing of it."""
    return hmac.compare_digest(given, proof(secret, *parts))
