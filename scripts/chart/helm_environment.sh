#!/usr/bin/env bash
# Makes an environment with Helm's engine in the folder given, once, and prints its Python. Helm comes as a library
# (helm-sdkpy), which needs Python 3.12 or newer: an environment of its own.
#   PYTHON     an interpreter of any version whose pip fills it; unset: it gets a pip of its own, which takes longer
set -euo pipefail

HELM="helm-sdkpy==0.1.32"
folder="${1:?the folder of the environment}"

find_python() {
	local candidate
	for candidate in python3.12 python3.13 python3.14 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-4].*/bin/python; do
		if "$candidate" -c 'import sys, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null; then
			echo "$candidate"
			return
		fi
	done
	echo "Helm's engine needs Python 3.12, 3.13 or 3.14, and there is none" >&2
	return 1
}

mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
if [[ "$(cat "$folder/.installed" 2>/dev/null)" != "$HELM" ]]; then
	"$(find_python)" -m venv --clear ${PYTHON:+--without-pip} "$folder/environment"
	"${PYTHON:-$folder/environment/bin/python}" -m pip --python "$folder/environment" \
		install --disable-pip-version-check --quiet --progress-bar off "$HELM" >&2
	echo "$HELM" >"$folder/.installed"
fi
echo "$folder/environment/bin/python"
