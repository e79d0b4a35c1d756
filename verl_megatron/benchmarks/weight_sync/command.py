"""The whole way between training and rollout, in both directions: `benchmark weight-sync`."""

import argparse
import hashlib
import json
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from parallel import device
from parallel.layout import Layout
from parallel.placement import described, place
from parallel.rank_set import world
from parallel.weights.architecture import Architecture, read_config
from parallel.weights.shapes import shape
from verl_megatron.benchmarks.case import check_room, model_folder, say
from verl_megatron.benchmarks.options.weight_sync import parser, read_options
from verl_megatron.benchmarks.output import write_csv
from verl_megatron.benchmarks.weight_sync.measures import Clock, Memory, Row, table
from verl_megatron.benchmarks.weight_sync.models import PROMPT_TOKENS, SyncCase, SyncedModels
from verl_megatron.checks.folders import check_weights
from verl_megatron.config import DataConfig, ModelConfig, ReshardConfig, RolloutConfig, TrainerConfig

# Limit of a mean over tokens, times the square root of the number of layers. With random weights, 80
# layers of a 70B model measured 0.31; 80 layers of width 512 in bfloat16 are 0.28 from the same in float32.
# With other weights, the most likely tokens are several units apart.
LOG_PROBS_APART = {torch.float32: 5e-4, torch.bfloat16: 0.06}


# ---- measurement -------------------------------------------------------------------------------------------


class Checks:
    """Checks after every repetition, on every rank."""

    def __init__(self, models: SyncedModels):
        self.models, self.before_N = models, models.parameters.run()
        self.tokens: list[list[list[int]]] = []  # of each repetition
        self.apart = 0.0  # largest difference between log-probs of training and rollout
        self.ways_back = self.changed = 0
        self.vllm_has_weights = False

    def after(self, tokens: list[list[int]], apart: float) -> None:
        self.tokens.append(tokens)
        self.apart = max(self.apart, apart)
        self.ways_back += 1
        self.changed += int((self.models.parameters.run() != self.before_N).sum())

    def rows(self) -> list[Row]:
        """Return the result's rows. Collective over the world."""
        digests: list = [None] * dist.get_world_size()
        dist.all_gather_object(digests, [digest(tokens) for tokens in self.tokens])
        different = {one for of_rank in digests for one in of_rank}
        changed, lacking = (
            world().all_max(torch.tensor([self.changed, int(not self.vllm_has_weights)])).tolist()
        )
        flat = [token for row in self.tokens[0] for token in row]
        limit = LOG_PROBS_APART[self.models.engine.compute.dtype] * self.models.case.arch.num_layers**0.5
        holds = {
            "vLLM's weights are, element by element, those that training should have": not lacking,
            f"Megatron's weights have the same bits after each of {self.ways_back} ways back": not changed,
            f"the tokens are the same in each of {self.ways_back} repetitions and on every replica": len(
                different
            )
            == 1,
            f"{len(flat)} tokens were generated, {len(set(flat))} different ones": len(set(flat)) > 1,
            f"their log-probs in training and in vLLM differ by {self.apart:.1e} on average, at "
            f"most {limit:.0e}": self.apart <= limit,
        }
        return [
            *(Row("check", name, "yes" if is_so else "NO", "") for name, is_so in holds.items()),
            Row("digest", "all tokens", digests[0][0], ""),
        ]


def digest(tokens: list[list[int]]) -> str:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


def measure(models: SyncedModels, repetitions: int) -> list[Row]:
    """Run one uncounted repetition, then the given number of each kind."""
    clock, memory, checks = Clock(), Memory(), Checks(models)
    memory.note("trained, vLLM asleep")
    for number in range(-1, 2 * repetitions):
        clock.splits = number % 2 == 0 or number < 0
        models.to_rollout(clock, memory)
        if number < 0:
            checks.vllm_has_weights = models.vllm_has_the_weights()
        rows = models.generate(clock, memory)
        models.to_train(clock, memory)
        checks.after([row.token_ids for row in rows], models.log_probs_apart(rows, clock))
        if number < 0:  # warm-up: libraries start and kernels are compiled
            clock.milliseconds.clear()
            memory.stages = {"trained, vLLM asleep": memory.stages["trained, vLLM asleep"]}
    return [*clock.rows("phase"), *memory.rows(), *models.plan_rows(), *checks.rows()]


# ---- command line ------------------------------------------------------------------------------------------


def read_case() -> tuple[argparse.Namespace, SyncCase, dict]:
    """Parse the command line, reject contradictory options early, and read the config.json."""
    options = read_options()
    try:
        case, hf = _case(options)
    except ValueError as error:
        parser().error(str(error))
    return options, case, hf


def _case(options: argparse.Namespace) -> tuple[SyncCase, dict]:
    if options.offload != "none" and not options.optimizer:
        raise ValueError(
            f"--offload {options.offload} moves what the optimizer needs, and --no-optimizer leaves it out; "
            "drop one of them"
        )
    if options.load and (options.shape or options.layers):
        raise ValueError("--load reads all weights of a folder; give --hf, and no --shape or --layers")
    hf = shape(options.shape) if options.shape else read_config(options.hf)
    arch = Architecture.from_hf(hf, source=options.shape or str(options.hf / "config.json"))
    arch = replace(arch, num_layers=options.layers or arch.num_layers)
    ranks = tuple(range(int(os.environ.get("WORLD_SIZE", "1"))))
    train, rollout = (
        Layout.parse(options.train, ranks=ranks),
        Layout.parse(f"tp{options.rollout}", ranks=ranks),
    )
    check_room(arch, train, bytes_per_parameter=16 if options.optimizer else 4)
    if PROMPT_TOKENS + options.tokens > arch.max_positions:
        raise ValueError(
            f"prompts of {PROMPT_TOKENS} tokens and --tokens {options.tokens} are more than the model's "
            f"{arch.max_positions} positions; lower --tokens"
        )
    train, rollout = place(
        arch, train, rollout, ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
    )
    config = TrainerConfig(
        data=DataConfig(max_prompt_tokens=PROMPT_TOKENS, prompts_per_iteration=options.prompts),
        actor=ModelConfig(layout=options.train),
        rollout=RolloutConfig(
            tp=options.rollout,
            max_tokens=options.tokens,
            gpu_memory_utilization=options.utilization,
            enforce_eager=options.eager,
        ),
        reshard=ReshardConfig(
            mode=options.mode, window_mib=options.window_mib, verify=options.verify, offload=options.offload
        ),
    )
    model, folder = options.shape or options.hf.resolve().name, str(options.hf) if options.load else None
    if folder:
        check_weights(folder, "lm")
    return SyncCase(
        model=model,
        arch=arch,
        train=train,
        rollout=rollout,
        trainable=options.optimizer,
        config=config,
        folder=folder,
    ), hf


def main() -> int:
    options, case, hf = read_case()
    device.initialize()
    say(
        f"{case.model} ({case.arch.num_layers} layers), {case.train} -> {case.rollout}, {options.mode}; "
        f"order of ranks: {described(case.train, case.rollout)}"
    )
    built = Clock()
    with model_folder(case.arch, hf) as folder:
        case.config.actor.path = folder
        models = SyncedModels(case, built)
        rows = [*measure(models, options.repetitions), *built.rows("build")]
        models.close()
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        if options.csv:
            write_csv(options.csv, case.columns(), rows)
    dist.destroy_process_group()
    return int(any(row.kind == "check" and row.value != "yes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
