"""Covers pd_core.identity: how a process is named in certificates, and who is let in."""

import pytest

from pd_core.identity import Identity, Part, parse_cluster, stranger

WORKER = Identity("ml", "chat", Part.WORKER)


def test_names() -> None:
    assert WORKER.uri == "spiffe://pdcluster/ml/chat/worker"
    assert WORKER.dns_name == "worker.chat.ml.pdcluster"
    assert WORKER.peer(Part.ROUTER) == Identity("ml", "chat", Part.ROUTER)


def test_parse() -> None:
    assert parse_cluster("ml/chat", Part.WORKER) == WORKER
    assert parse_cluster("ml/chat.v2", Part.ROUTER).name == "chat.v2"


@pytest.mark.parametrize("text", ["", "chat", "ml/", "/chat", "ml/chat/x", "ML/chat", "ml/a..b"])
def test_what_names_no_cluster(text: str) -> None:
    with pytest.raises(ValueError, match="NAMESPACE/NAME"):
        parse_cluster(text, Part.WORKER)


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://pdcluster/ml/chat/router",
        "spiffe://pdcluster/ml/other/worker",
        "spiffe://pdcluster/other/chat/worker",
        "spiffe://elsewhere/ml/chat/worker",
    ],
)
def test_strangers_are_named(uri: str) -> None:
    why = stranger([uri], WORKER)
    assert uri in why
    assert WORKER.uri in why


def test_who_is_let_in() -> None:
    assert not stranger([WORKER.uri], WORKER)
    assert "no identity" in stranger([], WORKER)
