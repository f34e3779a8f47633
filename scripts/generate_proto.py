"""Generates the Python modules of proto/: `python -m scripts.generate_proto OUT`.

OUT is `proto` to replace the committed ones; check_repo.py writes elsewhere and compares.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
_DEADLINE_S = 60


def generate(out: Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and *_pb2_grpc.py below `out`; raises when protoc refuses."""
    protos = sorted(str(p.relative_to(SOURCES)) for p in SOURCES.rglob("*.proto"))
    arguments = [
        f"--proto_path={SOURCES}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *protos,
    ]
    # In a process of its own: protoc's libraries and NIXL's can't live in one.
    command = [sys.executable, "-m", "grpc_tools.protoc", *arguments]
    if subprocess.run(command, timeout=_DEADLINE_S, check=False).returncode != 0:
        raise RuntimeError(f"protoc refused {', '.join(protos)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
