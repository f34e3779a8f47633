"""Who may use the clients' port: a folder with a file for each client, as a mounted Secret is.

A client is known by its file's name; each line of the file is one of its API keys, so that a
new key works before the old one goes. The folder is looked at again and again. A folder that
can't be read changes nothing, a file that can't be read counts for nothing, and an empty
folder lets nobody in. Of keys only digests are kept.
"""

import asyncio
import errno
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from pd_router.errors import ApiError

log = logging.getLogger("pd_router.keys")

LOOK_S = 5.0
MAX_CLIENTS = 10_000
MAX_FILE_BYTES = 64 * 1024
MIN_KEY_CHARS, MAX_KEY_CHARS = 8, 512
_SCHEME = b"bearer "


class Keyring:
    """The keys that a folder holds."""

    def __init__(self, folder: Path, refused: Callable[[], None] = lambda: None) -> None:
        """`refused` hears of each request without a right key."""
        self._folder = folder
        self._refused = refused
        self._clients: Mapping[bytes, str] = {}
        self._told: tuple[str, ...] | None = None

    def load(self) -> None:
        """Looks at the folder; keeps what it had when that can't be read."""
        try:
            found, wrong = _read(self._folder)
        except OSError as error:
            self._tell((f"{self._folder} can't be read, its keys stay as they are: {error}",))
            return
        self._clients = found
        self._tell(wrong if found else (*wrong, f"{self._folder} has no API key: all are refused"))

    async def follow(self) -> None:
        """Never returns. The files are few, small and in memory."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.load()

    @property
    def clients(self) -> int:
        """How many have a key. 0: all are refused."""
        return len({*self._clients.values()})

    def client(self, authorization: bytes | None) -> str:
        """The client whose key it is; ApiError 401 when it's nobody's."""
        given = authorization or b""
        if given[: len(_SCHEME)].lower() == _SCHEME:
            name = self._clients.get(_digest(given[len(_SCHEME) :].strip()))
            if name is not None:
                return name
        self._refused()
        what = "The API key isn't known here." if given else "There is no API key."
        raise ApiError(
            401,
            f"{what} Send the header 'Authorization: Bearer YOUR_KEY'.",
            code="invalid_api_key",
            headers=((b"www-authenticate", b"Bearer"),),
        )

    def _tell(self, lines: tuple[str, ...]) -> None:
        """Once, until it is something else."""
        if lines != self._told:
            self._told = lines
            for line in lines:
                log.warning("%s", line)
            log.info("api_keys=%d clients=%d", len(self._clients), self.clients)


def _read(folder: Path) -> tuple[dict[bytes, str], tuple[str, ...]]:
    """Clients by digest, and what is wrong with files, none of which holds up the others."""
    found: dict[bytes, str] = {}
    wrong: list[str] = []
    files = sorted(one for one in folder.iterdir() if not one.name.startswith("."))
    if len(files) > MAX_CLIENTS:
        wrong.append(f"{folder} has {len(files)} files: only the first {MAX_CLIENTS} count")
    for file in files[:MAX_CLIENTS]:
        try:
            text = _text(file)
        except OSError as error:
            wrong.append(f"{file.name} can't be read, it counts for nothing: {error.strerror}")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            key = line.strip()
            if not key:
                continue
            if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
                bounds = f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS}"
                wrong.append(f"{file.name}, line {number}: a key has {bounds} characters")
            elif found.setdefault(_digest(key), file.name) != file.name:
                wrong.append(f"{file.name}, line {number}: is {found[_digest(key)]}'s key already")
    return found, tuple(wrong)


def _text(file: Path) -> bytes:
    """What a file holds; OSError when it isn't a file of a bearable size."""
    # Without waiting: a pipe's other end may never come.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it isn't a file")
        with open(descriptor, "rb", closefd=False) as opened:
            text = opened.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_FILE_BYTES} bytes")
    return text


def _digest(key: bytes) -> bytes:
    # Looking a digest up tells by its time nothing about the key.
    return hashlib.sha256(key).digest()
