"""A PDCluster's token: a file of tokens, read anew when it changes, and proofs over gRPC.

Who serves sends a challenge as the call's initial metadata; the proof is in the first message
that comes, and the confirmation in the first that goes. What is proven how: `pd_core.proof`.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pd_core import proof
from pd_core.proof import CHALLENGE_BYTES, Purpose

log = logging.getLogger("pd_proto.tokens")

_KEY = "pdcluster-challenge-bin"
_MOST_BYTES = 4096
NO_PROOF = "it has not proven that it holds this PDCluster's token"
NO_TOKEN_THERE = "it asks for no token, so it isn't of this PDCluster"
NOT_CONFIRMED = "it doesn't hold this PDCluster's token"


class BadToken(OSError):
    """A file that can't be used; says why."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof that was given, and what is needed to see it confirmed."""

    given: bytes
    _purpose: Purpose
    _challenge: bytes
    _token: bytes = field(repr=False)

    def stranger(self, confirmation: bytes) -> str:
        """Why who says this is none of us; empty when it is."""
        known = proof.is_confirmed(
            self._token, self._purpose, self._challenge, self.given, confirmation
        )
        return "" if known else NOT_CONFIRMED


class Tokens:
    """See the module. Only for the event loop."""

    def __init__(self, file: Path) -> None:
        """OSError says what is wrong with the file."""
        self._file = file
        self._seen = self._stamp()
        self._tokens = self._read()

    def prove(self, purpose: Purpose, challenge: bytes) -> Proof:
        """ValueError: that is no challenge."""
        token = self._current()[0]
        given = proof.prove(token, purpose, challenge, os.urandom(CHALLENGE_BYTES))
        return Proof(given, purpose, challenge, token)

    def confirm(self, purpose: Purpose, challenge: bytes, given: bytes) -> bytes | None:
        """The confirmation of a proof; None: it is none."""
        token = proof.proven_with(self._current(), purpose, challenge, given)
        return None if token is None else proof.confirm(token, purpose, challenge, given)

    # ---- gRPC ----------------------------------------------------------------------------

    async def answer(self, purpose: Purpose, call: Any) -> Proof | str:
        """The proof for who was called, once its challenge has come; or why there is none."""
        for key, value in await call.initial_metadata() or ():
            if key == _KEY and isinstance(value, bytes) and len(value) == CHALLENGE_BYTES:
                return self.prove(purpose, value)
        if call.done():  # it never got as far as asking
            return f"{await call.code()}: {await call.details()}"
        return NO_TOKEN_THERE

    async def admit(self, purpose: Purpose, challenge: bytes, given: bytes, context: Any) -> bytes:
        """The confirmation; ends the call of who has proven nothing."""
        confirmation = self.confirm(purpose, challenge, given)
        if confirmation is None:
            log.warning("refused %s: %s", context.peer(), NO_PROOF)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, NO_PROOF)
            raise AssertionError("an aborted call ends")
        return confirmation

    # ---- the file ------------------------------------------------------------------------

    def _current(self) -> tuple[bytes, ...]:
        """What is in the file; what was there before while that can't be used."""
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp  # tried once: what is wrong with it is said once
                self._tokens = self._read()
                log.info("tokens of %s read anew", self._file)
        except OSError as error:
            log.warning("tokens stay as they were: %s", error)
        return self._tokens

    def _read(self) -> tuple[bytes, ...]:
        try:
            with self._file.open("rb") as file:
                return proof.parse_tokens(file.read(_MOST_BYTES))
        except (OSError, ValueError) as error:
            raise BadToken(f"tokens in {self._file}: {error}") from error

    def _stamp(self) -> tuple[int, int, int]:
        found = self._file.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size


async def challenge(tokens: Tokens | None, context: Any) -> bytes:
    """Asks who calls, before anything else; empty where nothing is asked."""
    if tokens is None:
        return b""
    made = os.urandom(CHALLENGE_BYTES)
    await context.send_initial_metadata(((_KEY, made),))
    return made


async def admit(
    tokens: Tokens | None, purpose: Purpose, asked: bytes, given: bytes, context: Any
) -> bytes:
    """The confirmation of who has proven it; empty where nothing is asked."""
    if tokens is None:
        return b""
    return await tokens.admit(purpose, asked, given, context)
