#!/usr/bin/env bash
# PPO on Qwen2.5-32B, actor and critic, on 16 GPUs: MODEL=/models/Qwen2.5-32B-Instruct DATA=train.jsonl \
#   bash recipes/launch/hostfile.sh hosts.txt recipes/qwen2.5_32b_ppo.sh reward.function=last_number
source "$(dirname "$0")/launch/local.sh"
world 2 8
train_on qwen2.5-32b
start verl_megatron.train --config-name ppo_32b "${settings[@]}" "$@"
