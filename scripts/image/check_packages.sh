#!/usr/bin/env bash
# Fails when the environment at PREFIX is not what the image of this variant should hold.
set -euo pipefail

PREFIX="${1:?the environment}"
variant="${2:?coordinator, cpu or cuda}"
# Away from the project's folder: what counts is what is installed.
cd /

"$PREFIX/bin/python" -m pip --disable-pip-version-check check
"$PREFIX/bin/outrider" --version
"$PREFIX/bin/python" -m coordinator --help >/dev/null
case "$variant" in
coordinator)
	for package in torch transformers triton; do
		if "$PREFIX/bin/python" -c "import $package" 2>/dev/null; then
			echo "check_packages.sh: $package is in the coordinator's image" >&2
			exit 1
		fi
	done
	;;
cpu | cuda)
	"$PREFIX/bin/python" -m target_service --help >/dev/null
	"$PREFIX/bin/python" -m draft_service --help >/dev/null
	"$PREFIX/bin/hf" download --help >/dev/null
	"$PREFIX/bin/torchrun" --help >/dev/null
	has_cuda="$("$PREFIX/bin/python" -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')"
	if [[ "$has_cuda" != "$variant" ]]; then
		echo "check_packages.sh: torch is built for $has_cuda in the image for $variant" >&2
		exit 1
	fi
	;;
esac
echo "the environment of $variant is as it should be"
