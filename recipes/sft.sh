#!/usr/bin/env bash
# Supervised fine-tuning: MODEL=/models/Llama-3-8B DATA=demonstrations.jsonl GPUS=2 bash recipes/sft.sh [setting=value ...]
# DATA holds one {"prompt", "response"} a line. The model is written to outputs/sft/actor.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)  # paths that you give count from where you are
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
python -m torch.distributed.run --standalone --nproc_per_node "${GPUS:-2}" -m verl_megatron.sft --config-name sft actor.path="$MODEL" data.train="$DATA" "$@"
