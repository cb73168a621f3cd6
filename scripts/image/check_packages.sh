#!/usr/bin/env bash
# Fails when the environment at PREFIX is not what the image of this variant should hold.
set -euo pipefail

PREFIX="${1:?the environment}"
variant="${2:?coordinator, cpu or cuda}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Away from the project's folder: what counts is what is installed.
cd /

is_installed() {
	"$PREFIX/bin/python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"
}

case "$variant" in
coordinator)
	for package in torch transformers triton; do
		if is_installed "$package"; then
			echo "check_packages.sh: $package is in the coordinator's image" >&2
			exit 1
		fi
	done
	;;
cpu | cuda)
	is_installed torch || { echo "check_packages.sh: torch is not in the image for $variant" >&2; exit 1; }
	has_cuda="$("$PREFIX/bin/python" -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')"
	if [[ "$has_cuda" != "$variant" ]]; then
		echo "check_packages.sh: torch is built for $has_cuda in the image for $variant" >&2
		exit 1
	fi
	"$PREFIX/bin/python" -m outrider_target --help >/dev/null
	"$PREFIX/bin/python" -m outrider_draft --help >/dev/null
	# It is torch's, which has just been imported.
	test -x "$PREFIX/bin/torchrun"
	;;
esac
"${PYTHON:-python3}" -m pip --python "$PREFIX" --disable-pip-version-check check
"$PREFIX/bin/outrider" --version
"$PREFIX/bin/python" -m outrider_coordinator --help >/dev/null
"$PREFIX/bin/python" "$here/download_model.py" --help >/dev/null
echo "the environment of $variant is as it should be"
