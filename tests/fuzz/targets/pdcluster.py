"""A PDCluster file: YAML, then `api.parse`, as `pdcluster validate` and the operator read it;
two documents are an object and its update."""

import tempfile
from pathlib import Path

from pd_cli.document import BadFile, load
from pd_operator import api
from tests.pd_operator import corpus

PACKAGES = ("pd_operator", "pd_cli")
WORDS = (
    b"apiVersion: pdcluster.dev/v1alpha1", b"kind: PDCluster", b"metadata: {name: a}", b"spec:",
    b"model:", b"source:", b"prefill:", b"decode:", b"colocated:", b"router:", b"replicas:",
    b"scaling:", b"engine:", b"slo:", b"budget:", b"rollout:", b"kvTransfer:", b"template:",
    b".nan", b".inf", b"null", b"&a", b"*a", b"<<:", b"---\n", b"{}", b"[]", b"!!binary", b"1e400",
)  # fmt: skip
_FILE = Path(tempfile.mkdtemp(prefix="pdcluster-fuzz-")) / "file.yaml"


def one(data: bytes) -> None:
    before = None
    for part in data.split(b"\n---\n")[:2]:
        _FILE.write_bytes(part)
        try:
            parsed = api.parse(load(_FILE))
            if before is not None:
                api.check_update(before, parsed)
            before = parsed
        except BadFile as bad:
            assert str(bad)
        except api.InvalidCluster as invalid:
            assert invalid.errors
            assert all(str(error) for error in invalid.errors)


def seeds() -> list[bytes]:
    return [file.read_bytes() for file in sorted(corpus.FOLDER.glob("*.yaml"))]
