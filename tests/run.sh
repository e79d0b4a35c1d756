#!/usr/bin/env bash
# Installs what the tests need and runs the CPU suite, quick tests first; arguments go to pytest. Tests of GPUs run where there are some.
#   bash tests/run.sh long [FOLDER]    what takes longer, about an hour, on a CPU: many kills and stops (FAULTS.md), thousands of bad inputs; FOLDER keeps their output
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=$(bash tools/install.sh dev)
export PATH="$(dirname "$PYTHON"):$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .

if [[ ${1:-} == long ]]; then
  FOLDER=${2:-$(mktemp -d)} status=0
  "$PYTHON" -m pytest -ra -m long tests/distributed tests/end_to_end || status=$?
  "$PYTHON" -m tests.end_to_end.kill_worker "$FOLDER/forked" --moments 60 --settings run.async_save=true || status=$?
  "$PYTHON" -m tests.end_to_end.signals_worker "$FOLDER/signals" --kills 50 --stops 12 || status=$?
  for seed in 1 2 3; do "$PYTHON" -m tests.fuzz --seed "$seed" --cases 1000 || status=$?; done
  if ((!status && $# < 2)); then rm -rf "$FOLDER"; else echo "output is in $FOLDER"; fi
  exit "$status"
fi

run() { # pytest's arguments; whatever fails, the other suites run too
  local code=0
  "$PYTHON" -m pytest -ra --durations=10 -m "not long" "$@" || code=$?
  ((code == 5)) || any=1 # 5: none of the tests asked for is in these suites
  ((code == 0 || code == 5)) || status=$code
}

status=0 any=0
if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  echo "this machine has GPUs: their tests run, and the CPU's worlds of ranks, which need vLLM's CPU build, are left out"
  run tests/unit tests/architecture tests/gpu "$@"
else
  run -n auto tests/unit tests/architecture "$@" # side by side; the other tests start several processes each
  run tests/distributed tests/parity tests/end_to_end tests/gpu "$@"
fi
((any)) || status=5
exit "$status"
