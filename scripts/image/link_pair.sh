#!/usr/bin/env bash
# Gives the embedded pair the short name that the chart's CPU profile uses, and the package at PREFIX the pair: wheels leave
# it out, so it is taken from the project's folder, in which this is run.
set -euo pipefail

PREFIX="${1:?the environment}"
link="${2:?the folder to be made, /opt/outrider/pair in an image}"
source="$PWD/outrider/demo/pair"

cd /
pair="$("$PREFIX/bin/python" -c 'import importlib.resources as r; print(r.files("outrider.demo") / "pair")')"
mkdir -p "$(dirname "$link")"
if [[ -f "$pair/target/config.json" ]]; then
	ln -sfn "$pair" "$link"
else
	test -f "$source/target/config.json" || { echo "link_pair.sh: no embedded pair at $source" >&2; exit 1; }
	cp -r "$source" "$link"
	ln -sfn "$link" "$pair"
fi
