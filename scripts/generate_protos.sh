#!/usr/bin/env bash
# Generates outrider/v1 from proto/outrider/v1. With an argument: into that folder instead.
# Generated code refuses runtimes older than its generator, and those of the major release after the next: what this one
# makes runs with grpcio from 1.76 and protobuf 6 and 7. It is installed beside the environment, whose protobuf is newer.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python}"
GENERATOR="grpcio-tools==1.76.0"
target="${1:-.}"
tools="$("$PYTHON" -c 'import sys; print(sys.prefix)')/share/$GENERATOR"

if [[ ! -d "$tools/grpc_tools" ]]; then
	"$PYTHON" -m pip install --disable-pip-version-check --quiet --no-deps --target "$tools" "$GENERATOR"
fi

mkdir -p "$target/outrider/v1"
# The path under proto/ equals the Python path, so the generated imports are right as they are.
PYTHONPATH="$tools" "$PYTHON" -m grpc_tools.protoc -I proto --python_out="$target" --pyi_out="$target" --grpc_python_out="$target" \
	proto/outrider/v1/*.proto
