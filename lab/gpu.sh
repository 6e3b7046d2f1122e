#!/usr/bin/env bash
# All that a machine with an NVIDIA GPU must show: bash lab/gpu.sh [--minutes=9] [--help]. See docs/gpu.md.
# PYTHON chooses the interpreter; by default that of .venv if there is one, else python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
unset PYTHONSAFEPATH  # it hides lab from python -m
exec "$PYTHON" -m lab.gpu "$@"
