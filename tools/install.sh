#!/usr/bin/env bash
# Makes or finds a Python with all that the program needs, and prints its path (all else goes to stderr).
#
#   PYTHON=$(bash tools/install.sh)        to train
#   PYTHON=$(bash tools/install.sh dev)    to run the tests as well
#
# Which one: $VERL_MEGATRON_VENV if set, else the active virtual environment, else .venv here, else a python3 that has
# everything already, else a new .venv. What is complete is left alone, so a machine without a package index works if
# its packages are in place.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PURPOSE=${1:-run}

say() { echo "install: $*" >&2; }

is_complete() { # python: every package can be found and the versions go together; nothing heavy is imported
  PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$1" - "$PURPOSE" >/dev/null 2>&1 <<'PYTHON'
import importlib.util, sys
names = "torch megatron.core vllm transformers hydra omegaconf safetensors sentencepiece matplotlib tensorboard tqdm jinja2 numpy"
names += " pytest" if sys.argv[1] == "dev" else ""
assert all(importlib.util.find_spec(name) for name in names.split())
from verl_megatron.versions import check_versions
check_versions()
PYTHON
}

step() { # text, command: run it, say how long it took; on failure show the end of the log
  local text=$1 started=$SECONDS
  shift
  say "$text ..."
  if ! "$@" >>"$LOG" 2>&1; then
    tail -n 15 "$LOG" >&2
    say "$text failed; the whole log is $LOG"
    exit 1
  fi
  say "$text took $((SECONDS - started)) s"
}

find_base_python() { # the interpreter a new environment is made of
  local name
  for name in python3 python3.11 python3.12; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'; then
      command -v "$name"
      return
    fi
  done
  say "Python 3.11 or 3.12 is needed and none was found; install one"
  exit 1
}

install_torch_for_cpu() { # the CPU build where an index has it, so that no CUDA libraries are downloaded
  pip_install torch==2.13.0+cpu || pip_install torch==2.13.0
}

pip_install() { "$PYTHON" -m pip install --disable-pip-version-check --no-input "$@"; }

install_all() {
  local extras=$1 torch
  [[ $PURPOSE == dev ]] && extras+=,dev
  if [[ $extras == cpu* ]]; then
    step "torch for CPU" install_torch_for_cpu
    step "the package with vLLM and Megatron-Core" pip_install -e "$ROOT[$extras]"
    # vLLM's CPU build asks for them, but their CUDA builds break its imports.
    step "removing packages that need CUDA" "$PYTHON" -m pip uninstall -y torchvision torchaudio torchcodec triton
  else
    torch=$("$PYTHON" -c 'import torch; print(torch.__version__ if torch.version.cuda else "")' 2>/dev/null || true)
    echo "torch==${torch:-2.11.0}" >"$VENV/torch.txt" # an installed torch for CUDA stays; vLLM's version follows it
    step "the package with vLLM and Megatron-Core for GPUs" pip_install -e "$ROOT[$extras]" -c "$VENV/torch.txt"
  fi
}

DEVICE=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then DEVICE=gpu; fi
VENV=${VERL_MEGATRON_VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}
PYTHON=$VENV/bin/python
if [[ ! -x $PYTHON && -z ${VERL_MEGATRON_VENV:-} ]] && command -v python3 >/dev/null && is_complete python3; then
  say "using $(command -v python3), which has everything"
  command -v python3
  exit
fi

STAMP=$VENV/.verl_megatron # what was installed here, and for what; absent in an environment that something else made
HASH=$(cat "$ROOT/setup.py" "$ROOT/tools/install.sh" | sha256sum | cut -d ' ' -f 1)
DONE=$(cat "$STAMP" 2>/dev/null || true)
if [[ -x $PYTHON ]] && { [[ $DONE == "$HASH $PURPOSE" || $DONE == "$HASH dev" ]] || { [[ -z $DONE ]] && is_complete "$PYTHON"; }; }; then
  say "using $VENV, which has everything"
else
  started=$SECONDS
  if [[ ! -x $PYTHON ]]; then
    BASE=$(find_base_python)
    mkdir -p "$VENV"
    LOG=$VENV/install.log
    options=()
    if [[ $DEVICE == gpu ]] && "$BASE" -c 'import torch, sys; sys.exit(not torch.version.cuda)' 2>/dev/null; then options=(--system-site-packages); fi
    step "making $VENV with $("$BASE" -V)" "$BASE" -m venv "${options[@]}" "$VENV"
  fi
  LOG=$VENV/install.log
  say "installing for $DEVICE into $VENV: once, a few minutes and gigabytes; the log is $LOG"
  echo "unfinished" >"$STAMP"
  install_all "$DEVICE"
  if ! is_complete "$PYTHON"; then
    say "packages are missing or do not go together after the installation; the log is $LOG"
    exit 1
  fi
  echo "$HASH $PURPOSE" >"$STAMP"
  say "done in $((SECONDS - started)) s"
fi
echo "$PYTHON"
