#!/usr/bin/env bash
# Random steps under compute-sanitizer: no kernel may touch memory that is not its own. Needs an NVIDIA GPU and CUDA's
# tools. Usage: scripts/sanitize.sh [STEPS]
set -euo pipefail
cd "$(dirname "$0")/.."
exec compute-sanitizer --tool memcheck --error-exitcode 1 "${PYTHON:-python}" -m tests.random_steps --device cuda --num-steps "${1:-1000}"
