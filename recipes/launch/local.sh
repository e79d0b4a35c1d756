#!/usr/bin/env bash
# The ranks of this node by torchrun (parallel/runtime/launch.py), of all worlds of a run. Every recipe reads this file, so that these
# two are the same:
#   bash recipes/llama3_8b_ppo.sh [settings]
#   bash recipes/launch/local.sh recipes/llama3_8b_ppo.sh [settings]
# With --dry-run among the settings the command and the plan of the run are printed and nothing is started: no
# GPU, weights or data are needed. A launcher for several nodes starts the recipe on each of them with
#   NNODES, GPUS           nodes, and ranks of each of them
#   NODE_RANK              which node this is
#   MASTER_ADDR, MASTER_PORT, NODE_ADDR    where torchrun meets (node 0), and under which name others reach this node
#   VERL_MEGATRON_TOKEN    with rollout.devices: a secret text, the same on all nodes, by which they know each other
#   GRACE_S                seconds that a run has from SIGTERM to the end of its iteration: as long as the scheduler waits, and a little less
# Of a run: MODEL and CRITIC_MODEL (Hugging Face folders), DATA (a data file or folder), SCRATCH (where random
# weights go), and MAX_RESTARTS (0), how often torchrun starts the ranks again after a failure: they go on from
# the newest checkpoint.
set -euo pipefail
shopt -s inherit_errexit
LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=${LAUNCH%/recipes/launch} # of the clone; in an installed package the recipes are inside it
CLONE=
if [[ -f $ROOT/tools/install.sh ]]; then CLONE=1; fi

stop() { # text: what is wrong with the call
  echo "error: $*" >&2
  exit 2
}

# Until the ranks start, which have a trap of their own.
trap 'echo "interrupted; start it again with the same command" >&2; exit 130' INT

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  [[ -f ${1:-} ]] || stop "recipe '${1:-}' does not exist; choose one of $(cd "$ROOT" && echo recipes/*.sh)"
  exec bash "$@"
fi

VENV=${VERL_MEGATRON_VENV:-} # else the first Python that has everything
if [[ -z $VENV && -n $CLONE ]] && PYTHON=$(bash "$ROOT/tools/install.sh" find 2>/dev/null); then VENV=${PYTHON%/bin/*}; fi
: "${VENV:=${VIRTUAL_ENV:-$ROOT/.venv}}"
if [[ $(cat "$VENV/.verl_megatron" 2>/dev/null) == unfinished* ]]; then
  [[ -n ${INSTALLS:-} ]] ||
    stop "an installation into $VENV was broken off; bash tools/install.sh begins it anew"
elif [[ -x $VENV/bin/python ]]; then
  export PATH="$VENV/bin:$PATH"
fi
if [[ -n $CLONE ]]; then export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"; fi
# 1 is torchrun's default, too, but it prints eight lines about it.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Seconds from SIGTERM to SIGKILL: more than the grace in which a run saves; read from torch 2.12 on.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-40}
# NCCL. What belongs to a cluster (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...) the user sets; launchers take it
# along to all nodes (forwarded.txt). CUDA_DEVICE_MAX_CONNECTIONS=1, usual with Megatron, is not set: kernels
# of several communicators in one process could block each other.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # the reason of a failure, in the log of the rank that saw it
# 4.096 us * 2^22 = 17 s: a link that is down for a moment does not end a run
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
# PET_*: torchrun's own names, set by PyTorchJob
NNODES=${NNODES:-${PET_NNODES:-}} NODE_RANK=${NODE_RANK:-${PET_NODE_RANK:-0}} GPUS=${GPUS:-${PET_NPROC_PER_NODE:-}}
# name, lowest, highest: stops unless the variable is empty or such a number; before arithmetic, which would
# run what is inside
whole() {
  local value=${!1:-}
  [[ -z $value ]] || [[ $value =~ ^(0|[1-9][0-9]{0,5})$ && $value -ge $2 && $value -le $3 ]] ||
    stop "$1=${value:0:200} has to be a whole number from $2 to $3; set it so, or unset it"
}
whole NNODES 1 100000
whole GPUS 1 1024
whole NODE_RANK 0 99999
whole MAX_RESTARTS 0 100000
whole MASTER_PORT 1 65535
whole TORCH_ELASTIC_SHUTDOWN_TIMEOUT 0 999999
[[ ${GRACE_S:-1} =~ ^[0-9]{1,7}(\.[0-9]{1,9})?$ ]] ||
  stop "GRACE_S=${GRACE_S:0:200} must be greater than 0: seconds from SIGTERM to the end by force"
[[ ${MASTER_ADDR:-x} =~ ^[][0-9A-Za-z_.:%-]{1,253}$ ]] ||
  stop "MASTER_ADDR=${MASTER_ADDR:0:200} has to be the name or address of a host"
SCRATCH=${SCRATCH:-outputs/random}
DRY_RUN=
for argument in "$@"; do if [[ $argument == --dry-run ]]; then DRY_RUN=1; fi; done
ARGUMENTS=("$@")
settings=(run.output_dir="outputs/$(basename "$0" .sh)")

# nodes, GPUS: the usual size of the run, unless the launcher or the user gives another; `ranks` is their
# number
world() {
  : "${NNODES:=$1}" "${GPUS:=$2}"
  ((NODE_RANK < NNODES)) || stop "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES: nodes count from 0"
  [[ $NNODES == 1 || -n ${MASTER_ADDR:-}${LOCAL_RANK:-}$DRY_RUN ]] ||
    stop "a run on $NNODES nodes needs MASTER_ADDR; start it by a launcher (recipes/launch) or set NNODES=1"
  ranks=$((NNODES * GPUS))
}

# name, least, most: of a variable; bash would compute with any other text, and run what it finds there
whole_number() {
  [[ ${!1} =~ ^[0-9]{1,9}$ ]] && ((10#${!1} >= $2 && 10#${!1} <= $3)) ||
    stop "$1=${!1@Q} has to be a whole number from $2 to $3"
}

# command of a dry run: what it refuses, except for want of room on the GPU that it supposes (3)
refuse_bad_settings() {
  local text status=0
  text=$("$@" --dry-run 2>&1 >/dev/null) || status=$?
  if ((status == 0 || status == 3)); then return; fi
  # Node 0 reports what all have, and launchers end the others; what is wrong only here is reported here.
  [[ $NODE_RANK == 0 ]] || sleep 5
  (sed -nE '/^([a-z]+\.py: )?error: /,$p' <<<"$text" | grep . || echo "$text") >&2
  exit "$status"
}

# shape, options of verl_megatron.examples.random_weights: its folder with model, train.jsonl and reward.py, made if need be
random_weights() {
  local folder="$SCRATCH/$1"
  mkdir -p "$SCRATCH"
  ( # nodes and ranks that share the folder wait for the one that makes it
    flock 9
    [[ -f $folder/reward.py ]] ||
      { refuse_bad_settings bash "$0" "${ARGUMENTS[@]}" && python -m verl_megatron.examples.random_weights "$folder" --shape "$@" >&2; }
  ) 9>"$folder.lock"
  echo "$folder"
}

# shape: MODEL and DATA; else random weights of that shape, prompts of 512 tokens and responses of exactly
# 512, for measuring
train_on() {
  if [[ -n ${MODEL:-} ]]; then
    [[ -n ${DATA:-}$DRY_RUN ]] ||
      stop "DATA is not set; name the data file on which MODEL=$MODEL is trained"
    settings+=(actor.path="$MODEL" data.train="${DATA:-}") # a plan needs none
  elif [[ -n $DRY_RUN ]]; then
    settings+=(actor.path="$1")
    echo "MODEL is not set: planned for the shape $1, with samples as long as the recipe allows" >&2
  else
    local folder
    folder=$(random_weights "$1")
    settings+=(actor.path="$folder/model" data.train="$folder/train.jsonl" reward.function="$folder/reward.py:score" run.iterations=5
      run.save_interval=0 run.export=false data.max_prompt_tokens=512 rollout.min_tokens=512 rollout.max_tokens=512 rollout.ignore_eos=true)
  fi
}

model() { # folder or nothing, shape: the folder; else random weights of the shape, or in a dry run its name
  local path=${1:-${DRY_RUN:+$2}}
  if [[ -z $path ]]; then
    path=$(random_weights "$2" --rows 1)
    path+=/model
  fi
  echo "$path"
}

# shape, layout: CRITIC=70b (the usual) is as large as the actor and starts from its folder, 8b is of this
# shape; CRITIC_MODEL is the folder of either
critic_of() {
  local path=${CRITIC_MODEL:-}
  case ${CRITIC:-70b} in
    70b) ;;
    8b)
      path=$(model "$path" "$1")
      settings+=(critic.layout="$2")
      ;;
    *) stop "CRITIC=$CRITIC is not known; choose 8b or 70b" ;;
  esac
  [[ -z $path ]] || settings+=(critic.path="$path")
}

# module, arguments: the ranks of this node, until they have ended, unless a dry run refuses; with --dry-run
# their command and the run's plan
start() {
  export LAUNCH_BEGAN=${EPOCHREALTIME/,/.} # what this shell did before is no part of the run's start
  if [[ -n ${LOCAL_RANK:-} ]]; then exec python -m "$@"; fi # of a launcher that starts every rank itself
  local plan=(env WORLD_SIZE=$((NNODES * GPUS)) LOCAL_WORLD_SIZE="$GPUS" python -m "$@")
  # of a run with --role these are only one world's ranks
  if [[ " $* " == *" --role"[\ =]* ]]; then plan=(env -u WORLD_SIZE -u LOCAL_WORLD_SIZE python -m "$@"); fi
  local MAX_RESTARTS=${MAX_RESTARTS:-0} MASTER_PORT=${MASTER_PORT:-29500} name
  whole_number NODE_RANK 0 $((NNODES - 1))
  whole_number MAX_RESTARTS 0 1000000
  whole_number MASTER_PORT 1 65535
  for name in MASTER_ADDR NODE_ADDR; do
    [[ ${!name:-x} =~ ^[A-Za-z0-9][A-Za-z0-9.:%_-]*$ ]] ||
      stop "$name=${!name@Q} is no name or address of a host"
  done
  # it starts parallel.runtime.launch, once for each world of a run that has ranks here
  local launch=(python -m verl_megatron.launch.node --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" --max-restarts "$MAX_RESTARTS" --rdzv-id "${JOB_ID:-verl_megatron}")
  if [[ $NNODES == 1 ]]; then
    launch+=(--local-addr 127.0.0.1) # all of the run stays on this host's loopback
  else # nodes start again together; node 0 keeps the store where they meet, whatever names that host has
    launch+=(--rdzv-endpoint "${MASTER_ADDR:-NODE_0}:$MASTER_PORT" --rdzv-conf "is_host=$((NODE_RANK == 0))" ${NODE_ADDR:+--local-addr "$NODE_ADDR"})
  fi
  if [[ -n $DRY_RUN ]]; then
    echo "node $NODE_RANK of $NNODES: ${launch[*]} -m $*"
    exec "${plan[@]}"
  fi
  if [[ $NNODES == 1 ]]; then launch+=(--check); else refuse_bad_settings "${plan[@]}"; fi
  [[ $BASHPID == "$$" ]] || export LAUNCH_PARENT=$$ # a shell that goes on after the ranks: they end with it
  exec "${launch[@]}" -m "$@" # on SIGTERM its ranks save and exit with 0, and so does it
}
