#!/usr/bin/env bash
# Supervised fine-tuning:
#   MODEL=/models/Llama-3-8B DATA=demonstrations.jsonl GPUS=2 bash recipes/sft.sh [setting=value ...]
# DATA has rows of {"prompt", "response"}. The model is written to outputs/sft/actor.
source "$(dirname "$0")/launch/local.sh"
world 1 2
[[ -n ${MODEL:-}$DRY_RUN ]] ||
  stop "MODEL has to name a Hugging Face folder, and DATA a file of demonstrations"
train_on llama3-8b
start verl_megatron.sft --config-name sft "${settings[@]}" "$@"
