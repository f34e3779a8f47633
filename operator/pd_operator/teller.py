"""Tells routers why the pools have their sizes, for the live page and `pdcluster top`.

Routers have no rights at the API server, and so can't read it in the status (docs/adr/0013).
A reconcile never waits for it: each router is told in a task of its own, when there is
something new or when its process is new, and again at the next look where it didn't answer.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pd_operator import httpget
from pd_operator.keys import Key
from pd_operator.podspec import ADMIN_PORT
from pd_operator.scaling.explaining import Told, entry, kept_entry

log = logging.getLogger("pd_operator.teller")

PATH = "/scaling"
CHANGES = 8
"""Changes of a size that are told of a PDCluster, the last ones."""
MOST_AT_ONCE = 64
_TIMEOUT_S = 2.0
_REFUSED = 400
_OWN_FAULT = 500
_NO_SUCH_PAGE = 404
_SHOWN_BYTES = 200
Entry = dict[str, Any]
Post = Callable[[str, bytes], Awaitable[bool]]


@dataclass(slots=True)
class _Known:
    """`heard`: the version that each router's process knows."""

    standing: dict[str, Entry] = field(default_factory=dict)
    changes: deque[Entry] = field(default_factory=lambda: deque(maxlen=CHANGES))
    version: int = 0
    heard: dict[str, int] = field(default_factory=dict)

    def body(self) -> bytes:
        told = {"standing": list(self.standing.values()), "changes": list(self.changes)}
        return json.dumps(told).encode()


async def post(address: str, body: bytes, port: int = ADMIN_PORT) -> bool:
    """Whether the router has heard it. One that refuses it has, too: it needn't be asked again,
    but the log says so."""
    try:
        answer = await httpget.post(address, port, PATH, body, timeout_s=_TIMEOUT_S)
    except httpget.GetFailed:
        return False
    if answer.status == _NO_SUCH_PAGE:
        log.info("router=%s has no %s: it's of an older version", address, PATH)
    elif _REFUSED <= answer.status < _OWN_FAULT:
        said = answer.body[:_SHOWN_BYTES].decode(errors="replace")
        log.warning("router=%s refuses POST %s: %d %r", address, PATH, answer.status, said)
    return answer.status < _OWN_FAULT


class Teller:
    """`remember` and `note` what was decided, then `tell`; `forget` when the object is gone."""

    def __init__(self, post: Post = post) -> None:
        self._post = post
        self._known: dict[Key, _Known] = {}
        self._tasks: dict[tuple[Key, str], asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    def knows(self, key: Key) -> bool:
        return key in self._known

    def remember(self, key: Key, status: Mapping[str, Any], pools: Collection[str]) -> None:
        """What an operator before this one decided, as the object's status keeps it."""
        known = self._known[key] = _Known()
        found = {pool: status.get(pool, {}).get("decision") for pool in pools}
        entries = [kept_entry(pool, one) for pool, one in found.items() if one]
        known.changes.extend(sorted(entries, key=lambda one: one["time"], reverse=True))
        known.version += bool(entries)

    def note(self, key: Key, one: Told) -> None:
        """A pool's decision is another one than before."""
        known, said = self._known.setdefault(key, _Known()), entry(one)
        known.standing[one.pool] = said
        if one.after != one.before:
            known.changes.appendleft(said)
        known.version += 1

    def keep(self, key: Key, pools: Collection[str]) -> None:
        """Only these are sized by the operator now."""
        known = self._known.get(key)
        if known is not None:
            for pool in known.standing.keys() - set(pools):
                del known.standing[pool]
                known.version += 1

    def tell(self, key: Key, routers: Mapping[str, str]) -> None:
        """All routers of a PDCluster that serve, as addresses by process: those that don't know.
        An address may be another process's later, a process knows what it was told."""
        known = self._known.get(key)
        if known is None or not known.version:
            return
        known.heard = {one: known.heard[one] for one in routers if one in known.heard}
        for one, address in routers.items():
            if known.heard.get(one) != known.version and (key, one) not in self._tasks:
                task = asyncio.create_task(self._tell(known, one, address))
                self._tasks[key, one] = task
                task.add_done_callback(partial(self._over, (key, one)))

    async def _tell(self, known: _Known, process: str, address: str) -> None:
        version, body = known.version, known.body()
        async with self._slots:
            if await self._post(address, body):
                known.heard[process] = version

    def _over(self, place: tuple[Key, str], task: asyncio.Task[None]) -> None:
        del task
        self._tasks.pop(place, None)

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
