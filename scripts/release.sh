#!/usr/bin/env bash
# Builds a release into dist/ (or $1): the wheel, the sdist with tests and docs, the embedded pair's wheel, the chart's
# package, SHA256SUMS, and where Docker is the images, labelled with version and commit.
#   PYTHON    the interpreter that builds; without setuptools 77 it is only used to make an environment with them
#   IMAGES=   (empty) no images, even where Docker is
set -euo pipefail
cd "$(dirname "$0")/.."

dist="$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)"
PYTHON="$(realpath -s "$(command -v "${PYTHON:-python3}")")"
version="$("$PYTHON" -c 'import re; print(re.search(r"__version__ = \"(.*)\"", open("outrider/__init__.py").read())[1])')"
commit="$(git rev-parse HEAD 2>/dev/null || echo unknown)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

say() { echo "== $*"; }

say "outrider $version at $commit"
if ! "$PYTHON" -c 'import setuptools; assert int(setuptools.__version__.partition(".")[0]) >= 77' 2>/dev/null; then
	"$PYTHON" -m venv "$work/env"
	PYTHON="$work/env/bin/python"
	"$PYTHON" -m pip install --disable-pip-version-check --quiet 'setuptools>=77'
fi
build() { # KIND FOLDER
	(cd "$2" && "$PYTHON" -c "from setuptools import build_meta; build_meta.build_$1('$dist')") >"$work/build.log" 2>&1 ||
		{ tail -30 "$work/build.log"; exit 1; }
}
# From a copy: a build leaves nothing in the project's folder, and takes only what git knows.
mkdir "$work/source" "$work/pair"
if git rev-parse --git-dir >/dev/null 2>&1; then
	git archive --format=tar HEAD | tar -xf - -C "$work/source"
else
	cp -r . "$work/source"
fi

say "wheel and sdist"
build sdist "$work/source"
# From the sdist, which so is shown to be whole.
tar -xzf "$dist/outrider-$version.tar.gz" -C "$work"
build wheel "$work/outrider-$version"

say "the embedded pair"
mkdir -p "$work/pair/outrider/demo"
cp -r "$work/source/outrider/demo/pair" "$work/pair/outrider/demo/pair"
cp "$work/source/LICENSE" "$work/pair/LICENSE"
cat >"$work/pair/pyproject.toml" <<TOML
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "outrider-demo-pair"
version = "$version"
description = "The pair of small models that outrider demo runs."
requires-python = ">=3.11"
license = "Apache-2.0"
dependencies = ["outrider==$version"]

[tool.setuptools]
packages = ["outrider.demo.pair"]

[tool.setuptools.package-data]
"outrider.demo.pair" = ["**/*"]
TOML
build wheel "$work/pair"

say "chart"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$work/source/k8s" -cf - outrider | gzip -n >"$dist/outrider-chart-$version.tgz"

if [[ -n "${IMAGES-if there is Docker}" ]] && docker info >/dev/null 2>&1; then
	for variant in coordinator cpu cuda; do
		say "image outrider:$version-$variant"
		docker build --target "$variant" \
			--label org.opencontainers.image.version="$version" --label org.opencontainers.image.revision="$commit" \
			-t "outrider:$version-$variant" "$work/source"
	done
else
	say "images are not built: there is no Docker engine, or IMAGES is empty"
fi

(cd "$dist" && sha256sum ./*"$version"* >SHA256SUMS)
ls -l "$dist"
