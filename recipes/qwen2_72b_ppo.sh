#!/usr/bin/env bash
# PPO on Qwen2-72B (or Qwen2.5-72B, of the same shapes) with a critic of 72 B or, with CRITIC=8b, of 7 B
# parameters, on 32 or 64 GPUs:
#   MODEL=/models/Qwen2-72B-Instruct DATA=train.jsonl sbatch --nodes 8 recipes/launch/slurm.sbatch recipes/qwen2_72b_ppo.sh \
#     reward.path=/models/reward reward.function=
source "$(dirname "$0")/launch/local.sh"
world 4 8
train_on qwen2.5-72b
critic_of qwen2.5-7b tp4sp
start verl_megatron.train --config-name ppo_70b "${settings[@]}" "$@"
