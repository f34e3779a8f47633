"""Who asks: a tenant, a class of service, a conversation. From headers, and never a worker."""

from hashlib import blake2b

from pd_router.classes import Promises
from pd_router.errors import invalid
from pd_router.exchange import Exchange
from pd_router.openai import Ask
from pd_router.types import Who

CLASS_HEADER = b"x-pdcluster-class"
SESSION_HEADER = b"x-session-id"
_MAX_CHARS = 256


def who(exchange: Exchange, ask: Ask, promises: Promises, *, class_header: bool) -> Who:
    """Clients are tenants where keys are checked; elsewhere whatever keys are sent tell tenants
    apart, and what is kept of them is a digest. Sessions of different tenants are different,
    whatever they are called. A client that has a class keeps to it."""
    client = promises.clients.get(exchange.client)
    tenant = exchange.client
    key = exchange.header(b"authorization") or b""
    if not tenant and key:
        tenant = blake2b(key, digest_size=8, person=b"pd-tenant").hexdigest()
    given = exchange.header(CLASS_HEADER) if class_header else None
    if client is not None and client.sla is not None:
        given = client.sla.encode()
    name = ask.session_id.encode() or exchange.header(SESSION_HEADER) or b""
    if len(name) > 4 * _MAX_CHARS:
        raise invalid("session_id", f"A session's id has at most {_MAX_CHARS} characters.")
    session = b""
    if name:
        session = blake2b(tenant.encode() + b"/" + name, digest_size=16).digest()
    sla = given.decode("latin-1")[:64] if given else None
    return Who(tenant, sla, session, _salt(exchange.client))


def _salt(client: str) -> bytes:
    """Of clients that are known by their keys: what one has sent shortens nobody else's
    prefill, and so tells nobody anything."""
    return blake2b(client.encode(), digest_size=16, person=b"pd-salt").digest() if client else b""
