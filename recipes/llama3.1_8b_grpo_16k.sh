#!/usr/bin/env bash
# GRPO on samples of 16,384 tokens, one per micro-batch:
#   MODEL=/models/Llama-3.1-8B-Instruct DATA=train.jsonl bash recipes/llama3.1_8b_grpo_16k.sh \
#     reward.function=last_number
# Planned for 4 H200: 104 GiB of 140 on the fullest GPU; for 2 (GPUS=2): 119 GiB, and 195 GiB of
# host memory, half of it for checkpoints.
source "$(dirname "$0")/launch/local.sh"
world 1 4
train_on llama3.1-8b
settings+=(actor.layout=tp2sp data.prompts_per_iteration=8 engine.tokens_per_micro_batch=16384 reshard.mode=keep reshard.offload=none rollout.tp=$((ranks < 4 ? ranks : 4)) rollout.gpu_memory_utilization=0.31)
if [[ $ranks == 2 ]]; then settings+=(rollout.gpu_memory_utilization=0.59 reshard.offload=optimizer); fi
prompt=512
if [[ -n ${MODEL:-} ]]; then prompt=2048; else settings+=(rollout.min_tokens=$((16384 - prompt))); fi
settings+=(data.max_prompt_tokens=$prompt rollout.max_tokens=$((16384 - prompt)))
start verl_megatron.train --config-name grpo_8b "${settings[@]}" "$@"
