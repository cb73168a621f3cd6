#!/usr/bin/env bash
# Installs the project, editable, with some extras into a virtual environment, and shows what it is doing.
#   install.sh FOLDER EXTRA,EXTRA,...
#   PYTHON             the interpreter for a new environment
#   TORCH_INDEX_URL    where torch comes from. Unset: where no NVIDIA driver is, PyTorch's own index of builds for CPUs, if
#                      it can be reached; its builds on PyPI bring some 3 GB of CUDA libraries
set -euo pipefail

folder="${1:?where the environment goes}"
extras="${2:?extras of pyproject.toml, separated by commas}"
# Modules are compiled when they are first imported: all at once would take longer than everything else here.
pip=("$folder/bin/python" -m pip install --disable-pip-version-check --no-compile -c constraints.txt)
# Bars on a terminal; a line for each package elsewhere.
[[ -t 1 ]] && pip+=(--progress-bar on)

reaches() {
	"$folder/bin/python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)' "$1" 2>/dev/null
}

if [[ ! -x "$folder/bin/python" ]]; then
	echo "making the environment $folder"
	"${PYTHON:-python3}" -m venv "$folder"
fi
index="${TORCH_INDEX_URL:-}"
cpu_index=https://download.pytorch.org/whl/cpu
if [[ -z "$index" && "$(uname -s)" == Linux && ! -e /proc/driver/nvidia/version ]] && reaches "$cpu_index/torch/"; then
	index=$cpu_index
fi
if [[ "$extras" == *engine* && -n "$index" ]]; then
	echo "installing torch from $index"
	"${pip[@]}" --index-url "$index" torch
fi
echo "installing outrider[$extras] (torch is some hundred MB; a minute or more)"
"${pip[@]}" -e ".[$extras]" | sed -u -E '/^(Requirement already|  (Getting|Installing|Preparing|Checking) |Obtaining)/d'
