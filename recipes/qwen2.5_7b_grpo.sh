#!/usr/bin/env bash
# GRPO on Qwen2.5-7B:
#   MODEL=/models/Qwen2.5-7B-Instruct DATA=train.jsonl bash recipes/qwen2.5_7b_grpo.sh reward.function=last_number
source "$(dirname "$0")/launch/local.sh"
world 1 4
train_on qwen2.5-7b
start verl_megatron.train --config-name grpo_8b "${settings[@]}" "$@"
