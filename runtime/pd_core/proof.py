"""PURE. How two processes of one PDCluster prove to each other that they hold its token.

Who was dialled asks with a challenge, which is random and used once. Who dialled answers with
a proof: a nonce of its own and an HMAC over both. The other side confirms, with an HMAC over
that proof. So the token itself is never sent, what was overheard is of no use again, no clock
counts, and neither side takes the other's word for it.

A PDCluster has several tokens while one follows another: one proves with the first, and
accepts all.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from enum import StrEnum

CHALLENGE_BYTES = 32
_NONCE_BYTES = 32
_MAC_BYTES = 32
PROOF_BYTES = _NONCE_BYTES + _MAC_BYTES
CONFIRMATION_BYTES = _MAC_BYTES
MOST_TOKENS = 8
_TOKEN = re.compile(rb"[A-Za-z0-9_+/=-]{32,256}")


class Purpose(StrEnum):
    """What a connection is for. A proof for one is none for another."""

    ANNOUNCE = "announce"
    WORK = "work"
    KV = "kv"


def parse_tokens(text: bytes) -> tuple[bytes, ...]:
    """Of a file with a token a line. ValueError says what is wrong, and shows none."""
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not 0 < len(lines) <= MOST_TOKENS:
        raise ValueError(f"{len(lines)} tokens; write 1 to {MOST_TOKENS}, each in a line")
    for number, line in enumerate(lines, 1):
        if _TOKEN.fullmatch(line) is None:
            raise ValueError(f"token {number}: write 32 to 256 letters, digits or any of _ - + / =")
    return lines


def prove(token: bytes, purpose: Purpose, challenge: bytes, nonce: bytes) -> bytes:
    """The answer to a challenge. `nonce`: random bytes of the same length."""
    if len(challenge) != CHALLENGE_BYTES or len(nonce) != _NONCE_BYTES:
        raise ValueError(f"a challenge of {len(challenge)} bytes")
    return nonce + _mac(token, purpose, b"proof", challenge + nonce)


def proven_with(
    tokens: Sequence[bytes], purpose: Purpose, challenge: bytes, proof: bytes
) -> bytes | None:
    """The token that a proof was made with; None: none of these."""
    if len(proof) != PROOF_BYTES or len(challenge) != CHALLENGE_BYTES:
        return None
    nonce, mac = proof[:_NONCE_BYTES], proof[_NONCE_BYTES:]
    found = None
    for token in tokens:  # all of them: time tells nothing
        if hmac.compare_digest(mac, _mac(token, purpose, b"proof", challenge + nonce)):
            found = token
    return found


def confirm(token: bytes, purpose: Purpose, challenge: bytes, proof: bytes) -> bytes:
    """What who asked says to a proof: that it holds that token, too."""
    return _mac(token, purpose, b"confirmation", challenge + proof)


def is_confirmed(
    token: bytes, purpose: Purpose, challenge: bytes, proof: bytes, confirmation: bytes
) -> bool:
    return hmac.compare_digest(confirmation, confirm(token, purpose, challenge, proof))


def _mac(token: bytes, purpose: Purpose, side: bytes, message: bytes) -> bytes:
    """`message` has one length for each side, so nothing can be read in two ways."""
    label = b"pdcluster/1/" + purpose.encode() + b"/" + side + b"\0"
    return hmac.new(token, label + message, hashlib.sha256).digest()
