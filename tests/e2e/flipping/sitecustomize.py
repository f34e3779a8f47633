"""Python imports this first in workers of `test_field_faults.py`, where the folder is on their
path: of the next push that they take, one bit is another, whichever way it comes. PD_TEST_FLIP
is a file that asks for it, and is deleted when it is done.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from pd_engine.kv.bytcp import TcpTaker
from pd_engine.kv.nixl import NixlTaker
from pd_engine.kv.shm import ShmTaker

ASKED = Path(os.environ["PD_TEST_FLIP"])


def flipping(taker: Any) -> None:
    take = taker.take

    async def flipped(
        self: Any, sock: Any, head: Any, slices: Sequence[memoryview], *rest: Any
    ) -> int:
        checksum: int = await take(self, sock, head, slices, *rest)
        if not ASKED.exists():
            return checksum
        ASKED.unlink()
        slices[-1][-1] ^= 0x10
        hasher = xxhash.xxh3_64()
        for one in slices:
            hasher.update(one)
        return hasher.intdigest()

    taker.take = flipped


for one in (TcpTaker, ShmTaker, NixlTaker):
    flipping(one)
