#!/usr/bin/env bash
# Installs the built wheel alone, without extras, for each Python found; fails when its files have 60 MB or more, compiled
# modules included, when torch, numpy or PyYAML came with it, or when the SDK does not work with protobuf 7 or 6. What the
# files take on this disk, which depends on its blocks, is printed beside it.
#   check_base_install.sh DIST     PYTHONS="python3.11 python3.12 ..."   SERVER_PYTHON: an environment with the dev extras
set -euo pipefail

wheel="$(ls "${1:?the folder with the wheel}"/outrider-[0-9]*.whl)"
root="$(cd "$(dirname "$0")/.." && pwd)"
work="$(mktemp -d)"
server=""
trap '[[ -n "$server" ]] && kill "$server"; rm -rf "$work"' EXIT

(cd "$root" && exec "${SERVER_PYTHON:-python}" -m tests.support.scripted_server "$work/address") &
server=$!
for _ in $(seq 300); do [[ -s "$work/address" ]] && break; sleep 0.1; done
export OUTRIDER_ADDRESS="$(cat "$work/address")"

megabytes() { # FOLDER [du's --apparent-size]
	echo $(($(du -s --block-size=1 "${@:2}" "$1" | cut -f1) / 1000000))
}

for python in ${PYTHONS:-python3.11 python3.12 python3.13 python3.14}; do
	"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$python: not here"; continue; }
	env="$work/$python"
	mkdir -p "$(dirname "$env")"
	"$python" -m venv "$env"
	before="$(megabytes "$env" --apparent-size)" before_on_disk="$(megabytes "$env")"
	"$env/bin/python" -m pip install --disable-pip-version-check --quiet "$wheel"
	size=$(($(megabytes "$env" --apparent-size) - before))
	on_disk=$(($(megabytes "$env") - before_on_disk))
	echo "$python: $size MB installed, $on_disk MB on this disk"
	((size < 60)) || { echo "more than 60 MB" >&2; exit 1; }
	for module in torch numpy tokenizers yaml; do
		if "$env/bin/python" -c "import $module" 2>/dev/null; then echo "$module came with it" >&2; exit 1; fi
	done
	for protobuf in 7 6; do
		"$env/bin/python" -m pip install --disable-pip-version-check --quiet "protobuf==$protobuf.*"
		(cd "$work" && "$env/bin/python" "$root/tests/support/sdk_smoke.py")
	done
	rm -rf "$env"
done
