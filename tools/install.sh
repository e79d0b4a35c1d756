#!/usr/bin/env bash
# Makes or finds a Python with all that the program needs, and prints its path (all else goes to stderr).
#
#   PYTHON=$(bash tools/install.sh)        to train
#   PYTHON=$(bash tools/install.sh dev)    to run the tests as well
#   PYTHON=$(bash tools/install.sh find)   to train, only if it is there already
#
# Which one: $VERL_MEGATRON_VENV if set, and nothing else; else the first that has everything of the active
# virtual environment, .venv here and python3; else the active virtual environment is completed, or .venv
# made. What is complete is left alone, so a machine without a package index works if its packages are in
# place. An installation that was broken off is begun anew by the next command, and two at a time wait for
# each other.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PURPOSE=${1:-run}

say() { echo "install: $*" >&2; }

fail() { # text: what is wrong, and what to do
  say "$*"
  exit 1
}

is_complete() { # python: no installation into it was broken off, or was for less, and it has everything
  local installed
  installed=$(cat "${1%/bin/python}/.verl_megatron" 2>/dev/null || true)
  [[ -z $installed || $installed == *" dev" || ($installed == *" run" && $PURPOSE != dev) ]] && has_everything "$1"
}

# python: every package can be found and the versions go together; nothing heavy is imported
has_everything() {
  PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$1" - "$PURPOSE" >/dev/null 2>&1 <<'PYTHON'
import importlib.util, sys
names = "torch megatron.core vllm transformers hydra omegaconf safetensors sentencepiece matplotlib tensorboard tqdm jinja2 numpy"
names += " pytest ruff basedpyright" if sys.argv[1] == "dev" else ""
assert all(importlib.util.find_spec(name) for name in names.split())
from verl_megatron.checks.versions import check_versions
check_versions()
PYTHON
}

step() { # text, command: run it, say how long it took; on failure show the end of the log
  local text=$1 started=$SECONDS
  shift
  say "$text ..."
  if ! "$@" >>"$LOG" 2>&1; then
    (($(df -Pk "$VENV" | awk 'NR == 2 { print $4 }') > 1024)) ||
      fail "$text failed: no room is left for $VENV; make some and start this again"
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
  fail "Python 3.11 or 3.12 is needed and none was found; install one"
}

install_torch_for_cpu() { # the CPU build where an index has it, so that no CUDA libraries are downloaded
  pip_install torch==2.13.0+cpu || pip_install torch==2.13.0
}

pip_install() { "$PYTHON" -m pip install --disable-pip-version-check --no-input "$@"; }

install_package() { # pip's arguments: by uv where it is there, which is quicker
  if command -v uv >/dev/null && uv pip install --python "$PYTHON" "$@"; then return; fi
  pip_install "$@"
}

install_locked() { # pip's arguments: the versions that were tested, or newer ones where an index lacks one of them
  install_package "$@" -c "$ROOT/tools/locked-cpu.txt" || install_package "$@"
}

install_all() {
  local extras=$1 torch
  [[ $PURPOSE == dev ]] && extras+=,dev
  if [[ $extras == cpu* ]]; then
    step "torch for CPU" install_torch_for_cpu
    step "the package with vLLM and Megatron-Core" install_locked -e "$ROOT[$extras]"
    # vLLM's CPU build asks for them, but their CUDA builds break its imports.
    step "removing packages that need CUDA" "$PYTHON" -m pip uninstall -y torchvision torchaudio torchcodec triton
  else
    torch=$("$PYTHON" -c 'import torch; print(torch.__version__ if torch.version.cuda else "")' 2>/dev/null || true)
    # An installed torch for CUDA stays; vLLM's version follows it
    echo "torch==${torch:-2.11.0}" >"$VENV/torch.txt"
    step "the package with vLLM and Megatron-Core for GPUs" install_package -e "$ROOT[$extras]" -c "$VENV/torch.txt"
  fi
}

choose() { # prints the first Python that has everything
  local candidate
  for candidate in "$@"; do
    if command -v "$candidate" >/dev/null && is_complete "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

found() { # python: say so and end
  say "using $1, which has everything"
  echo "$1"
  exit 0
}

make_environment() { # the lock is held: $VENV from nothing, or what is missing in it
  local base options=()
  if [[ $(cat "$STAMP" 2>/dev/null) == "unfinished $VENV" ]]; then
    say "an installation into $VENV was broken off; it is begun anew"
    rm -rf "$VENV" || fail "$VENV was left half-made and cannot be removed; remove it, or name another folder in VERL_MEGATRON_VENV"
  fi
  mkdir -p "$VENV" 2>/dev/null && touch "$VENV/install.log" 2>/dev/null || fail "$VENV cannot be written; name a folder that can be in VERL_MEGATRON_VENV"
  LOG=$VENV/install.log
  if [[ ! -x $PYTHON ]]; then
    [[ -z $(find "$VENV" -mindepth 1 ! -name install.log -print -quit) ]] ||
      fail "$VENV is no virtual environment and not empty; name a new folder in VERL_MEGATRON_VENV"
    base=$(find_base_python)
    unfinished "$VENV"
    if [[ $DEVICE == gpu ]] && "$base" -c 'import torch, sys; sys.exit(not torch.version.cuda)' 2>/dev/null; then options=(--system-site-packages); fi
    step "making $VENV with $("$base" -V)" "$base" -m venv "${options[@]}" "$VENV"
  else # of another release, or the user's, which is not removed
    unfinished packages
  fi
  say "installing for $DEVICE into $VENV: once, a few minutes and gigabytes; the log is $LOG"
  install_all "$DEVICE"
}

unfinished() { # what of: until everything is in place, so that nobody takes what is there for an environment
  echo "unfinished $1" 2>/dev/null >"$STAMP" || fail "$VENV cannot be written (is the disk full?); make room, or name another folder in VERL_MEGATRON_VENV"
}

DEVICE=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then DEVICE=gpu; fi
VENV=${VERL_MEGATRON_VENV:-${VIRTUAL_ENV:-$ROOT/.venv}}
# What was installed here, and whether it came to its end; an environment that something else made has none
PYTHON=$VENV/bin/python STAMP=$VENV/.verl_megatron
if [[ -n ${VERL_MEGATRON_VENV:-} ]]; then candidates=("$PYTHON"); else candidates=(${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} "$ROOT/.venv/bin/python" python3); fi
if CHOSEN=$(choose "${candidates[@]}"); then found "$CHOSEN"; fi
[[ $PURPOSE != find ]] || exit 1

mkdir -p "$(dirname "$VENV")" 2>/dev/null || fail "$(dirname "$VENV") cannot be made; name another folder in VERL_MEGATRON_VENV"
exec 8<"$(dirname "$VENV")" # locked until pip has ended, too, which may outlive this script
if ! flock -n 8; then
  say "another command installs into $VENV; waiting for it"
  flock 8 || true # where folders cannot be locked
fi
if CHOSEN=$(choose "$PYTHON"); then found "$CHOSEN"; fi
started=$SECONDS
make_environment
has_everything "$PYTHON" || fail "packages are missing or do not go together after the installation; the log is $LOG"
echo "complete $PURPOSE" >"$STAMP" || fail "$VENV cannot be written (is the disk full?); make room and start this again"
say "done in $((SECONDS - started)) s"
echo "$PYTHON"
