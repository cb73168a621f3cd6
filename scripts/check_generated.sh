#!/usr/bin/env bash
# Fails when outrider/v1 is not what proto/ generates, or when an rpc, message, field or enum value has no comment.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python}"
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT

"$PYTHON" scripts/check_proto_comments.py proto/outrider/v1
scripts/generate_protos.sh "$fresh"

if ! diff --recursive --brief --exclude='__pycache__' --exclude='__init__.py' outrider/v1 "$fresh/outrider/v1"; then
	echo "outrider/v1 is stale: run 'make proto'" >&2
	exit 1
fi
if grep -rn --include='*.py' "Missing associated documentation comment" outrider/v1; then
	echo "an rpc or a service has no comment in its .proto file" >&2
	exit 1
fi
echo "generated code is fresh and documented"
