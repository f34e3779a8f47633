"""Who asks: a tenant, a class of service, a conversation. From headers, and never a worker."""

from hashlib import blake2b

from pd_router.exchange import Exchange
from pd_router.openai import Ask, invalid
from pd_router.types import Who

CLASS_HEADER = b"x-pdcluster-class"
SESSION_HEADER = b"x-session-id"
_MAX_CHARS = 256


def who(exchange: Exchange, ask: Ask, *, class_header: bool) -> Who:
    """API keys tell tenants apart; what is kept of them is a digest. Sessions of different
    tenants are different, whatever they are called."""
    key = exchange.header(b"authorization") or b""
    tenant = blake2b(key, digest_size=8, person=b"pd-tenant").hexdigest() if key else ""
    given = exchange.header(CLASS_HEADER) if class_header else None
    name = ask.session_id.encode() or exchange.header(SESSION_HEADER) or b""
    if len(name) > 4 * _MAX_CHARS:
        raise invalid("session_id", f"A session's id has at most {_MAX_CHARS} characters.")
    session = b""
    if name:
        session = blake2b(tenant.encode() + b"/" + name, digest_size=16).digest()
    return Who(tenant, given.decode("latin-1")[:64] if given else None, session)
