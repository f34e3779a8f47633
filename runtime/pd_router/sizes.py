"""Why the pools have their sizes, as the operator tells it: checked, bounded, only shown.

Nothing here acts on it. docs/adr/0013 says why the operator tells it and not the API server.
"""

from typing import Annotated, Any

import msgspec

from pd_router.errors import invalid
from pd_router.exchange import Exchange
from pd_router.page import check_host, check_origin

PATH = "/scaling"
MAX_BODY_BYTES = 64 << 10
_Short = Annotated[str, msgspec.Meta(max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Decision(msgspec.Struct, frozen=True):
    """One about a pool's size. What a newer operator says beyond this is left out."""

    time: _Short  # RFC 3339
    pool: _Short
    to: int
    reason: _Short
    text: _Text
    details: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=8)] = ()


class Told(msgspec.Struct, frozen=True):
    """`standing`: what holds now, for each pool that the operator sizes; `changes`: the last
    changes of a size, the latest first."""

    standing: Annotated[tuple[Decision, ...], msgspec.Meta(max_length=4)] = ()
    changes: Annotated[tuple[Decision, ...], msgspec.Meta(max_length=32)] = ()


class Sizes:
    """What was told last."""

    def __init__(self) -> None:
        self._told = Told()

    async def take(self, exchange: Exchange) -> None:
        """POST on the admin port; ApiError for what isn't right."""
        check_host(exchange)
        check_origin(exchange)
        exchange.allow("POST")
        body = await exchange.read_body(MAX_BODY_BYTES)
        try:
            self._told = msgspec.json.decode(body, type=Told)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(None, f"Not what the operator tells: {error}") from None
        await exchange.reply(200, b'{"status":"ok"}')

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self._told)
        return found
