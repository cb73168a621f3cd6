#!/usr/bin/env bash
# Gives the embedded pair, which is installed with the package at PREFIX, the short name that the chart's CPU profile uses.
set -euo pipefail

PREFIX="${1:?the environment}"
link="${2:?the folder to be made, /opt/outrider/pair in an image}"

cd /
pair="$("$PREFIX/bin/python" -c 'import importlib.resources as r; print(r.files("outrider.demo") / "pair")')"
test -f "$pair/target/config.json" || { echo "link_pair.sh: no embedded pair at $pair" >&2; exit 1; }
mkdir -p "$(dirname "$link")"
ln -sfn "$pair" "$link"
