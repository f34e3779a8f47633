"""Proofs of a PDCluster's token: who holds it is known, whoever doesn't isn't, and what was
overheard is of no use."""

import pytest

from pd_core import proof
from pd_core.proof import CHALLENGE_BYTES, Purpose

TOKEN, OTHER = b"a" * 43, b"b" * 43
CHALLENGE, NONCE = bytes(CHALLENGE_BYTES), b"n" * CHALLENGE_BYTES
GIVEN = proof.prove(TOKEN, Purpose.KV, CHALLENGE, NONCE)


@pytest.mark.parametrize("tokens", [(TOKEN,), (TOKEN, OTHER), (OTHER, TOKEN)])
def test_who_holds_one_of_the_tokens_is_known_by_it(tokens: tuple[bytes, ...]) -> None:
    assert proof.proven_with(tokens, Purpose.KV, CHALLENGE, GIVEN) == TOKEN
    said = proof.confirm(TOKEN, Purpose.KV, CHALLENGE, GIVEN)
    assert proof.is_confirmed(TOKEN, Purpose.KV, CHALLENGE, GIVEN, said)


@pytest.mark.parametrize(
    ("tokens", "purpose", "challenge", "given"),
    [
        pytest.param((OTHER,), Purpose.KV, CHALLENGE, GIVEN, id="another token"),
        pytest.param((TOKEN,), Purpose.WORK, CHALLENGE, GIVEN, id="made for something else"),
        pytest.param((TOKEN,), Purpose.KV, NONCE, GIVEN, id="of another challenge"),
        pytest.param((TOKEN,), Purpose.KV, CHALLENGE, b"", id="none"),
        pytest.param((TOKEN,), Purpose.KV, CHALLENGE, GIVEN[:-1], id="cut off"),
        pytest.param((TOKEN,), Purpose.KV, CHALLENGE, GIVEN + b"x", id="too long"),
        pytest.param((TOKEN,), Purpose.KV, CHALLENGE, bytes(proof.PROOF_BYTES), id="zeros"),
        pytest.param((TOKEN,), Purpose.KV, b"", GIVEN, id="nothing was asked"),
    ],
)
def test_whoever_does_not_is_not(
    tokens: tuple[bytes, ...], purpose: Purpose, challenge: bytes, given: bytes
) -> None:
    assert proof.proven_with(tokens, purpose, challenge, given) is None


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(GIVEN[-proof.CONFIRMATION_BYTES :], id="the proof's own end, sent back"),
        pytest.param(proof.confirm(OTHER, Purpose.KV, CHALLENGE, GIVEN), id="another token"),
        pytest.param(proof.confirm(TOKEN, Purpose.KV, NONCE, GIVEN), id="another challenge"),
        pytest.param(proof.confirm(TOKEN, Purpose.WORK, CHALLENGE, GIVEN), id="something else"),
    ],
)
def test_what_confirms_nothing(said: bytes) -> None:
    assert not proof.is_confirmed(TOKEN, Purpose.KV, CHALLENGE, GIVEN, said)


def test_a_challenge_has_its_length() -> None:
    with pytest.raises(ValueError, match="challenge of 3 bytes"):
        proof.prove(TOKEN, Purpose.KV, b"abc", NONCE)


def test_a_file_of_tokens() -> None:
    assert proof.parse_tokens(b"\n" + TOKEN + b"\r\n " + OTHER + b" \n\n") == (TOKEN, OTHER)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "0 tokens"),
        (b"\n".join([TOKEN] * 9), "9 tokens"),
        (b"short", "token 1: write 32 to 256"),
        (TOKEN + b"\n" + b"x" * 257, "token 2: write 32 to 256"),
        (TOKEN[:-1] + b"\0", "token 1"),
    ],
)
def test_a_file_of_no_use_says_why_and_shows_nothing(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        proof.parse_tokens(text)
    assert "aaa" not in str(error.value)
