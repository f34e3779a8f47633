"""Keys and certificates, made and read. The only importer of `cryptography`.

Certificates name their owner twice, as `pd_core.identity` has it. PEM in, PEM out; private keys
appear in nothing else than what is returned as such.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pd_core.identity import Identity
from pd_operator.tlsplan import Authority, Leaf

BACKDATED = timedelta(minutes=5)
"""Nodes' clocks differ: what is made now holds from a little earlier on."""
_PEM = serialization.Encoding.PEM
_UNREADABLE = (
    ValueError,
    TypeError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What reading nonsense may raise. Whoever may write Secrets can put any there."""
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and, unless it's only to be trusted, its key."""

    certificate: bytes
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Known:
    """An authority that has been read."""

    facts: Authority
    pair: Pair


def make_token() -> bytes:
    """What a PDCluster's processes prove themselves by: random, and as text."""
    return secrets.token_urlsafe(_TOKEN_BYTES).encode()


def make_authority(now: datetime, life: timedelta) -> Pair:
    """A new one, of a name that no other has: two may be trusted at a time."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"PDCluster authority {secrets.token_hex(8)}")
    usage = _usage(key_cert_sign=True, crl_sign=True)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _builder(name, name, key.public_key(), now, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(made.public_bytes(_PEM), _private(key))


def make_leaf(issuer: Known, identity: Identity, now: datetime, life: timedelta) -> Pair:
    """A certificate of that identity, for servers and clients; it doesn't outlive its issuer."""
    signing = serialization.load_pem_private_key(issuer.pair.key, None)
    assert isinstance(signing, ec.EllipticCurvePrivateKey)
    authority = x509.load_pem_x509_certificate(issuer.pair.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + life, authority.not_valid_after_utc)
    names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns_name)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    made = (
        _builder(_name(identity.role), authority.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(above, critical=False)
        .sign(signing, hashes.SHA256())
    )
    return Pair(made.public_bytes(_PEM), _private(key))


def read_authority(pair: Pair) -> Known | None:
    """None where it can't be used as one."""
    try:
        made = x509.load_pem_x509_certificate(pair.certificate)
        made.verify_directly_issued_by(made)
        if not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return None
        signs = _is_key_of(pair.key, made)
        name = made.fingerprint(hashes.SHA256()).hex()[:16]
        created = made.not_valid_before_utc + BACKDATED
        facts = Authority(name, created, made.not_valid_after_utc, signs)
    except _UNREADABLE:
        return None
    return Known(facts, Pair(made.public_bytes(_PEM), pair.key if signs else b""))


def read_bundle(text: bytes) -> list[Known]:
    """The authorities of a `ca.crt`."""
    try:
        found = x509.load_pem_x509_certificates(text)
    except _UNREADABLE:
        return []
    read = [read_authority(Pair(one.public_bytes(_PEM))) for one in found]
    return [one for one in read if one is not None]


def read_leaf(pair: Pair, identity: Identity, authorities: Iterable[Known]) -> Leaf | None:
    """None where it isn't that identity's, isn't whole, or is of none of these authorities."""
    try:
        made = x509.load_pem_x509_certificate(pair.certificate)
        named = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = named.get_values_for_type(x509.UniformResourceIdentifier)
        names = named.get_values_for_type(x509.DNSName)
        if uris != [identity.uri] or names != [identity.dns_name]:
            return None
        issuer = next((one for one in authorities if _has_signed(one, made)), None)
        if issuer is None or not _is_key_of(pair.key, made):
            return None
        created = made.not_valid_before_utc + BACKDATED
        return Leaf(issuer.facts.id, created, made.not_valid_after_utc)
    except _UNREADABLE:
        return None


def _has_signed(authority: Known, leaf: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.pair.certificate))
    except _UNREADABLE:
        return False
    return True


def _is_key_of(text: bytes, certificate: x509.Certificate) -> bool:
    try:
        key = serialization.load_pem_private_key(text, None)
        public = certificate.public_key()
    except _UNREADABLE:
        return False
    return (
        isinstance(key, ec.EllipticCurvePrivateKey)
        and isinstance(public, ec.EllipticCurvePublicKey)
        and key.public_key() == public
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - BACKDATED)
        .not_valid_after(until.astimezone(UTC))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
