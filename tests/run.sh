#!/usr/bin/env bash
# Runs the tests on a machine with nothing but Python: makes its own environment on first use.
#
#   bash tests/run.sh                      everything but the slow tests
#   bash tests/run.sh -m slow              the slow ones
#   bash tests/run.sh tests/tools -k merge any of pytest's arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

make_environment
if [ $# -eq 0 ]; then
    "$VENV_PYTHON" -m ruff check .
    "$VENV_PYTHON" -m ruff format --check .
    # As many processes as cores, of one thread each: threads that wait for a core cost more than they do.
    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    set -- --numprocesses auto --maxprocesses 4 --dist loadfile
fi
exec "$VENV_PYTHON" -m pytest "$@"
