#!/usr/bin/env bash
# Copies what was added to the image's folder FROM after its dependencies to the folder TO, by the same paths: in an image
# that is a layer of its own, small beside torch's, and the only one that a change of sources makes anew.
set -euo pipefail

from="${1:?the folder with the environment in env}"
to="${2:?the folder to be made}"
mkdir -p "$to"
to="$(cd "$to" && pwd)"
cd "$from"
# By the time of change of the content: a layer that comes from a cache keeps it.
find . ! -type d -newer env/.dependencies -print0 | xargs -0 --no-run-if-empty cp --archive --parents --target-directory "$to"
