"""Builds what is compiled of the engine: `python -m pd_engine.build`.

Run once where the engine is installed (`make env` and the image do), never by a worker.
Needs g++, or what CXX names. Imports no torch, and no library needs it to be built.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ENGINE = Path(__file__).resolve().parent
_BUILT = _ENGINE / "built"
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
_ATTENTION_FLAGS = (*_FLAGS, "-fopenmp", "-fno-math-errno")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_WIDE = "-mprefer-vector-width=512"
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", _WIDE)
_X86_VARIANTS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
}
_BUILD_S = 600.0


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library of C++: its sources lie in `folder`, `compile` makes it of them."""

    name: str
    folder: Path
    flags: object  # all that decides about the outcome beside the sources
    compile: Callable[[Sequence[str], Path], None]
    """The compiler's command, and what is to be made."""

    def path(self) -> Path:
        """Where it is, for these sources, these flags and this kind of machine."""
        digest = hashlib.sha256(repr(self.flags).encode())
        for source in sorted(self.folder.iterdir()):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return _BUILT / f"{self.name}-{platform.machine()}-{digest.hexdigest()[:12]}.so"


def _compile_attention(compiler: Sequence[str], target: Path) -> None:
    """All variants side by side, then one library."""
    sources, work = ATTENTION.folder, target.parent
    x86 = platform.machine() in ("x86_64", "AMD64")
    running = {}
    for name, flags in ({"baseline": ()} | (_X86_VARIANTS if x86 else {})).items():
        command = [*compiler, *_ATTENTION_FLAGS, *flags, f"-DPD_VARIANT={name}"]
        part = work / f"{name}.o"
        command += ["-c", str(sources / "variant.cpp"), "-o", str(part)]
        running[part] = subprocess.Popen(command)
    failed = [part.stem for part, p in running.items() if p.wait(_BUILD_S) != 0]
    if failed:
        raise RuntimeError(f"{compiler[0]} failed for {', '.join(failed)}")
    command = [*compiler, *_ATTENTION_FLAGS, "-shared", str(sources / "dispatch.cpp")]
    subprocess.run([*command, *map(str, running), "-o", str(target)], check=True)


def _compile_checksum(compiler: Sequence[str], target: Path) -> None:
    source = CHECKSUM.folder / "checksum.cpp"
    command = [*compiler, *_FLAGS, "-shared", str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=_BUILD_S)


ATTENTION = Library(
    "attention",
    _ENGINE / "attention" / "csrc",
    (_ATTENTION_FLAGS, _X86_VARIANTS),
    _compile_attention,
)
CHECKSUM = Library("checksum", _ENGINE / "kv" / "csrc", _FLAGS, _compile_checksum)


def build(library: Library, force: bool = False) -> Path:
    """Builds a library unless it is there. OSError or RuntimeError say why it can't."""
    target = library.path()
    if target.is_file() and not force:
        return target
    compiler = os.environ.get("CXX", "g++").split()
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no {compiler[0]} here")
    _BUILT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILT) as work:
        made = Path(work) / "library.so"
        library.compile(compiler, made)
        made.replace(target)
    for old in _BUILT.glob(f"{library.name}-*.so"):
        if old != target:
            old.unlink(missing_ok=True)
    return target


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pd_engine.build", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--force", action="store_true", help="build again")
    force: bool = parser.parse_args(argv).force
    for library in (ATTENTION, CHECKSUM):
        began = time.monotonic()
        try:
            path = build(library, force)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(
                f"error: {library.name} can't be compiled: {error}\n"
                f"  The engine runs without it, in Python and plain torch, several times slower.\n"
                f"  Install a C++ compiler (Debian, Ubuntu: apt install g++) and run:\n"
                f"  python -m pd_engine.build",
                file=sys.stderr,
            )
            return 1
        print(f"{path} ({time.monotonic() - began:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
