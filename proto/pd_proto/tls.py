"""TLS among a PDCluster's processes: a folder's certificates, read anew when they change.

Both sides show a certificate of the same authorities, and each accepts only its own
PDCluster's routers or workers (`pd_core.identity`). New connections are made with what lies
in the folder then; those that are open live on. So while two authorities follow each other,
`ca.crt` holds both.
"""

import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pd_core.identity import Identity, Part, stranger

log = logging.getLogger("pd_proto.tls")

_FILES = ("ca.crt", "tls.crt", "tls.key")
_TRIES = 3
Stamp = tuple[tuple[int, int, int], ...]


class BadCertificates(OSError):
    """A folder that can't be used; says why."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One version of the folder, and what is made of it."""

    authorities: bytes
    certificate: bytes
    key: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext


class Certificates:
    """See the module. May be used by several threads: gRPC's servers ask from theirs."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        """OSError says what is wrong with the folder."""
        self.identity = identity
        self._folder = folder
        self._seen = self._stamp()
        self._loaded = self._load()

    # ---- gRPC ----------------------------------------------------------------------------

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Adds a port where clients have to show a certificate; returns it."""
        given = self._current()

        def changed() -> Any:
            nonlocal given
            loaded = self._current()
            if loaded is given:
                return None  # as it was
            given = loaded
            return _server_configuration(loaded)

        credentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(given), changed, require_client_authentication=True
        )
        return int(server.add_secure_port(address, credentials))

    def channel(
        self, address: str, peer: Part, options: Sequence[tuple[str, Any]]
    ) -> grpc.aio.Channel:
        """To that part of this PDCluster, whatever address it's dialled by."""
        loaded = self._current()
        name = ("grpc.ssl_target_name_override", self.identity.peer(peer).dns_name)
        credentials = grpc.ssl_channel_credentials(
            loaded.authorities, loaded.key, loaded.certificate
        )
        return grpc.aio.secure_channel(address, credentials, options=(*options, name))

    async def admit(self, context: Any, peer: Part) -> None:
        """Ends the call of who isn't that part of this PDCluster."""
        uris = [uri.decode() for uri in context.auth_context().get("peer_uri", ())]
        why = stranger(uris, self.identity.peer(peer))
        if why:
            log.warning("refused %s: %s", context.peer(), why)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    # ---- sockets -------------------------------------------------------------------------

    @property
    def server_context(self) -> ssl.SSLContext:
        return self._current().server

    @property
    def client_context(self) -> ssl.SSLContext:
        """Checks no name: `check` does, by identity."""
        return self._current().client

    def check(self, sock: ssl.SSLSocket, peer: Part) -> None:
        """ConnectionRefusedError: after its handshake, the other end isn't that part."""
        shown: Mapping[str, Any] = sock.getpeercert() or {}
        uris = [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
        why = stranger(uris, self.identity.peer(peer))
        if why:
            raise ConnectionRefusedError(why)

    # ---- the folder ----------------------------------------------------------------------

    def _current(self) -> _Loaded:
        """What lies in the folder; what lay there before while that can't be used."""
        try:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp  # tried once: what is wrong with it is said once
                self._loaded = self._load()
                log.info("certificates of %s read anew", self._folder)
        except OSError as error:
            log.warning("certificates stay as they were: %s", error)
        return self._loaded

    def _load(self) -> _Loaded:
        for _ in range(_TRIES):
            before = self._stamp()
            try:
                loaded = self._read()
            except (OSError, ValueError) as error:
                if before == self._stamp():
                    raise BadCertificates(f"certificates in {self._folder}: {error}") from error
                continue
            if before == self._stamp():
                return loaded
        raise BadCertificates(f"certificates in {self._folder} change while they are read")

    def _read(self) -> _Loaded:
        paths = [self._folder / name for name in _FILES]
        authorities, certificate, key = (path.read_bytes() for path in paths)

        def context(protocol: int) -> ssl.SSLContext:
            made = ssl.SSLContext(protocol)
            made.minimum_version = ssl.TLSVersion.TLSv1_3
            made.check_hostname = False
            made.verify_mode = ssl.CERT_REQUIRED
            made.load_verify_locations(cadata=authorities.decode("ascii"))
            made.load_cert_chain(paths[1], paths[2])
            return made

        server, client = context(ssl.PROTOCOL_TLS_SERVER), context(ssl.PROTOCOL_TLS_CLIENT)
        server.num_tickets = 0  # nobody resumes, and nobody would read them
        return _Loaded(authorities, certificate, key, server, client)

    def _stamp(self) -> Stamp:
        found = [(self._folder / name).stat() for name in _FILES]
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in found)


def _server_configuration(loaded: _Loaded) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(loaded.key, loaded.certificate)], loaded.authorities
    )


def listen(certificates: Certificates | None, server: grpc.aio.Server, address: str) -> int:
    """A port with TLS or, without certificates, without. OSError when it is taken."""
    try:
        if certificates is not None:
            return certificates.listen(server, address)
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


def dial(
    certificates: Certificates | None,
    address: str,
    peer: Part,
    options: Sequence[tuple[str, Any]],
) -> grpc.aio.Channel:
    """A channel with TLS or, without certificates, without."""
    if certificates is not None:
        return certificates.channel(address, peer, options)
    return grpc.aio.insecure_channel(address, options=options)
