"""A worker's flags: what they become, and what is refused with which words."""

from pathlib import Path

import pytest

from pd_core.identity import Identity, Part
from pd_engine.settings import parse

BASE = [
    *("--role", "decode", "--model", "/m", "--served-name", "chat"),
    *("--worker-name", "d-0", "--host", "127.0.0.1"),
]


def test_defaults() -> None:
    settings = parse(BASE)
    assert settings.role == "decode"
    assert settings.imports
    assert (settings.block_tokens, settings.chunk_tokens) == (16, 512)
    assert settings.routers == ()
    assert not parse(["--role", "prefill", *BASE[2:]]).imports


def test_tls() -> None:
    settings = parse([*BASE, "--tls-dir=/tls", "--tls-cluster=ml/chat"])
    assert settings.tls_dir == Path("/tls")
    assert settings.tls_cluster == Identity("ml", "chat", Part.WORKER)


def test_routers() -> None:
    assert parse([*BASE, "--routers", "a:1, b.c:7000"]).routers == ("a:1", "b.c:7000")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--role chef", "invalid choice: 'chef'"),
        ("--block-tokens 0", "must be at least 1"),
        ("--block-tokens x", "invalid integer value: 'x'"),
        ("--kv-cache-fraction 1.5", "must lie between 0 and 1"),
        ("--kv-cache-fraction nan", "must lie between 0 and 1"),
        ("--kv-cache-fraction 0.1 --kv-cache-tokens 100", "not allowed with"),
        ("--routers localhost", "write HOST:PORT"),
        ("--drain-timeout-s nan", "must be a positive number of seconds"),
        ("--dtype int3", "invalid choice: 'int3'"),
        ("--kv-transport nixl --kv-quantization int8", "nixl carries KV as it is"),
        ("--tls-dir /tls", "go together"),
        ("--tls-dir /tls --tls-cluster chat", "give NAMESPACE/NAME"),
    ],
)
def test_wrong_flags_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*BASE, *flags.split()])
    assert message in capsys.readouterr().err
