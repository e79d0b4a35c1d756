#!/usr/bin/env bash
# GRPO on Llama-3-8B:
#   MODEL=/models/Llama-3-8B-Instruct DATA=train.jsonl bash recipes/llama3_8b_grpo.sh reward.function=last_number
# With layers, KV cache and vLLM's weights in fp8, 256 samples of 512 + 512 tokens take 13.3 s on two H200
# instead of 17.5:
#   GPUS=2 MODEL=... DATA=... bash recipes/llama3_8b_grpo.sh actor.layout=tp2sp engine.dtype=fp8 \
#     rollout.kv_cache_dtype=fp8 rollout.weight_dtype=fp8 engine.tokens_per_micro_batch=20480 \
#     reshard.mode=keep reshard.offload=none
source "$(dirname "$0")/launch/local.sh"
world 1 4
train_on llama3-8b
start verl_megatron.train --config-name grpo_8b "${settings[@]}" "$@"
