#!/usr/bin/env bash
# PPO on an 8B model. With your own folder and data:
#   MODEL=/models/Llama-3-8B-Instruct DATA=train.jsonl GPUS=4 bash recipes/llama3_8b_ppo.sh reward.function=last_number
# Without MODEL: random weights of the same shapes, prompts of 512 tokens and responses of exactly 512, for measuring.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)  # paths that you give count from where you are
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
GPUS=${GPUS:-4}
SCRATCH=${SCRATCH:-outputs/random_8b}
if [ -n "${MODEL:-}" ]; then
  settings=(actor.path="$MODEL" data.train="$DATA")
else
  [ -f "$SCRATCH/reward.py" ] || python "$ROOT/tools/make_random.py" "$SCRATCH" --shape llama3-8b
  settings=(actor.path="$SCRATCH/model" data.train="$SCRATCH/train.jsonl" reward.function="$SCRATCH/reward.py:score" run.iterations=5
    run.save_interval=0 run.export=false data.max_prompt_tokens=512 rollout.min_tokens=512 rollout.max_tokens=512 rollout.ignore_eos=true)
fi
if [ "$GPUS" = 2 ]; then  # two 8B models with their optimizers do not fit two GPUs of 141 GB: the critic is a 1B model
  [ -n "${CRITIC:-}" ] || { CRITIC=${SCRATCH}_critic/model; [ -d "$CRITIC" ] || python "$ROOT/tools/make_random.py" "${SCRATCH}_critic" --shape llama3-1b --rows 1; }
  settings+=(actor.layout=tp2sp critic.layout=tp2sp critic.path="$CRITIC" rollout.gpu_memory_utilization=0.25)
fi
python -m torch.distributed.run --standalone --nproc_per_node "$GPUS" -m verl_megatron.train --config-name llama3_8b_ppo "${settings[@]}" "$@"
