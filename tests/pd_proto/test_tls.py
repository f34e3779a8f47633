"""Covers pd_proto.tls: a folder of certificates, read anew when it changes and only then, and
kept as it was while what lies there can't be used."""

import logging
from pathlib import Path

import pytest

from pd_core.identity import Identity, Part
from pd_proto.tls import BadCertificates, Certificates
from tests.certificates import Authority

WORKER = Identity("ml", "chat", Part.WORKER)


def test_what_changes_is_read_anew(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates(authority.folder(tmp_path, WORKER), WORKER)
    first = certificates.server_context
    assert certificates.server_context is first
    authority.folder(tmp_path, WORKER)
    assert certificates.server_context is not first


def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ca\.crt"):
        Certificates(tmp_path, WORKER)
    Authority().folder(tmp_path, WORKER)
    (tmp_path / "ca.crt").unlink()
    (tmp_path / "ca.crt").write_bytes(b"no certificate")
    with pytest.raises(BadCertificates, match=str(tmp_path)):
        Certificates(tmp_path, WORKER)


def test_a_key_of_another_certificate_leaves_all_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    certificates = Certificates(authority.folder(tmp_path, WORKER), WORKER)
    first = certificates.server_context
    _, key = authority.issue(WORKER)
    (tmp_path / "tls.key").unlink()
    (tmp_path / "tls.key").write_bytes(key)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert certificates.server_context is first
    assert len([r for r in caplog.records if "stay as they were" in r.getMessage()]) == 1
    (tmp_path / "tls.key").unlink()
    assert certificates.server_context is first, "a file that is missing"
    (tmp_path / "tls.key").symlink_to("..data/tls.key")
    authority.folder(tmp_path, WORKER)
    assert certificates.server_context is not first, "once it is whole again"
