"""Generates the Python modules of proto/: `python -m scripts.generate_proto OUT`.

OUT is `proto` to replace the committed ones; check_repo.py writes elsewhere and compares.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"


def generate(out: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py below `out`; raises when protoc refuses."""
    protos = sorted(str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.proto"))
    arguments = [
        "protoc",
        f"--proto_path={SOURCES}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc refused {', '.join(protos)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
