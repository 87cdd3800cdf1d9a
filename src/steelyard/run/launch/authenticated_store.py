"""An authenticated rendezvous store, which rejects values written without the shared secret.

Ranks rendezvous in a torch store, which accepts writes from anyone who reaches its port. Rank 0 and
each other rank first prove to each other that they know ``STEELYARD_TOKEN``: each draws a
challenge, and answers the other's challenge with an HMAC over both. Every later value has an HMAC
over its key and value, made with a key that is only used for this rendezvous; readers verify it.
This covers the addresses with which gloo and NCCL connect.

Counters and deleted keys are not covered: a stranger may stop a rendezvous, but not join it. Nor is
the data that gloo and NCCL send afterwards in plain text: see docs/security.md.
"""

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public by its documentation

from steelyard.errors import BadInput, RankFailed, RanksDiffer
from steelyard.run.launch.environment import RankInfo
from steelyard.run_token import DIGEST_BYTES, VARIABLE, is_proof, proof

_CHALLENGE_BYTES = 32
# A rank without a token writes this instead of a challenge.
_NO_TOKEN = "no token"
_FIRST, _OTHER, _KEY = b"first rank", b"other rank", b"key of this meeting"


def authenticated(store: Store, who: RankInfo, token: bytes, *, timeout_seconds: float) -> Store:
    """Authenticate all ranks and return the authenticated store, or the store itself if no rank
    has a token.

    Raises ``BadInput`` if some ranks have a token and others do not, and ``RankFailed`` if a rank
    does not come or does not know the token.
    """
    store.set_timeout(timedelta(seconds=timeout_seconds))
    handshake = _Handshake(store, who, token, timeout_seconds)
    return handshake.as_first() if who.rank == 0 else handshake.as_other()


class _Handshake:
    """One rank's side of the mutual authentication."""

    def __init__(self, store: Store, who: RankInfo, token: bytes, timeout_seconds: float) -> None:
        self._store, self._who, self._token = store, who, token
        self._timeout_seconds = timeout_seconds
        # The number of ranks is included, because a rank that expects too many would wait for them
        # forever.
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        self._own = f"{who.size} {challenge}" if token else _NO_TOKEN

    def as_first(self) -> Store:
        """Check the proof of each other rank, and prove knowledge of the token to it."""
        self._store.set(_challenge(0), self._own)
        if not self._token:
            return self._store
        for rank in range(1, self._who.size):
            theirs = self._challenge_of(rank)
            try:
                self._check(f"proof/{rank}", rank, _OTHER, rank, self._own, theirs)
            except RankFailed:
                # A rank with a wrong token is notified at once.
                self._store.set(f"answer/{rank}", "refused")
                raise
            self._store.set(f"answer/{rank}", self._proof(_FIRST, rank, theirs, self._own))
            self._check_size(rank, theirs)
        return self._authenticated(self._own)

    def as_other(self) -> Store:
        """Prove to rank 0 that this rank knows the token, and check that rank 0 does."""
        rank = self._who.rank
        self._store.set(_challenge(rank), self._own)
        theirs = self._challenge_of(0)
        if not self._token:
            return self._store
        self._store.set(f"proof/{rank}", self._proof(_OTHER, rank, theirs, self._own))
        self._check(f"answer/{rank}", 0, _FIRST, rank, self._own, theirs)
        self._check_size(0, theirs)
        return self._authenticated(theirs)

    def _authenticated(self, challenge: str) -> Store:
        """Return the store with a key for this rendezvous only, so that values of another one are
        rejected.
        """
        return AuthenticStore(self._store, proof(self._token, _KEY, challenge.encode()))

    def _proof(self, side: bytes, rank: int, asked: str, own: str) -> str:
        return proof(self._token, side, str(rank).encode(), asked.encode(), own.encode()).hex()

    def _check(self, key: str, whose: int, side: bytes, rank: int, asked: str, own: str) -> None:
        """Raise RankFailed unless the value under ``key`` proves that rank ``whose`` knows the
        token.
        """
        proof_text = self._read(key, whose)
        if not secrets.compare_digest(proof_text, self._proof(side, rank, asked, own)):
            raise self._unauthenticated(whose)

    def _check_size(self, rank: int, theirs: str) -> None:
        size = theirs.partition(" ")[0]
        if size != str(self._who.size):
            raise RanksDiffer(
                f"rank {rank} differs from rank {self._who.rank} in the number of ranks: {size} "
                f"and {self._who.size}",
                expected="the same number of ranks on all ranks",
                remedy="start all ranks with the same number of ranks, from one launcher",
                rank=rank,
                item="number of ranks",
            )

    def _challenge_of(self, rank: int) -> str:
        found = self._read(_challenge(rank), rank)
        has_token = found != _NO_TOKEN
        if has_token != bool(self._token):
            having, lacking = (rank, self._who.rank) if has_token else (self._who.rank, rank)
            raise BadInput(
                f"rank {having} has a {VARIABLE}, but rank {lacking} has none",
                expected="the same secret in the environment of all ranks, or none",
                remedy=f"export {VARIABLE} on every host before the ranks are started",
            )
        return found

    def _read(self, key: str, rank: int) -> str:
        """Read an unauthenticated value of a rank; non-ASCII bytes are dropped."""
        until = time.monotonic() + self._timeout_seconds
        try:
            return self._store.get(key).decode("ascii", errors="ignore")
        except DistError as error:
            is_late = time.monotonic() >= until
            problem = (
                f"did not connect within {self._timeout_seconds:g} s" if is_late else "has exited"
            )
            raise RankFailed(
                f"rank {rank if is_late else 0} of {self._who.size} {problem}",
                expected="all ranks before the first step",
                remedy=f"read the output of rank {rank}, or give the ranks more time",
                rank=rank,
                cause="absent",
            ) from error

    def _unauthenticated(self, rank: int) -> RankFailed:
        return RankFailed(
            f"the process connected as rank {rank} does not have this rank's {VARIABLE}",
            expected="the same secret in the environment of all ranks",
            remedy=f"export the same {VARIABLE} on all hosts; docs/security.md says who may "
            "connect",
            rank=rank,
            cause="absent",
        )


class AuthenticStore(Store):
    """A store whose values carry an HMAC over key and value, verified by the reader."""

    def __init__(self, inner: Store, key: bytes) -> None:
        super().__init__()
        # Torch's stores accept and contain more than their stubs declare.
        self._inner: Any = inner
        self._key = key
        # C++ does not keep a reference to the Python clone, so this list does.
        self._clones: list[AuthenticStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._inner.set(key, proof(self._key, key.encode(), data) + data)

    def get(self, key: str) -> bytes:
        found = bytes(self._inner.get(key))
        proof_bytes, value = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
        if not is_proof(proof_bytes, self._key, key.encode(), value):
            raise RankFailed(
                f"the rendezvous store has a value under {key!r} that no rank of this run wrote",
                expected=f"only processes that have this run's {VARIABLE}",
                remedy="find out who can reach the rendezvous port; see docs/security.md",
                cause="absent",
            )
        return value

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(list(keys))
        else:
            self._inner.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def clone(self) -> "AuthenticStore":
        self._clones.append(AuthenticStore(self._inner.clone(), self._key))
        return self._clones[-1]

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        found: timedelta = self._inner.timeout
        return found


def _challenge(rank: int) -> str:
    return f"challenge/{rank}"
