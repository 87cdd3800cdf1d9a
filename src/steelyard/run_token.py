"""The secret that all processes of a run share, ``STEELYARD_TOKEN``, and proofs of knowing it.

It is inherited through the environment from the process that starts the ranks. It is never on a
command line, which other users of a machine can read. Not for the protocol with which ranks prove
that they know it: see run/launch/authenticated_store.py.
"""

import hmac
from collections.abc import Mapping

from steelyard.errors import BadInput

VARIABLE = "STEELYARD_TOKEN"
DIGEST_BYTES = 32
_FEWEST_CHARACTERS = 16


def token_of(environ: Mapping[str, str]) -> bytes:
    """Return the secret in the environment; empty if there is none."""
    text = environ.get(VARIABLE, "")
    if 0 < len(text) < _FEWEST_CHARACTERS:
        raise BadInput(
            f"{VARIABLE} has only {len(text)} characters, which can be guessed",
            expected=f"a random text of at least {_FEWEST_CHARACTERS}",
            remedy=f"export {VARIABLE}=$(openssl rand -hex 32), the same on all hosts",
        )
    return text.encode(errors="surrogateescape")


def proof(secret: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of these parts, with their lengths as prefixes, so that no two lists
    collide.
    """
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, message, "sha256")


def is_proof(given: bytes, secret: bytes, *parts: bytes) -> bool:
    """True if ``given`` is the HMAC of these parts; the comparison takes constant time."""
    return hmac.compare_digest(given, proof(secret, *parts))
