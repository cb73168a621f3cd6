#!/usr/bin/env bash
# Triton compiles a launcher for each kernel with a C compiler when it first runs. Needs root; for Debian's images.
set -euo pipefail

apt-get update -qq
apt-get install -y -qq --no-install-recommends gcc libc6-dev
rm -rf /var/lib/apt/lists/*
