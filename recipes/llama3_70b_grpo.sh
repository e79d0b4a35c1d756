#!/usr/bin/env bash
# GRPO on Llama-3-70B on 32 or 64 GPUs:
#   MODEL=/models/Llama-3-70B-Instruct DATA=train.jsonl bash recipes/launch/hostfile.sh hosts.txt recipes/llama3_70b_grpo.sh \
#     reward.function=last_number
source "$(dirname "$0")/launch/local.sh"
world 4 8
train_on llama3-70b
start verl_megatron.train --config-name grpo_70b "${settings[@]}" "$@"
