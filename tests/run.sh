#!/usr/bin/env bash
# Installs what the tests need and runs the CPU suite, quick tests first; arguments go to pytest. Tests of GPUs run where there are some.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=$(bash tools/install.sh dev)
export PATH="$(dirname "$PYTHON"):$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1

if "$PYTHON" -m ruff --version >/dev/null 2>&1; then "$PYTHON" -m ruff check .; else echo "ruff is not installed: lint is left out"; fi
suites=() wanted="unit architecture distributed parity end_to_end gpu"
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  wanted="unit architecture gpu"
  echo "this machine has GPUs: their tests run, and the CPU's worlds of ranks, which need vLLM's CPU build, are left out"
fi
for suite in $wanted; do
  if compgen -G "tests/$suite/test_*.py" >/dev/null; then suites+=("tests/$suite"); fi
done
exec "$PYTHON" -m pytest -ra --durations=10 "${suites[@]}" "$@"
