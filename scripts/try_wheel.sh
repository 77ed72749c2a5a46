#!/usr/bin/env bash
# try_wheel.sh WHEEL: install it into an empty environment outside of the repository, as its users
# do, and run the demo there. Everything is removed at the end.
set -euo pipefail
wheel=$(realpath "$1")
constraints=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../constraints.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
export ENGRAM_CACHE="$folder/cache"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check -c "$constraints" "$wheel"
venv/bin/pip check
venv/bin/engram --version
venv/bin/python -c 'import engram, sys; sys.exit(not engram.__file__.startswith(sys.prefix))'
venv/bin/engram demo
venv/bin/engram predict demo/bundle demo/scene.png
