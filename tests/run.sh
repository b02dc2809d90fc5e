#!/usr/bin/env bash
# bash tests/run.sh [any pytest argument]: set up and run the tests, all of them without an argument.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."

# The tests simulate their devices: an accelerator stays free for whoever trains on it, and its packages uninstalled.
export VENV=${VENV:-.venv} JAX_PLATFORMS=cpu
bash setup_tpu.sh test
# three at a time even on two cores, since tests of several hosts mostly wait
exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
