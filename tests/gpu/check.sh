#!/usr/bin/env bash
# What only a machine with GPUs shows, by hand: correctness first, then figures; a table of what passed comes
# last.
#   bash tests/gpu/check.sh [stage ...]
# Stages (all, in this order, where none is named): tests toy resume ppo ppo_long grpo verl separate full passes
# long wide whole fp8 save offload weight_sync reshard engine rollout scaling kernels machine. Those with too few
# GPUs are left out; with two, models and batches are smaller than with four. Environment: LOGS (outputs/gpu),
# LIMIT_S (240) seconds that a command may take, SCRATCH (outputs/random) for random weights, ONLY (all) a regular
# expression of the commands of these stages that are wanted, by the names of their logs, VERL_PYTHON.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1
LOGS=${LOGS:-outputs/gpu} LIMIT_S=${LIMIT_S:-240} SCRATCH=${SCRATCH:-outputs/random}
GPUS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') # without any, the ranks are the CPU's: to try this script
if [[ $GPUS != 0 && -v CUDA_VISIBLE_DEVICES ]]; then GPUS=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .); fi
RANKS=$((GPUS >= 4 ? 4 : GPUS >= 2 ? 2 : 1))
mkdir -p "$LOGS"
table=()

step() { # name, command: run within the limit, log to LOGS/name.log
  [[ $1 =~ ${ONLY:-.} ]] || return 0
  local begin=$SECONDS status=0
  timeout "$LIMIT_S" "${@:2}" 2>&1 | while IFS= read -r line; do printf '%4d s  %s\n' $((SECONDS - begin)) "$line"; done >"$LOGS/$1.log" || status=$?
  table+=("$(printf '%-28s %-8s %4d s' "$1" "$([[ $status == 0 ]] && echo passed || echo "code $status")" $((SECONDS - begin)))")
  echo "== ${table[-1]}"
  grep -v -i -E 'warn|deprecat|\*\*\*\*|^$|Capturing|Loading|registered' "$LOGS/$1.log" | tail -"${LINES_SHOWN:-14}" | cut -c1-260
  return "$status"
}

weights() { # name of the step, folder, options of make_random.py: unless they are there
  [[ -f $2/reward.py ]] && return
  LIMIT_S=$((2 * LIMIT_S)) step "$1" python tools/make_random.py "${@:2}"
  [[ -f $2/reward.py ]] || { echo "== $1 is needed for this stage; ONLY=${ONLY:-} leaves it out, or it has failed"; return 1; }
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
  local job="data.train=$LOGS/toy/train.jsonl data.validation=$LOGS/toy/val.jsonl data.validation_samples=32 actor.path=$LOGS/toy/model rollout.enforce_eager=true"
  world "$RANKS" -m verl_megatron.train --config-name ppo_toy_cpu $job $layout rollout.gpu_memory_utilization=0.1 reshard.verify=all run.output_dir="$LOGS/$1" "${@:2}"
}
export -f toy
export LOGS RANKS SCRATCH layout

# those that look at a GPU's free memory alone, the others side by side where pytest-xdist is there
stage_tests() {
  local beside=()
  LIMIT_S=$((2 * LIMIT_S)) step tests_alone python -m pytest -v -p no:cacheprovider tests/unit/test_offload.py tests/gpu -m "alone or not gpu"
  if python -c 'import xdist' 2>/dev/null; then beside=(-n 6); fi
  LIMIT_S=$((2 * LIMIT_S)) LINES_SHOWN=60 step tests python -m pytest -v -p no:cacheprovider "${beside[@]}" -m "not alone" tests/gpu
}

stage_toy() {
  for mode in keep share swap; do
    for offload in none all; do
      LINES_SHOWN=3 step "toy_${mode}_$offload" bash -c "toy toy_${mode}_$offload run.iterations=3 run.export=false reshard.mode=$mode reshard.offload=$offload"
    done
  done
}

# saved beside training, with everything away from the GPU; the iteration after the checkpoint is repeated and
# compared
stage_resume() {
  local common="reshard.mode=swap reshard.offload=all run.export=false run.save_interval=2 run.async_save=true"
  rm -rf "$LOGS/resume" # which would leave nothing to do
  step resume_first bash -c "toy resume $common run.iterations=3"
  rm -rf "$LOGS/resume/checkpoint/step_3"
  step resume_again bash -c "set -o pipefail; toy resume $common run.iterations=4 --verify | tee $LOGS/verified.txt && grep -q 'gives all .* recorded numbers' $LOGS/verified.txt"
}

recipe() { # folder of the run, recipe, settings
  GPUS=$RANKS bash recipes/"$2".sh run.track_metrics=[console,jsonl,timeline] run.output_dir="$LOGS/$1" run.iterations=3 "${@:3}" || return
  echo "$1: medians of the iterations after the first" && python - "$LOGS/$1/metrics.jsonl" <<'END'
import json, statistics, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if "time/rollout_s" in row][1:]
names = [name for name in rows[-1] if name.startswith(("time/", "memory/", "perf/", "train/"))]
print({name: round(statistics.median(row[name] for row in rows if name in row), 3) for name in names})
END
}
export -f recipe
few="data.prompts_per_iteration=64 algorithm.num_mini_batches=2"
tp2="actor.layout=tp2sp rollout.tp=2 reshard.mode=keep reshard.offload=none engine.tokens_per_micro_batch=8192"

stage_ppo() { # actor and critic of 8B; on two GPUs they take turns
  ((RANKS >= 2)) || return 0
  step ppo_keep bash -c "recipe ppo_keep llama3_8b_ppo reshard.mode=keep"
  step ppo_share bash -c "recipe ppo_share llama3_8b_ppo reshard.mode=share $few"
  step ppo_swap bash -c "recipe ppo_swap llama3_8b_ppo reshard.mode=swap reshard.offload=all $few"
}

# 1,024 samples of 512 + 1,024 tokens, whose keys and values all fit into the cache: the plan's best layouts
stage_ppo_long() {
  ((RANKS == 4)) || return 0
  local run="data.prompts_per_iteration=1024 rollout.max_tokens=1024 rollout.min_tokens=1024 rollout.tp=1 rollout.max_num_seqs=256 rollout.gpu_memory_utilization=0.52 run.iterations=2"
  LIMIT_S=$((2 * LIMIT_S)) step ppo_long_dp bash -c "recipe ppo_long_dp llama3_8b_ppo $run actor.layout=tp1 critic.layout=tp1 engine.tokens_per_micro_batch=4096 reshard.offload=all"
  LIMIT_S=$((2 * LIMIT_S)) step ppo_long_pp bash -c "recipe ppo_long_pp llama3_8b_ppo $run actor.layout=pp2vpp4 critic.layout=pp2vpp4 engine.tokens_per_micro_batch=8192 reshard.offload=optimizer"
}

# The same job through verl, for the Python of VERL_PYTHON (python3, and without verl there ours alone), beside
# our plans. verl needs up to four minutes before its first iteration: a step that is cut short goes on where it
# was when it is called again.
stage_verl() {
  local python=${VERL_PYTHON:-python3} tp=$((RANKS >= 2 ? 2 : 1)) layers=$((RANKS == 1 ? 12 : 32)) only=""
  if [[ -v VERL_PYTHON ]]; then "$python" -c 'import verl' || return 0; else "$python" -c 'import verl' 2>/dev/null || only="--only ours"; fi
  local fp8="engine.tokens_per_micro_batch=20480 engine.dtype=fp8 rollout.kv_cache_dtype=fp8" ways="--way larger engine.tokens_per_micro_batch=16384"
  ((RANKS == 1)) || ways="--way dp actor.layout=tp1 rollout.tp=1 reshard.mode=share reshard.offload=grads engine.tokens_per_micro_batch=4096 --way fp8_tp1 $fp8 rollout.tp=1 --way fp8_tp1_weights $fp8 rollout.tp=1 rollout.weight_dtype=fp8"
  local same="--gpus $RANKS --verl-python $python $only --resume --limit $((2 * LIMIT_S - 40))"
  local larger="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=16384"
  LIMIT_S=$((2 * LIMIT_S)) LINES_SHOWN=30 step verl_grpo python -m verl_megatron benchmark verl $same --layers $layers --tp $tp --rollout-tp $tp --out "$SCRATCH/beside_verl" --verl $larger $ways --way fp8 $fp8 --way fp8_weights $fp8 rollout.weight_dtype=fp8 reference.dtype=fp8
  # actor and critic with their optimizers beside each other: fewer layers
  LIMIT_S=$((2 * LIMIT_S)) LINES_SHOWN=30 step verl_ppo python -m verl_megatron benchmark verl $same --layers $((8 * RANKS)) --algorithm ppo --tp $tp --rollout-tp $tp --out "$SCRATCH/beside_verl_ppo"
}

# half of the GPUs generate while the others train, against all of them in turns; responses of mixed lengths
stage_separate() {
  ((RANKS >= 2)) || return 0
  local folder="$SCRATCH/mixed" half=$((RANKS / 2)) prompts=$((26 * RANKS))
  weights separate_weights "$folder" --layers 20 --response-tokens 390 || return
  local run="reward.function=$folder/reward.py:score run.save_interval=0 run.export=false data.samples_per_prompt=8 data.max_prompt_tokens=512 algorithm.kl_coef=0 rollout.max_tokens=2048 rollout.min_tokens=0 rollout.ignore_eos=false actor.layout=tp1 rollout.tp=1 engine.tokens_per_micro_batch=8192"
  local where=(MODEL="$folder/model" DATA="$folder/train.jsonl")
  LIMIT_S=$((2 * LIMIT_S)) step separate_turns env "${where[@]}" bash -c "recipe separate_turns llama3_8b_grpo $run data.prompts_per_iteration=$prompts algorithm.num_mini_batches=4 reshard.mode=share reshard.offload=none rollout.gpu_memory_utilization=0.3 run.iterations=4"
  local window="rollout.devices=$half-$((RANKS - 1)) async.max_staleness=1 async.sync_interval=4 async.buffer=window async.partial=pause"
  LIMIT_S=$((2 * LIMIT_S)) step separate_window python -m verl_megatron train --config-name grpo_8b actor.path="$folder/model" data.train="$folder/train.jsonl" $run $window data.prompts_per_iteration=$((prompts / 4)) algorithm.num_mini_batches=1 reshard.mode=keep reshard.offload=none rollout.gpu_memory_utilization=0.7 rollout.max_num_seqs=512 run.iterations=20 run.track_metrics=[console,jsonl,timeline] run.output_dir="$LOGS/separate_window"
}

stage_grpo() { # an actor of 8B, split over the ranks and whole on each
  ((RANKS >= 2)) || return 0
  step grpo_tp2 bash -c "recipe grpo_tp2 llama3_8b_grpo data.prompts_per_iteration=16 $tp2 rollout.gpu_memory_utilization=0.4"
  step grpo_dp bash -c "recipe grpo_dp llama3_8b_grpo data.prompts_per_iteration=16 actor.layout=tp1 rollout.tp=1 reshard.mode=share reshard.offload=all engine.tokens_per_micro_batch=4096"
  step grpo_pp bash -c "recipe grpo_pp llama3_8b_grpo data.prompts_per_iteration=16 actor.layout=pp2vpp4 rollout.tp=2 reshard.mode=swap reshard.offload=grads engine.tokens_per_micro_batch=4096"
}

# the 8B actor of one GPU, or divided over two, with weights, gradients and moments by rows
stage_full() {
  local folder="$SCRATCH/llama3-8b"
  weights full_weights "$folder" || return
  local run="reward.function=$folder/reward.py:score run.save_interval=0 run.export=false algorithm.kl_coef=0 algorithm.num_mini_batches=1 data.prompts_per_iteration=8"
  run+=" data.max_prompt_tokens=512 rollout.max_tokens=512 rollout.min_tokens=512 rollout.ignore_eos=true rollout.tp=1 rollout.max_num_seqs=64 rollout.gpu_memory_utilization=0.25"
  run+=" actor.layout=tp1 engine.sharding=full engine.recompute=full engine.tokens_per_micro_batch=8192 reshard.mode=keep reshard.offload=$([[ $RANKS == 1 ]] && echo steps || echo all)"
  step full env MODEL="$folder/model" DATA="$folder/train.jsonl" bash -c "recipe full llama3_8b_grpo $run"
}

# forward passes that a step can save: GRPO's old log-probs, and PPO's values; 6 layers of the 8B's width a GPU,
# so that actor and critic fit beside each other
stage_passes() {
  local folder="$SCRATCH/passes" layout="tp$RANKS"
  ((RANKS == 1)) || layout+=sp
  weights passes_weights "$folder" --layers $((6 * RANKS)) || return
  local run="reward.function=$folder/reward.py:score run.save_interval=0 run.export=false algorithm.num_mini_batches=1"
  run+=" data.max_prompt_tokens=512 rollout.max_tokens=512 rollout.min_tokens=512 rollout.ignore_eos=true"
  run+=" actor.layout=$layout rollout.tp=$RANKS reshard.mode=share reshard.offload=none engine.tokens_per_micro_batch=8192 rollout.gpu_memory_utilization=0.25"
  local where=(MODEL="$folder/model" DATA="$folder/train.jsonl") grpo="data.prompts_per_iteration=$((16 * RANKS))" ppo="data.prompts_per_iteration=$((64 * RANKS))"
  step passes_grpo_full env "${where[@]}" bash -c "recipe passes_grpo_full llama3_8b_grpo $run $grpo algorithm.reuse_logprobs=false"
  step passes_grpo_reused env "${where[@]}" bash -c "recipe passes_grpo_reused llama3_8b_grpo $run $grpo"
  step passes_ppo_two_models env "${where[@]}" bash -c "recipe passes_ppo_two_models llama3_8b_ppo $run $ppo critic.layout=$layout"
  step passes_ppo_shared_trunk env "${where[@]}" bash -c "recipe passes_ppo_shared_trunk llama3_8b_ppo $run $ppo critic.layout=tp1 critic.share_trunk=true"
}

stage_long() { # rows of 16,384 tokens; most of them prompt, so that generation does not take the time
  ((RANKS >= 2)) || return 0
  local folder="$SCRATCH/long"
  weights long_weights "$folder" --shape llama3.1-8b --prompt-tokens 15360 --rows 16 || return
  local lengths="data.max_prompt_tokens=15360 rollout.max_tokens=1024 rollout.min_tokens=1024 rollout.ignore_eos=true data.prompts_per_iteration=4 algorithm.num_mini_batches=2"
  local run="reward.function=$folder/reward.py:score run.save_interval=0 run.export=false"
  step long env MODEL="$folder/model" DATA="$folder/train.jsonl" bash -c "recipe long llama3.1_8b_grpo_16k $lengths $run"
}

stage_wide() { # few layers of a 70B model's width
  ((RANKS >= 2)) || return 0
  local folder="$SCRATCH/wide" layers=$((3 * RANKS)) places="reshard.offload=all"
  ((RANKS == 2)) || places="actor.layout=tp4sp critic.layout=tp4sp rollout.gpu_memory_utilization=0.1"
  weights wide_weights "$folder" --shape llama3-70b --layers $layers --rows 64 || return
  local lengths="data.max_prompt_tokens=512 rollout.max_tokens=512 rollout.min_tokens=512 rollout.ignore_eos=true run.save_interval=0 run.export=false"
  step wide env MODEL="$folder/model" DATA="$folder/train.jsonl" bash -c "recipe wide llama3_8b_ppo reward.function=$folder/reward.py:score $lengths $few reshard.mode=swap $places"
}

# all layers of a 70B model from their files (141 GB): load, reshard, generate, move back, log-probs
stage_whole() {
  ((RANKS == 4)) || return 0
  local folder="$SCRATCH/llama3-70b"
  weights whole_weights "$folder" --shape llama3-70b --rows 16 || return
  step whole bash -c "world 4 tools/bench/weight_sync.py --hf $folder/model --load --train tp2pp2 --rollout 4 --mode swap --no-optimizer --repetitions 2 --eager"
}

stage_fp8() { # the toy job learns as in bfloat16; a reference in fp8 beside an actor in bfloat16
  LINES_SHOWN=4 step reference_fp8 bash -c "toy reference_fp8 run.iterations=3 run.export=false algorithm.kl_coef=0.01 reference.dtype=fp8 && grep -o 'reference/logprob_gap_mean[^,]*' $LOGS/reference_fp8/metrics.jsonl"
  LINES_SHOWN=8 step precision bash -c "world $RANKS -m verl_megatron.benchmarks.precision --hf $LOGS/toy/model --prompt 16 --response 16 --dtypes bfloat16 fp8 fp8-weights"
  for dtype in bfloat16 fp8; do
    LINES_SHOWN=8 step "quickstart_$dtype" env OUT="$LOGS/toy" bash recipes/quickstart.sh engine.dtype=$dtype run.output_dir="$LOGS/quickstart_$dtype" rollout.enforce_eager=true
  done
}

# what a checkpoint keeps training from (time/save_s), written at once and beside it, and how long it takes to
# read: 8B on four GPUs, as much a rank on two
stage_save() {
  ((RANKS >= 2)) || return 0
  local folder="$SCRATCH/save" layers=$((8 * RANKS))
  weights save_weights "$folder" --layers $layers --rows 64 || return
  local common="$tp2 data.max_prompt_tokens=512 rollout.max_tokens=64 rollout.min_tokens=64 rollout.ignore_eos=true data.prompts_per_iteration=8 reward.function=$folder/reward.py:score"
  local run="$common run.export=false run.save_interval=2 run.keep_last_k=1" where=(MODEL="$folder/model" DATA="$folder/train.jsonl")
  step save_async_false env "${where[@]}" bash -c "recipe save_false llama3_8b_grpo $run run.async_save=false"
  rm -rf "$LOGS/save_false/checkpoint"
  step save_async_true env "${where[@]}" bash -c "recipe save_true llama3_8b_grpo $run run.async_save=true"
  step save_resumed env "${where[@]}" bash -c "set -o pipefail; recipe save_true llama3_8b_grpo $run run.async_save=true run.save_interval=0 run.iterations=4 | grep -E 'resuming|step 4'"
  rm -rf "$LOGS/save_true/checkpoint"
}

# what it costs to have gradients and optimizer state away while vLLM generates, where both ways fit
stage_offload() {
  step copies python tools/bench/copies.py
  ((RANKS >= 2)) || return 0
  local folder="$SCRATCH/llama3-8b"
  weights offload_weights "$folder" || return
  local lengths="data.max_prompt_tokens=512 rollout.max_tokens=512 rollout.min_tokens=512 rollout.ignore_eos=true data.prompts_per_iteration=32"
  local run="--config-name grpo_8b actor.path=$folder/model data.train=$folder/train.jsonl reward.function=$folder/reward.py:score run.output_dir=$LOGS/offload"
  LIMIT_S=$((2 * LIMIT_S)) step offload bash -c "world $RANKS tools/bench/offload.py $run $lengths $tp2 rollout.gpu_memory_utilization=0.3 reshard.offload=all run.iterations=8"
}

stage_weight_sync() {
  ((RANKS >= 2)) || return 0
  local small="--shape llama3-8b --train tp2 --rollout 2 --optimizer --utilization 0.3 --eager"
  step weight_sync_share bash -c "world 2 tools/bench/weight_sync.py $small --mode share"
  step weight_sync_swap_all bash -c "world 2 tools/bench/weight_sync.py $small --mode swap --offload all"
}

stage_reshard() {
  ((RANKS >= 2)) || return 0
  local pairs=("tp2 tp2" "pp2 tp2" "tp1 tp2" "tp2 tp1") big="--layers 32 --train tp2 --rollout tp2"
  if ((RANKS == 4)); then pairs=("tp2pp2 tp4" "pp4 tp4" "tp4 tp2" "tp2 tp4" "tp2pp2vpp2 tp2") big="--train tp2pp2 --rollout tp4"; fi
  for pair in "${pairs[@]}"; do
    step "reshard_${pair/ /_}" bash -c "world $RANKS tools/bench/reshard.py --shape llama3-8b --no-megatron --gather-mib 256 --train ${pair% *} --rollout ${pair#* }"
  done
  step reshard_70b bash -c "world $RANKS tools/bench/reshard.py --shape llama3-70b --no-megatron --gather-mib 256 $big --modes keep swap"
}

stage_engine() { # updates and log-probs of an 8B model alone; profiles are in the logs
  local size="--shape llama3-8b --rows 32 --prompt 512 --response 512 --steps 2 --repetitions 2" small="--set tokens_per_micro_batch=4096"
  if ((RANKS == 1)); then
    step engine_1b bash -c "world 1 tools/bench/engine.py ${size/8b/1b} --baseline --profile"
    return
  fi
  step engine_dp bash -c "world $RANKS tools/bench/engine.py $size --layout tp1 $small --baseline --profile"
  step engine_dp_fp8 bash -c "world $RANKS tools/bench/engine.py $size --layout tp1 $small dtype=fp8 --profile"
  step engine_tp2 bash -c "world $RANKS tools/bench/engine.py $size --layout tp2sp --profile"
  step engine_pp2 bash -c "world $RANKS tools/bench/engine.py $size --layout pp2 $small"
  step engine_pp2vpp4 bash -c "world $RANKS tools/bench/engine.py $size --layout pp2vpp4 $small"
}

stage_rollout() { # as a run does it beside a bare vLLM
  local tp=$((RANKS >= 2 ? 2 : 1))
  step rollout bash -c "world $RANKS tools/bench/rollout.py --shape llama3-8b --tp $tp --rows $((128 * RANKS)) --prompt 512 --response 512"
  for cache in auto fp8; do
    LINES_SHOWN=40 step "rollout_step_$cache" bash -c "world $RANKS tools/bench/rollout.py --shape llama3-8b --tp $tp --rows $((128 * RANKS)) --prompt 512 --response 128 --repetitions 1 --profile --kv-cache-dtype $cache"
  done
  step rollout_mixed bash -c "world $RANKS tools/bench/rollout.py --shape llama3-8b --tp 1 --rows $((128 * RANKS)) --prompt 512 --response 512 --mixed"
}

# a model that one GPU holds with its optimizer, 12 layers of the 8B's width, with as many rows for each GPU
stage_scaling() {
  ((RANKS >= 2)) || return 0
  local folder="$SCRATCH/scaling" sizes=1,2 same="--layouts 1:tp1,2:tp1 --rollout 1:1,2:1"
  if ((RANKS == 4)); then sizes=1,2,4 same="--layouts 1:tp1,2:tp1,4:tp1 --rollout 1:1,2:1,4:1"; fi
  weights scaling_weights "$folder" --layers 12 || return
  local lengths="--prompts $((16 * RANKS)) --prompt-tokens 512 --response-tokens 512" plain="reshard.mode=keep reshard.offload=none engine.tokens_per_micro_batch=8192"
  LIMIT_S=$((2 * LIMIT_S)) step scaling python tools/benchmark_scaling.py --recipe grpo_8b.yaml --gpus $sizes --steps 5 $same $lengths --out "$LOGS/scaling" actor.path="$folder/model" $plain rollout.gpu_memory_utilization=0.25
}

stage_kernels() { # those of log-probs in other block sizes, beside the floor
  LINES_SHOWN=40 step kernels python tests/gpu/log_probs_check.py
}

stage_machine() { LINES_SHOWN=40 step machine bash -c "world $RANKS tools/calibrate.py $LOGS/machine.json && cat $LOGS/machine.json"; }

(($#)) || set -- tests toy resume ppo ppo_long grpo verl separate full passes long wide whole fp8 save offload weight_sync reshard engine rollout scaling kernels machine
for stage in "$@"; do
  declare -F "stage_$stage" >/dev/null && continue
  echo "error: there is no stage $stage; choose among: $(declare -F | sed -n 's/^declare -f stage_//p' | tr '\n' ' ')" >&2
  exit 2
done
for stage in "$@"; do "stage_$stage"; done
printf '\n%s\n' "$GPUS GPUs, $RANKS ranks; logs in $LOGS"
printf '%s\n' "${table[@]}"
! printf '%s\n' "${table[@]}" | grep -q ' code '
