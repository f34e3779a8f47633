"""Both ends of a KV connection prove that they hold this PDCluster's token, before any frame.

    target -> sender: PROOF_MARK, challenge
    sender -> target: PROOF_MARK, proof
    target -> sender: PROOF_MARK, confirmation; who is refused gets REFUSED and nothing else

What is proven how: `pd_core.proof`. It goes before shared memory is handed over, and within
TLS where that is on. The callers bound the time.
"""

import os
import socket

from pd_core.proof import CHALLENGE_BYTES, CONFIRMATION_BYTES, PROOF_BYTES, Purpose
from pd_engine.kv import tcp
from pd_engine.kv.frames import PROOF_MARK
from pd_proto.tokens import NO_PROOF, NO_TOKEN_THERE, NOT_CONFIRMED, Tokens

_REFUSED = b"PDT\0"


async def dialled(sock: socket.socket, tokens: Tokens | None) -> None:
    """The sender's end. ConnectionRefusedError says who isn't of this PDCluster."""
    if tokens is None:
        return
    challenge = await _receive(sock, PROOF_MARK, CHALLENGE_BYTES, NO_TOKEN_THERE)
    proof = tokens.prove(Purpose.KV, challenge)
    await tcp.send_all(sock, PROOF_MARK + proof.given)
    why = "this worker's token isn't the target's"
    confirmation = await _receive(sock, PROOF_MARK, CONFIRMATION_BYTES, why)
    if proof.stranger(confirmation):
        raise ConnectionRefusedError(NOT_CONFIRMED)


async def accepted(sock: socket.socket, tokens: Tokens | None) -> None:
    """The target's end. ConnectionRefusedError says why nothing is taken."""
    if tokens is None:
        return
    challenge = os.urandom(CHALLENGE_BYTES)
    await tcp.send_all(sock, PROOF_MARK + challenge)
    given = await _receive(sock, PROOF_MARK, PROOF_BYTES, NO_PROOF)
    confirmation = tokens.confirm(Purpose.KV, challenge, given)
    if confirmation is None:
        await tcp.send_all(sock, _REFUSED)
        raise ConnectionRefusedError(NO_PROOF)
    await tcp.send_all(sock, PROOF_MARK + confirmation)


async def _receive(sock: socket.socket, mark: bytes, size: int, why: str) -> bytes:
    """What comes behind the mark. ConnectionRefusedError: something else came."""
    begun = bytearray(len(mark))
    await tcp.receive_exactly(sock, memoryview(begun))
    if begun != mark:
        raise ConnectionRefusedError(why)
    rest = bytearray(size)
    await tcp.receive_exactly(sock, memoryview(rest))
    return bytes(rest)
