#!/usr/bin/env bash
# Installs what the tests need, then runs lint, the type checker and the CPU suite, quick tests first.
# On a machine with GPUs it runs the tests of GPUs.
#
#   bash tests/run.sh                  everything
#   bash tests/run.sh -k NAME          lint and some tests: arguments go to pytest
#   bash tests/run.sh pictures         the pictures of the report and of the doctor in docs
#   bash tests/run.sh long [FOLDER]    an hour of kills, stops (FAULTS.md), bad inputs and layouts on a CPU;
#                                      FOLDER keeps their output
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=$(bash tools/install.sh dev)
export PATH="$(dirname "$PYTHON"):$PATH" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 HF_HUB_OFFLINE=1

if [[ ${1:-} == pictures ]]; then
  PICTURES=docs exec "$PYTHON" -m pytest -q -k test_the_picture_of_the_documents tests/unit
fi

has_gpus() { nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
# Types are checked against the pinned packages of the CPU installation.
if (($# == 0)) && ! has_gpus; then "$PYTHON" -m basedpyright --pythonpath "$PYTHON"; fi

if [[ ${1:-} == long ]]; then
  FOLDER=${2:-$(mktemp -d)} status=0
  # Of their own: what ranks of the first leave in shared memory is there until it ends.
  for suite in tests/distributed tests/end_to_end; do "$PYTHON" -m pytest -ra -m long "$suite" || status=$?; done
  EVERY_LAYOUT=1 "$PYTHON" -m pytest -ra tests/parity || status=$?
  "$PYTHON" -m tests.end_to_end.kill_worker "$FOLDER/forked" --moments 60 \
    --settings run.async_save=true || status=$?
  "$PYTHON" -m tests.end_to_end.signals_worker "$FOLDER/signals" --kills 50 --stops 12 || status=$?
  for seed in 1 2 3; do "$PYTHON" -m tests.fuzz --seed "$seed" --cases 1000 || status=$?; done
  if ((!status && $# < 2)); then rm -rf "$FOLDER"; else echo "output is in $FOLDER"; fi
  exit "$status"
fi

# The report is opened in a browser. Debian's chromium is installed where that is allowed.
has_browser() { command -v chromium >/dev/null && command -v chromedriver >/dev/null; }
install_browser() {
  local quick=(-qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20)
  [[ $EUID == 0 ]] && grep -qs '^ID=debian' /etc/os-release &&
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get "${quick[@]}" update >/dev/null 2>&1 &&
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get "${quick[@]}" install -y chromium chromium-driver >/dev/null 2>&1
}
if (($# == 0)) && ! has_browser && ! install_browser; then
  echo "no chromium, and it cannot be installed here (that takes root, Debian and a package index):" \
    "tests of the report in a browser are skipped"
fi

run() { # pytest's arguments; the other suites run whatever fails
  local code=0
  "$PYTHON" -m pytest -ra --durations=10 -m "not long" "$@" || code=$?
  ((code == 5)) || any=1 # 5: none of the tests asked for is in these suites
  ((code == 0 || code == 5)) || status=$code
}

status=0 any=0
if has_gpus; then
  echo "this machine has GPUs: worlds of ranks on the CPU, which need vLLM's CPU build, are left out"
  run tests/unit tests/architecture tests/gpu "$@"
else
  run -n auto tests/unit tests/architecture "$@" # side by side; the other tests start several processes each
  run -n 2 --dist loadfile tests/distributed tests/parity "$@" # of few processes, which often wait for each other
  run -n 2 --dist loadfile tests/end_to_end tests/gpu "$@" # tests of a file share runs
fi
((any)) || status=5
exit "$status"
