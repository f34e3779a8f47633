"""Certificates for tests: authorities, and identities that they vouch for, in folders as a
mounted Secret is: `ca.crt`, `tls.crt`, `tls.key`."""

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pd_core.identity import Identity

_DAY = datetime.timedelta(days=1)


class Authority:
    """One CA."""

    def __init__(self, name: str = "test CA") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(basic, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, identity: Identity, *, days: float = 1) -> tuple[bytes, bytes]:
        """Certificate and key of an identity, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.role)])
        names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns_name)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(subject, self._name, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(pem), private

    def folder(
        self, path: Path, identity: Identity, *, trusting: bytes = b"", days: float = 1
    ) -> Path:
        """Writes a folder, or a new version of it as the kubelet would: in one step, by a
        link that is moved. `trusting`: other authorities' certificates."""
        path.mkdir(parents=True, exist_ok=True)
        version = path / f"..{len(list(path.glob('..[0-9]*')))}"
        version.mkdir()
        certificate, key = self.issue(identity, days=days)
        (version / "ca.crt").write_bytes(self.pem + trusting)
        (version / "tls.crt").write_bytes(certificate)
        (version / "tls.key").write_bytes(key)
        link = path / "..next"
        link.symlink_to(version.name)
        os.replace(link, path / "..data")
        for name in ("ca.crt", "tls.crt", "tls.key"):
            if not (path / name).is_symlink():
                (path / name).symlink_to(f"..data/{name}")
        return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float = 1
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + days * _DAY)
    )
