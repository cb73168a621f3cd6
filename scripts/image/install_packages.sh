#!/usr/bin/env bash
# Makes an environment at PREFIX with what one image runs: coordinator (no torch), cpu or cuda. Run in the project's
# folder; the Dockerfile does so, and the tests do.
#   PYTHON     the interpreter to build on, which has pip
#   TORCH_INDEX_URL   where the cpu variant takes torch from; its builds for CPUs are not on PyPI for every platform
set -euo pipefail

PREFIX="${1:?where the environment goes}"
variant="${2:?coordinator, cpu or cuda}"
case "$variant" in
coordinator | cpu | cuda) ;;
*)
	echo "install_packages.sh: no such variant: $variant (coordinator, cpu or cuda)" >&2
	exit 2
	;;
esac

python="${PYTHON:-python3}"
# An image has no use for pip: the builder's own fills the environment.
pip=("$python" -m pip --python "$PREFIX" install --disable-pip-version-check --no-cache-dir --quiet --progress-bar off
	-c constraints.txt)

"$python" -m venv --without-pip "$PREFIX"
case "$variant" in
coordinator)
	"${pip[@]}" ".[gateway,telemetry,download]"
	;;
cpu)
	"${pip[@]}" --index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}" torch
	"${pip[@]}" ".[engine,gateway,telemetry,download]"
	;;
cuda)
	"${pip[@]}" ".[engine,gateway,telemetry,download]"
	;;
esac
