#!/usr/bin/env bash
# What only a machine with GPUs shows, by hand: correctness first, then figures; a table of what passed comes last.
#   bash tests/gpu/check.sh [stage ...]
# Stages: tests toy resume save ppo handover reshard engine rollout kernels machine (all, in this order, where none is named); those with too few GPUs are left out.
# Environment: LOGS (outputs/gpu), LIMIT_S (240) seconds that a command may take.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1
LOGS=${LOGS:-outputs/gpu} LIMIT_S=${LIMIT_S:-240}
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') # without any, the ranks are the CPU's: to try this script
RANKS=$((GPUS >= 4 ? 4 : GPUS >= 2 ? 2 : 1))
mkdir -p "$LOGS"
table=()

step() { # name, command: run within the limit, log to LOGS/name.log
  local begin=$SECONDS status=0
  timeout "$LIMIT_S" "${@:2}" >"$LOGS/$1.log" 2>&1 || status=$?
  table+=("$(printf '%-28s %-8s %4d s' "$1" "$([[ $status == 0 ]] && echo passed || echo "code $status")" $((SECONDS - begin)))")
  echo "== ${table[-1]}"
  grep -v -i -E 'warn|deprecat|\*\*\*\*|^$|Capturing|Loading|registered' "$LOGS/$1.log" | tail -"${LINES_SHOWN:-14}" | cut -c1-260
}

world() { python -m torch.distributed.run --standalone --nproc-per-node "$@"; }
export -f world

case $RANKS in
  1) layout="actor.layout=tp1 critic.layout=tp1 rollout.tp=1" ;;
  2) layout="actor.layout=tp2 critic.layout=pp2 rollout.tp=2" ;;
  4) layout="actor.layout=tp2pp2 critic.layout=pp2 rollout.tp=2" ;;
esac

toy() { # folder of the run, settings
  [[ -f $LOGS/toy/train.jsonl ]] || python tools/make_toy.py "$LOGS/toy" >/dev/null
  local job="data.train=$LOGS/toy/train.jsonl data.validation=$LOGS/toy/val.jsonl data.validation_rows=32 actor.path=$LOGS/toy/model rollout.enforce_eager=true"
  world "$RANKS" -m verl_megatron.train --config-name ppo_toy_cpu $job $layout rollout.gpu_memory_utilization=0.1 reshard.verify=all run.output_dir="$LOGS/$1" "${@:2}"
}
export -f toy
export LOGS RANKS layout

stage_tests() { LIMIT_S=$((2 * LIMIT_S)) step tests python -m pytest -q -p no:cacheprovider tests/gpu; }

stage_toy() {
  for mode in keep share swap; do
    for offload in none all; do
      LINES_SHOWN=3 step "toy_${mode}_$offload" bash -c "toy toy_${mode}_$offload run.iterations=3 run.export=false reshard.mode=$mode reshard.offload=$offload"
    done
  done
}

stage_resume() { # saved beside training, with everything away from the GPU; the iteration after the checkpoint is repeated and compared
  local common="reshard.mode=swap reshard.offload=all run.export=false run.save_interval=2 run.async_save=true"
  step resume_first bash -c "toy resume $common run.iterations=3"
  rm -rf "$LOGS/resume/checkpoint/step_3"
  step resume_again bash -c "toy resume $common run.iterations=4 --verify"
}

recipe_8b() { GPUS=$RANKS SCRATCH=$LOGS/random bash recipes/llama3_8b_ppo.sh rollout.enforce_eager=true run.output_dir="$LOGS/$1" "${@:2}"; }
export -f recipe_8b

stage_save() { # what a checkpoint of 8B models keeps training from (time/save_s), written at once and beside it
  ((RANKS >= 4)) || return 0
  local common="run.iterations=3 run.save_interval=1 run.keep_last_k=1 rollout.max_tokens=64 rollout.min_tokens=64"
  step save_at_once bash -c "recipe_8b save_at_once $common"
  rm -rf "$LOGS/save_at_once/checkpoint"
  step save_beside bash -c "recipe_8b save_beside $common run.async_save=true"
  rm -rf "$LOGS/save_beside/checkpoint"
}

stage_ppo() {
  ((RANKS >= 2)) || return 0
  step ppo_keep bash -c "recipe_8b ppo_keep reshard.mode=keep"
  step ppo_share bash -c "recipe_8b ppo_share reshard.mode=share"
  step ppo_swap_all bash -c "recipe_8b ppo_swap_all reshard.mode=swap reshard.offload=all"
}

stage_handover() {
  ((RANKS >= 2)) || return 0
  local small="--shape llama3-8b --train tp2 --rollout 2 --optimizer --utilization 0.3 --eager"
  step handover_share env CUDA_VISIBLE_DEVICES=0,1 bash -c "world 2 tools/bench_handover.py $small --mode share"
  step handover_swap_all env CUDA_VISIBLE_DEVICES=0,1 bash -c "world 2 tools/bench_handover.py $small --mode swap --offload all"
}

stage_reshard() {
  ((RANKS >= 4)) || return 0
  for pair in "pp4 tp4" "tp4 tp2"; do
    step "reshard_${pair/ /_}" bash -c "world 4 tools/bench_reshard.py --shape llama3-8b --no-megatron --gather-mib 256 --train ${pair% *} --rollout ${pair#* }"
  done
  step reshard_70b bash -c "world 4 tools/bench_reshard.py --shape llama3-70b --no-megatron --gather-mib 256 --train tp2pp2 --rollout tp4 --modes keep swap"
}

stage_engine() { # updates and log-probs of an 8B model alone; profiles are in the logs
  local size="--shape llama3-8b --rows 16 --prompt 512 --response 512 --repetitions 3"
  if ((RANKS == 1)); then
    step engine_1b bash -c "world 1 tools/bench_engine.py ${size/8b/1b} --baseline --profile"
    return
  fi
  step engine_dp bash -c "world $RANKS tools/bench_engine.py $size --layout tp1 --baseline --set tokens_per_micro_batch=4096"
  step engine_tp2 bash -c "world $RANKS tools/bench_engine.py $size --layout tp2sp --baseline --profile"
  step engine_dp_fp8 bash -c "world $RANKS tools/bench_engine.py $size --layout tp1 --set tokens_per_micro_batch=4096 dtype=fp8"
  step engine_tp2_fp8 bash -c "world $RANKS tools/bench_engine.py $size --layout tp2sp --set dtype=fp8"
}

stage_rollout() { # as a run does it beside a bare vLLM
  local tp=$((RANKS >= 2 ? 2 : 1))
  step rollout bash -c "world $RANKS tools/bench_rollout.py --shape llama3-8b --tp $tp --rows $((128 * RANKS)) --prompt 512 --response 512"
  step rollout_mixed bash -c "world $RANKS tools/bench_rollout.py --shape llama3-8b --tp 1 --rows $((128 * RANKS)) --prompt 512 --response 512 --mixed"
}

stage_kernels() { # those of log-probs in other block sizes, beside the floor
  LINES_SHOWN=40 step kernels python tests/gpu/log_probs_check.py
}

stage_machine() { LINES_SHOWN=40 step machine bash -c "world $RANKS tools/calibrate.py $LOGS/machine.json && cat $LOGS/machine.json"; }

(($#)) || set -- tests toy resume save ppo handover reshard engine rollout kernels machine
for stage in "$@"; do "stage_$stage"; done
printf '\n%s\n' "$GPUS GPUs, $RANKS ranks; logs in $LOGS"
printf '%s\n' "${table[@]}"
! printf '%s\n' "${table[@]}" | grep -q ' code '
