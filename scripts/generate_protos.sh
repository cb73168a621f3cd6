#!/usr/bin/env bash
# Generates outrider/v1 from proto/outrider/v1. With an argument: into that folder instead.
# Generated gRPC code refuses a runtime older than its generator, so the generator is the oldest runtime supported.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python}"
GENERATOR="grpcio-tools 1.84.0"
target="${1:-.}"

found="$("$PYTHON" -c 'import importlib.metadata as m; print("grpcio-tools", m.version("grpcio-tools"))')"
if [[ "$found" != "$GENERATOR" ]]; then
	echo "generated code must come from $GENERATOR; this environment has $found" >&2
	exit 1
fi

mkdir -p "$target/outrider/v1"
# The path under proto/ equals the Python path, so the generated imports are right as they are.
"$PYTHON" -m grpc_tools.protoc -I proto --python_out="$target" --pyi_out="$target" --grpc_python_out="$target" \
	proto/outrider/v1/*.proto
