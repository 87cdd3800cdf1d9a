"""Ranks that know the same secret meet; a rank that does not is recognised and not believed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from steelyard.errors import BadInput, RankFailed, RanksDiffer, SteelyardError
from steelyard.run.launch.authenticated_store import AuthenticStore, authenticated
from steelyard.run.launch.environment import RankInfo
from steelyard.run_token import is_proof, proof, token_of

TOKEN, OTHER = b"the secret of this run", b"the secret of another run"


def all_meet(
    tokens: Sequence[bytes], sizes: Sequence[int] = (), *, store: Store | None = None,
    seconds: float = 5.0,
) -> list[Store | SteelyardError]:  # fmt: skip
    """Return, for each rank, its store or its error."""
    place = store or HashStore()
    found: list[Store | SteelyardError] = [place] * len(tokens)

    def meet(rank: int, token: bytes) -> None:
        who = RankInfo(rank=rank, size=(sizes or [len(tokens)] * len(tokens))[rank])
        try:
            found[rank] = authenticated(place, who, token, timeout_seconds=seconds)
        except SteelyardError as error:
            found[rank] = error

    ranks = [threading.Thread(target=meet, args=each) for each in enumerate(tokens)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return found


def stores(found: list[Store | SteelyardError]) -> list[Store]:
    assert all(isinstance(each, Store) for each in found), found
    return [each for each in found if isinstance(each, Store)]


def test_ranks_of_one_secret_read_what_the_others_write() -> None:
    first, second, third = stores(all_meet([TOKEN] * 3))
    first.set("a", "b")
    assert second.get("a") == third.get("a") == b"b"
    third.set("c", "")
    assert first.get("c") == b""
    assert first.add("n", 2) == 2
    assert second.add("n", 1) == 3
    assert second.check(["a", "c"])
    assert not second.check(["nothing"])
    second.wait(["a"], timedelta(seconds=1))


def test_values_from_a_stranger_are_refused() -> None:
    place = HashStore()
    first, _ = stores(all_meet([TOKEN] * 2, store=place))
    first.set("a", "b")
    written = bytes(place.get("a"))
    for said in ("", "b", "x" * 100, (b"\0" * 32 + b"b").decode()):
        place.set("a", said)
        with pytest.raises(RankFailed, match="that no rank of this run wrote") as refused:
            first.get("a")
        assert len(str(refused.value).splitlines()) == 3
    # Another key or one more byte is refused, because the HMAC covers both.
    for key, said in (("d", written), ("a", written + b"x"), ("a", written[:-1])):
        place.set(key, said)  # type: ignore[arg-type]  # torch's stub knows no bytes
        with pytest.raises(RankFailed):
            first.get(key)
    place.set("a", written)  # type: ignore[arg-type]
    assert first.get("a") == b"b"


def test_values_from_another_rendezvous_are_refused() -> None:
    before, now = HashStore(), HashStore()
    stores(all_meet([TOKEN] * 2, store=before))[0].set("a", "b")
    first, _ = stores(all_meet([TOKEN] * 2, store=now))
    now.set("a", bytes(before.get("a")))  # type: ignore[arg-type]
    with pytest.raises(RankFailed):
        first.get("a")


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_different_secret_is_detected_on_both_sides(wrong: int) -> None:
    tokens = [TOKEN, TOKEN]
    tokens[wrong] = OTHER
    first, second = all_meet(tokens)
    assert isinstance(first, RankFailed)
    assert (
        first.happened
        == "the process connected as rank 1 does not have this rank's STEELYARD_TOKEN"
    )
    assert isinstance(second, RankFailed)
    assert (
        second.happened
        == "the process connected as rank 0 does not have this rank's STEELYARD_TOKEN"
    )


def test_a_proof_of_another_rendezvous_is_refused() -> None:
    """Everything that two ranks wrote is replayed to a rank that starts again."""
    before, now = HashStore(), HashStore()
    stores(all_meet([TOKEN] * 2, store=before))
    for key in ("challenge/1", "proof/1"):
        now.set(key, before.get(key).decode())
    error = None
    try:
        authenticated(now, RankInfo(rank=0, size=2), TOKEN, timeout_seconds=5)
    except RankFailed as refused:
        error = refused
    assert error is not None
    assert (error.rank, "does not have" in error.happened) == (1, True)
    for key in ("challenge/0", "answer/1"):
        now.set(key, before.get(key).decode())
    with pytest.raises(RankFailed, match="the process connected as rank 0 does not have"):
        authenticated(now, RankInfo(rank=1, size=2), TOKEN, timeout_seconds=5)


def test_a_reflected_proof_is_refused() -> None:
    """The two sides prove different things, because otherwise one could be made to answer for
    the other."""
    place, refused = HashStore(), []

    def come() -> None:
        try:
            authenticated(place, RankInfo(rank=1, size=2), TOKEN, timeout_seconds=5)
        except RankFailed as error:
            refused.append(error.rank)

    other = threading.Thread(target=come)
    place.set("challenge/0", "2 " + "0" * 64)
    other.start()
    place.set("answer/1", place.get("proof/1").decode())
    other.join()
    assert refused == [0]


def test_a_secret_missing_on_some_ranks_is_reported_without_waiting() -> None:
    found = all_meet([TOKEN, b""])
    for error in found:
        assert isinstance(error, BadInput)
        assert error.happened == "rank 0 has a STEELYARD_TOKEN, but rank 1 has none"
    _, second = all_meet([b"", TOKEN])
    assert isinstance(second, BadInput)
    assert second.happened == "rank 1 has a STEELYARD_TOKEN, but rank 0 has none"


def test_differing_numbers_of_ranks_are_reported_without_waiting() -> None:
    for error in all_meet([TOKEN, TOKEN], [2, 4]):
        assert isinstance(error, RanksDiffer)
        assert error.item == "number of ranks"


def test_a_missing_rank_is_named() -> None:
    (error,) = all_meet([TOKEN], [2], seconds=0.2)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.cause) == (1, "absent")


def test_without_a_secret_the_store_is_unchanged() -> None:
    place = HashStore()
    assert all(each is place for each in all_meet([b"", b""], store=place))


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    assert token_of({}) == token_of({"STEELYARD_TOKEN": ""}) == b""
    assert token_of({"STEELYARD_TOKEN": "x" * 16}) == b"x" * 16
    with pytest.raises(BadInput, match="has only 15 characters"):
        token_of({"STEELYARD_TOKEN": "x" * 15})


def test_proofs_separate_their_fields() -> None:
    assert is_proof(proof(TOKEN, b"ab", b"c"), TOKEN, b"ab", b"c")
    assert not is_proof(proof(TOKEN, b"a", b"bc"), TOKEN, b"ab", b"c")
    assert not is_proof(b"", TOKEN, b"ab", b"c")


def test_a_cloned_store_shares_the_secret() -> None:
    original = AuthenticStore(HashStore(), TOKEN)
    original.set("a", "b")
    assert original.timeout > timedelta(0)
    assert original.num_keys() >= 1
    assert original.delete_key("a")
