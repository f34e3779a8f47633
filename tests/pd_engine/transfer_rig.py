"""Small values for tests of Imports and Exports: a layout of 6 layers x 4 tokens, and the
heads of pushes and seals that fit to it."""

import hashlib

from pd_core.kv import KvLayout
from pd_engine.transfer import KvRange, PushHead, SealHead, TransferId, coverage_record
from pd_engine.types import Finish, TokenOut

LAYOUT = KvLayout("m", "float32", block_tokens=4, layers=6, kv_heads=1, head_dim=4)
SLICE = LAYOUT.layer_bytes
KEY = (1, 1)
ID = TransferId("request", 2)
GRANT = b"g" * 16
FIRST = (TokenOut(0, 0, 11, Finish.STOP, -0.25, ((11, -0.25),)),)


class Digest:
    """A stand-in for xxh3_64."""

    def __init__(self) -> None:
        self._h = hashlib.sha256()

    def update(self, data: bytes, /) -> None:
        self._h.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._h.digest()[:8])


def push(r: KvRange, checksum: int = 5, grant: bytes = GRANT, id: TransferId = ID) -> PushHead:
    return PushHead(grant, id, r, r.slices * SLICE, checksum)


def seal(*pushes: PushHead, tokens: int = 10, first: tuple[TokenOut, ...] = FIRST) -> SealHead:
    digest = Digest()
    for p in pushes:
        digest.update(coverage_record(p.range, p.payload_bytes, p.checksum))
    size = sum(p.payload_bytes for p in pushes)
    return SealHead(GRANT, ID, tokens, size, digest.intdigest(), first, 3)
