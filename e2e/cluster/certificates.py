"""The cluster's certificates: one authority, and what the API server shows and signs with."""

import secrets
import subprocess
from collections.abc import Iterable
from pathlib import Path

from e2e.cluster.errors import ClusterError

OPENSSL = "/usr/bin/openssl"
DAYS = "3650"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_all(folder: Path, names: Iterable[str], addresses: Iterable[str]) -> None:
    """ca, apiserver and front-proxy certificates, and the key that signs ServiceAccounts' tokens.

    EC keys: RSA would cost a second at every start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(
        folder,
        *("req", "-x509", *_CURVE, "-days", DAYS, "-subj", "/CN=pdcluster-test-authority"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
    )
    alternatives = [*(f"DNS:{n}" for n in names), *(f"IP:{a}" for a in addresses)]
    _leaf(folder, "apiserver", "serverAuth", alternatives)
    _leaf(folder, "front-proxy", "clientAuth", [])
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    for key in folder.glob("*.key"):
        key.chmod(0o600)


def token() -> str:
    return secrets.token_hex(24)


def _leaf(folder: Path, name: str, usage: str, alternatives: list[str]) -> None:
    extensions = ["-addext", f"extendedKeyUsage={usage}", "-addext", "basicConstraints=CA:FALSE"]
    if alternatives:
        extensions += ["-addext", f"subjectAltName={','.join(alternatives)}"]
    _openssl(
        folder,
        *("req", "-x509", "-CA", "ca.crt", "-CAkey", "ca.key", *_CURVE, "-days", DAYS),
        *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt", *extensions),
    )


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [OPENSSL, *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode != 0:
        raise ClusterError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-1000:]}")
