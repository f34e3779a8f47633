#!/usr/bin/env bash
# Installs requirements/NAME.lock into build/packages/NAME: what one target needs and nobody
# else, beside the environment. Made again only when the lock changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1
lock=requirements/$name.lock
folder=build/packages/$name
stamp=$folder/.$(cksum <"$lock" | cut -d' ' -f1)

[ ! -e "$stamp" ] || exit 0
rm -rf "$folder"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
  --require-hashes --target "$folder" -r "$lock"
touch "$stamp"
