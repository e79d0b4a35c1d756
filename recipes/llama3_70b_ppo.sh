#!/usr/bin/env bash
# PPO on Llama-3-70B with a critic of 70 B or, with CRITIC=8b, of 8 B parameters, on 32 or 64 GPUs:
#   MODEL=/models/Llama-3-70B-Instruct DATA=train.jsonl bash recipes/launch/hostfile.sh hosts.txt recipes/llama3_70b_ppo.sh \
#     reward.path=/models/reward reward.function=
source "$(dirname "$0")/launch/local.sh"
world 4 8
train_on llama3-70b
critic_of llama3-8b tp8sp
start verl_megatron.train --config-name ppo_70b "${settings[@]}" "$@"
