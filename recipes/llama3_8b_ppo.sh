#!/usr/bin/env bash
# PPO on an 8B model. With your own folder and data:
#   MODEL=/models/Llama-3-8B-Instruct DATA=train.jsonl GPUS=4 bash recipes/llama3_8b_ppo.sh reward.function=last_number
# Without MODEL: random weights of the same shapes, prompts of 512 tokens and responses of exactly 512, for
# measuring.
source "$(dirname "$0")/launch/local.sh"
world 1 4
train_on llama3-8b
# Two 8B models with optimizers take turns on two GPUs of 141 GB. Host memory: 360 GiB, half of it for checkpoints
if [[ $ranks == 2 ]]; then
  settings+=(rollout.tp=2 rollout.gpu_memory_utilization=0.25 reshard.offload=all)
fi
if [[ -n ${CRITIC_MODEL:-} ]]; then settings+=(critic.path="$CRITIC_MODEL"); fi
start verl_megatron.train --config-name llama3_8b_ppo "${settings[@]}" "$@"
