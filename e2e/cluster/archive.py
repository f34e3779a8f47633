"""An image of one static program, written without any builder: a docker archive."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write(
    file: Path,
    reference: str,
    files: Mapping[str, Path],
    entrypoint: Sequence[str],
    user: str = "65532:65532",
) -> None:
    """`files`: path in the image -> file here, each made executable."""
    layer = _layer(files)
    layer_digest = hashlib.sha256(layer).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "User": user, "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [{"created_by": "pdcluster"}],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": [layer_name]}]
    temporary = file.with_suffix(".part")
    with tarfile.open(temporary, "w") as archive:
        _add(archive, config_name, config)
        _add(archive, layer_name, layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())
    temporary.rename(file)


def _layer(files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for name, source in sorted(files.items()):
            _add(layer, name.lstrip("/"), source.read_bytes(), 0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = mode
    archive.addfile(entry, io.BytesIO(data))
