"""What waits to be written to one router: merged, ordered, bounded."""

import asyncio

from pd_proto.v1 import engine_pb2 as pb


class Outbox:
    """Events of all of a router's requests. One reply carries all that is pending.

    A router that doesn't read for so long that `limit` events wait is taken for dead:
    `overflowed` turns true and nothing more is kept.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._events: list[pb.Event] = []
        self._tokens: list[pb.TokenOut] = []
        self._ready = asyncio.Event()
        self.overflowed = False
        self.closed = False

    def put(self, event: pb.Event) -> None:
        # Order between tokens and events counts (Committed comes before its tokens), so
        # pending tokens become an event of their own first.
        self._seal_tokens()
        self._events.append(event)
        self._check()

    def put_token(self, token: pb.TokenOut) -> None:
        self._tokens.append(token)
        self._check()

    def flush(self) -> None:
        """Wakes the writer; called once a step or once a command, not once a token."""
        if self._events or self._tokens or self.overflowed or self.closed:
            self._ready.set()

    def close(self) -> None:
        """What is pending is still handed out, then `take` says None."""
        self.closed = True
        self._ready.set()

    async def take(self) -> pb.WorkReply | None:
        """The next reply; None when the stream is to end."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self.overflowed:
                return None
            self._seal_tokens()
            if self._events:
                events, self._events = self._events, []
                if self.closed:
                    self._ready.set()
                return pb.WorkReply(events=events)
            if self.closed:
                return None

    def _seal_tokens(self) -> None:
        if self._tokens:
            self._events.append(pb.Event(tokens=pb.Tokens(tokens=self._tokens)))
            self._tokens = []

    def _check(self) -> None:
        if len(self._events) + len(self._tokens) > self._limit:
            self.overflowed = True
            self._events.clear()
            self._tokens.clear()
            self._ready.set()
