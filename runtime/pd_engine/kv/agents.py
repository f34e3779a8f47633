"""NIXL's agents: a worker's pool registered with UCX, and reads that are known to be over.

NIXL says when a read is done, but not when one that failed has stopped writing: of its parts
some may still be on their way. What writes our pool is our own agent, its threads or its
network card's queues, so its end is the proof. An agent with a read that failed, or that
outlives whoever wanted it, begins no new ones: those that are going on get a moment, then
it is closed, and only then are its failed reads over. The next read makes a new agent.
"""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_LIBRARIES = ("nixl_cu13", "nixl_cu12")
"""The same API for either CUDA; none of both needs CUDA to be there."""
_MEMORY = "DRAM"
_EAGER_S = 0.002
_PAUSE_S = 0.001
_LOOK_US = 1000
_DRAIN_S = 2.0
"""What a read gets to end by itself when nobody wants it any more."""
_OTHERS_S = 2.0
"""What an agent's other reads get to end before it is closed."""

Span = tuple[int, int, int]
"""(address here, address there, bytes)"""
Read = int


class AgentError(Exception):
    """NIXL can't do it; nothing of it is going on."""


class ReadFailed(OSError):
    """A read ended without its bytes; nothing writes on its behalf any more."""


def missing() -> str:
    """What has to be installed; "" when nothing has."""
    if any(importlib.util.find_spec(name) is not None for name in _LIBRARIES):
        return ""
    return "the Python package nixl-cu13 isn't installed: pip install 'pdcluster[nixl]'"


def rdma_device() -> bool:
    """Whether this process has a device for RDMA. (UCX also goes without: by tcp.)"""
    return any(Path("/dev/infiniband").glob("uverbs*"))


class Agent:
    """One of NIXL's agents, with one piece of memory registered. Making and closing it take
    a while; nothing may be called at the same time as anything else."""

    def __init__(self, name: str, address: int, size: int) -> None:
        library = _library()
        try:
            _calm(library.nixlBind)
            self._agent = library.nixl_agent(name, library.nixl_agent_config(backends=["UCX"]))
            self._agent.register_memory([(address, size, 0, "")], _MEMORY)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as e:  # each kind of trouble has a class of its own in there
            raise AgentError(f"no NIXL agent over UCX: {e}") from e
        self._numbers = itertools.count(1)
        self._handles: dict[Read, Any] = {}
        self._at_once: set[Read] = set()

    def meet(self, metadata: bytes) -> str:
        """From now on the agent that this describes can be read from; returns its name."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as e:
            raise AgentError(f"what came describes no NIXL agent: {e}") from e
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        with contextlib.suppress(Exception):  # it may have gone by itself
            self._agent.remove_remote_agent(name)

    def register(self, address: int, size: int) -> Any:
        """More memory that may be read into; returns what `forget` wants. Raises AgentError."""
        try:
            return self._agent.register_memory([(address, size, 0, "")], _MEMORY)
        except Exception as e:
            raise AgentError(f"no memory for NIXL: {e}") from e

    def forget(self, registered: Any) -> None:
        with contextlib.suppress(Exception):
            self._agent.deregister_memory(registered)

    def begin(self, peer: str, spans: Sequence[Span]) -> Read:
        """Raises AgentError. The read has to be asked for by `done` until it is over."""
        here = [(address, size, 0) for address, _, size in spans]
        there = [(address, size, 0) for _, address, size in spans]
        try:
            local = self._agent.get_xfer_descs(here, _MEMORY)
            remote = self._agent.get_xfer_descs(there, _MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
        except Exception as e:
            raise AgentError(f"can't read from {peer}: {e}") from e
        number = next(self._numbers)
        self._handles[number] = handle
        with contextlib.suppress(Exception):  # `done` tells
            if self._agent.transfer(handle) == "DONE":
                self._at_once.add(number)
        return number

    def over(self, read: Read) -> bool:
        """Whether it was as soon as it had begun: nobody but this thread copies then."""
        return read in self._at_once

    def done(self, read: Read) -> bool | None:
        """None: it goes on, or nobody knows whether it does (False)."""
        self._at_once.discard(read)
        try:
            state = self._agent.check_xfer_state(self._handles[read])
        except Exception as e:
            # In words: the error itself would keep the agent, for as long as somebody keeps it.
            log.warning("a KV read by nixl failed: %s", str(e))
            return False
        if state == "PROC":
            return None
        if state != "DONE":
            return False
        self._handles.pop(read).release()
        return True

    def close(self) -> None:
        """Everything ends: when this has returned, nothing is written any more."""
        for handle in self._handles.values():
            with contextlib.suppress(Exception):
                handle.release()
        self._handles.clear()
        self._agent = None


class Reader:
    """An agent that reads into this worker's pool, with the peers that it knows."""

    def __init__(self, agent: Agent) -> None:
        self.retired = False
        self._agent = agent
        self._peers: dict[str, int] = {}
        self._going: set[Read] = set()
        self._closing = False
        self._gone = asyncio.Event()
        self._end: asyncio.Task[None] | None = None

    def join(self, peer: str, metadata: bytes) -> None:
        """Raises AgentError. `leave` must follow."""
        if peer not in self._peers:
            name = self._agent.meet(metadata)
            if name != peer:
                self._agent.part(name)
                raise AgentError(f"{peer} offers the memory of {name}")
        self._peers[peer] = self._peers.get(peer, 0) + 1

    def leave(self, peer: str) -> None:
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]
            if not self._closing:
                self._agent.part(peer)

    @contextlib.contextmanager
    def knowing(self, places: Sequence[tuple[int, int]]) -> Iterator[None]:
        """These (address, size), beside the pool, can be read into. Raises AgentError."""
        registered = []
        try:
            for address, size in places:
                if self._closing:
                    raise AgentError("another read went wrong meanwhile")
                registered.append(self._agent.register(address, size))
            yield
        finally:
            for place in registered if not self._closing else ():
                self._agent.forget(place)

    def begin(self, peer: str, spans: Sequence[Span]) -> Read:
        """Raises AgentError. `finish` must follow, whatever happens. A push that has begun
        goes on by a retired reader; for the next one there is another."""
        if self._closing:
            raise AgentError("another read went wrong meanwhile")
        read = self._agent.begin(peer, spans)
        self._going.add(read)
        return read

    def over(self, read: Read) -> bool:
        """Whether `finish` needn't wait for it."""
        return self._agent.over(read)

    async def finish(self, read: Read) -> None:
        """Returns when its bytes are here. Raises ReadFailed, or what it was cancelled with,
        and that only when nothing writes on its behalf any more."""
        loop = asyncio.get_running_loop()
        eager_until = loop.time() + _EAGER_S
        leave_at = None
        cancelled = None
        while not (done := self._done(read)) and not self._gone.is_set():
            now = loop.time()
            if leave_at is not None and now >= leave_at:
                self.retire()
            try:
                await asyncio.sleep(0 if now < eager_until else _PAUSE_S)
            except asyncio.CancelledError as e:
                cancelled = e
                leave_at = leave_at or now + _DRAIN_S
        self._going.discard(read)
        if cancelled is not None:
            raise cancelled
        if not done:
            raise ReadFailed("a read by nixl failed")

    def retire(self) -> None:
        """No new reads; the end, soon."""
        self.retired = True
        if self._end is None:
            self._end = asyncio.get_running_loop().create_task(self._ended())

    async def close(self) -> None:
        self.retire()
        await self._gone.wait()

    def _done(self, read: Read) -> bool:
        if self._closing or read not in self._going:
            return False
        done = self._agent.done(read)
        if done is False:
            self._going.discard(read)
            self.retire()
        return bool(done)

    async def _ended(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _OTHERS_S
        while self._going and loop.time() < until:
            await asyncio.sleep(_PAUSE_S)
        self._closing = True
        try:
            await asyncio.to_thread(self._agent.close)
        except Exception:
            log.exception("a NIXL agent couldn't be closed: nobody gets what it may write to")
            return
        self._gone.set()


@functools.cache
def _calm(bindings: Any) -> None:
    """From now on agents look every millisecond whether others want something of them. Left to
    itself NIXL's Python API has them look all the time, which keeps a core busy for each."""
    real = bindings.nixlAgentConfig

    def set_calmly(config: Any, name: str, value: object) -> None:
        real.__setattr__(config, name, _LOOK_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = type("Config", (real,), {"__setattr__": set_calmly})


def _library() -> Any:
    """NIXL's Python API, told to be quiet unless its own variable says otherwise."""
    name = next((n for n in _LIBRARIES if importlib.util.find_spec(n) is not None), "")
    if not name:
        raise AgentError(missing())
    raising = logging.raiseExceptions
    try:
        library = importlib.import_module(f"{name}._api")
    except Exception as e:
        raise AgentError(f"{name} can't be imported: {e}") from e
    finally:
        logging.raiseExceptions = raising  # it turns that off, for everybody
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return library
