#!/usr/bin/env bash
# From a clone to a trained model: installs, builds the toy job, warms the model up, trains it by PPO and
# exports it.
#   bash recipes/quickstart.sh [settings of the PPO run, such as run.iterations=5]
# Environment: SEED (1), OUT (outputs/toy), VERL_MEGATRON_VENV (see tools/install.sh).
RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/quickstart.sh
INSTALLS=1
source "${RECIPE%/*}/launch/local.sh"
[[ -z $CLONE ]] || cd "$ROOT"
[[ -z ${LOCAL_RANK:-} && (${NNODES:-1} == 1 || -n $DRY_RUN) ]] ||
  stop "quickstart.sh starts all its ranks itself; run it alone on one node"
[[ ${NNODES:-1} == 1 ]] || echo "quickstart.sh runs on one node only; this is its plan there, without the other nodes of NNODES=$NNODES"
SEED=${SEED:-1} OUT=${OUT:-outputs/toy}
if [[ -n $CLONE ]]; then PYTHON=$(bash tools/install.sh); else PYTHON=$(command -v python); fi
export PATH="$(dirname "$PYTHON"):$PATH" HF_HUB_OFFLINE=1

FOUND=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if [[ $FOUND != 0 && -v CUDA_VISIBLE_DEVICES ]]; then FOUND=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true); fi
RANKS=4 LAYOUT=(actor.layout=tp2pp2 critic.layout=pp2 rollout.tp=2) # the CPU's four ranks share its cores
case $FOUND in
  0) export TORCH_COMPILE_DISABLE=1 ;;
  1) RANKS=1 LAYOUT=(actor.layout=tp1 critic.layout=tp1 rollout.tp=1) ;;
  2 | 3) RANKS=2 LAYOUT=(actor.layout=tp2 critic.layout=pp2 rollout.tp=2) ;;
esac
echo "quickstart: $RANKS ranks on $([[ $FOUND == 0 ]] && echo the CPU || echo "$FOUND GPUs"), ${LAYOUT[*]}"

run() { NNODES=1 NODE_RANK=0 GPUS=$1 start "${@:2}"; }

[[ -n $DRY_RUN && -d $OUT/model ]] || "$PYTHON" -m verl_megatron.examples.toy "$OUT" --seed "$SEED"
[[ -n $DRY_RUN ]] || refuse_bad_settings bash "$RECIPE" "$@"
trap 'exit 130' INT # the ranks' launcher has said it
(run "$((RANKS < 2 ? 1 : 2))" verl_megatron.sft --config-name sft_toy_cpu run.seed="$SEED" run.output_dir="$OUT/sft" \
  data.train="$OUT/sft.jsonl" actor.path="$OUT/model" ${DRY_RUN:+--dry-run})
run "$RANKS" verl_megatron.train --config-name ppo_toy_cpu run.seed="$SEED" run.output_dir="$OUT/ppo" data.train="$OUT/train.jsonl" \
  data.validation="$OUT/val.jsonl" actor.path="$OUT/$([[ -n $DRY_RUN ]] && echo model || echo sft/actor)" "${LAYOUT[@]}" "$@"
