#!/usr/bin/env bash
# Makes an environment at PREFIX with what one image runs: coordinator (no torch), cpu or cuda. Run in the project's
# folder; the Dockerfile does so, and the tests do. In two steps, so that a layer with torch outlasts a change of sources:
#   install_packages.sh PREFIX VARIANT dependencies    what pyproject.toml asks for; reads no other file but constraints.txt
#   install_packages.sh PREFIX VARIANT project         the project itself; without a step: both
#   PYTHON     the interpreter to build on, which has pip
#   TORCH_INDEX_URL   where the cpu variant takes torch from; its builds for CPUs are not on PyPI for every platform
set -euo pipefail

PREFIX="${1:?where the environment goes}"
variant="${2:?coordinator, cpu or cuda}"
step="${3:-all}"
case "$variant" in
coordinator) extras=(coordinator gateway telemetry download) ;;
cpu | cuda) extras=(engine gateway telemetry download) ;;
*)
	echo "install_packages.sh: no such variant: $variant (coordinator, cpu or cuda)" >&2
	exit 2
	;;
esac

python="${PYTHON:-python3}"
# An image has no use for pip: the builder's own fills the environment.
pip=("$python" -m pip --python "$PREFIX" install --disable-pip-version-check --no-cache-dir --quiet --progress-bar off
	-c constraints.txt)

# The requirements of the project and of extras, one a line; an extra may name others of the project's.
requirements() {
	"$python" - "$@" <<-'PYTHON'
		import re, sys, tomllib
		with open("pyproject.toml", "rb") as file:
		    project = tomllib.load(file)["project"]
		lines, extras = list(project["dependencies"]), list(sys.argv[1:])
		for extra in extras:
		    for line in project["optional-dependencies"].get(extra, ()):
		        own = re.fullmatch(r"outrider\[(.*)\]", line)
		        if own is None:
		            lines.append(line)
		        else:
		            extras += [name.strip() for name in own[1].split(",")]
		print("\n".join(dict.fromkeys(lines)))
	PYTHON
}

if [[ "$step" != project ]]; then
	"$python" -m venv --without-pip "$PREFIX"
	if [[ "$variant" == cpu ]]; then
		"${pip[@]}" --index-url "${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}" torch
	fi
	requirements "${extras[@]}" >"$PREFIX/requirements.txt"
	"${pip[@]}" -r "$PREFIX/requirements.txt"
	touch "$PREFIX/.dependencies" # what is newer is the project's
fi
if [[ "$step" != dependencies ]]; then
	"${pip[@]}" --no-deps .
fi
