#!/bin/sh
# Regenerates gen/ from protos/. `--check` leaves gen/ alone and fails if it differs.
# baton and baton.v1 are namespace packages, without __init__.py: baton-client installs what a client needs of them,
# baton-serving the rest.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=gen
[ "${1:-}" = "--check" ] && out=$(mktemp -d) && trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I protos -I third_party \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/baton/v1/*.proto
touch "$out/baton/v1/py.typed"
if [ "${1:-}" = "--check" ]; then
    diff -r -x __pycache__ "$out/baton" gen/baton || { echo "gen/ is stale: run make protos" >&2; exit 1; }
fi
