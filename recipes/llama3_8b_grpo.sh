#!/usr/bin/env bash
# GRPO on Llama-3-8B:
#   MODEL=/models/Llama-3-8B-Instruct DATA=train.jsonl bash recipes/llama3_8b_grpo.sh reward.function=last_number
source "$(dirname "$0")/launch/local.sh"
world 1 4
train_on llama3-8b
start verl_megatron.train --config-name grpo_8b "${settings[@]}" "$@"
