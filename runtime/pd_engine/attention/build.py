"""Builds the compiled attention: `python -m pd_engine.attention.build`.

Run once where the engine is installed (`make env` and the image do), never by a worker.
Needs g++, or what CXX names. Imports no torch, and the library needs none to be built.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ABI = 3  # PD_ATTENTION_ABI

_SOURCES = Path(__file__).resolve().parent / "csrc"
_BUILT = Path(__file__).resolve().parent / "built"
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_X86_VARIANTS = {"avx2": _AVX2, "avx512": (*_AVX512, "-mprefer-vector-width=512")}
_BUILD_S = 600.0


def library_path() -> Path:
    """Where the library for these sources, these flags and this kind of machine is."""
    digest = hashlib.sha256(repr((_FLAGS, _X86_VARIANTS)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return _BUILT / f"attention-{platform.machine()}-{digest.hexdigest()[:12]}.so"


def _variants() -> dict[str, tuple[str, ...]]:
    x86 = platform.machine() in ("x86_64", "AMD64")
    return {"baseline": ()} | (_X86_VARIANTS if x86 else {})


def _compile(compiler: Sequence[str], work: Path) -> Path:
    """All variants side by side, then one library."""
    running = {}
    for name, flags in _variants().items():
        command = [*compiler, *_FLAGS, *flags, f"-DPD_VARIANT={name}"]
        target = work / f"{name}.o"
        command += ["-c", str(_SOURCES / "variant.cpp"), "-o", str(target)]
        running[target] = subprocess.Popen(command)
    failed = [target.stem for target, p in running.items() if p.wait(_BUILD_S) != 0]
    if failed:
        raise RuntimeError(f"{compiler[0]} failed for {', '.join(failed)}")
    library = work / "attention.so"
    command = [*compiler, *_FLAGS, "-shared", str(_SOURCES / "dispatch.cpp")]
    subprocess.run([*command, *map(str, running), "-o", str(library)], check=True)
    return library


def build(force: bool = False) -> Path:
    """Builds the library unless it is there. OSError or RuntimeError say why it can't."""
    target = library_path()
    if target.is_file() and not force:
        return target
    compiler = os.environ.get("CXX", "g++").split()
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no {compiler[0]} here")
    _BUILT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILT) as work:
        _compile(compiler, Path(work)).replace(target)
    for old in _BUILT.glob("attention-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pd_engine.attention.build", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--force", action="store_true", help="build again")
    force: bool = parser.parse_args(argv).force
    began = time.monotonic()
    try:
        path = build(force)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(
            f"error: the compiled attention can't be built: {error}\n"
            f"  The engine runs without it, in plain torch, several times slower.\n"
            f"  Install a C++ compiler (Debian, Ubuntu: apt install g++) and run:\n"
            f"  python -m pd_engine.attention.build",
            file=sys.stderr,
        )
        return 1
    print(f"{path} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
