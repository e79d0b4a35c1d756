"""Generation as a run does it beside a bare vLLM: the same engine, prompts, seeds and flags, in turns.

torchrun --nproc_per_node 4 tools/bench_rollout.py --shape llama3-8b --tp 2 [--rows 512 --prompt 512 --response 512] [--mixed] [--csv FILE]

Bare: each replica gets an equal number of rows at once, and vLLM's own `generate` answers them. As a run does it: replicas draw rows from
one queue as they get free, the tensor-parallel ranks prove that they agree, and each row is kept with its log-probs. Weights are random
and every response ends at its length. With --mixed prompts have up to the whole length and responses what is left: between 1/8 and all of it.
"""

import argparse
import csv
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from bench_case import model_folder, say

from parallel import device
from parallel.collectives import all_max
from parallel.weights.architecture import Architecture, read_config
from parallel.weights.shapes import SHAPES, shape
from verl_megatron.config import RolloutConfig
from verl_megatron.rollout.sampling import Request, Sampling, row_seed, token_budget
from verl_megatron.rollout.vllm import VLLMActor, _sampling_params

SEED, SHORTEST = 1, 8  # the shortest response is one part of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the repetitions."""

    name: str
    seconds: float  # until the slowest replica is done
    tokens: int  # generated, by all replicas
    apart: float  # the first replica to end is early by this share of the time


def make_requests(options: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Random prompts; with --mixed each is longer by what its response is shorter."""
    draw = random.Random(SEED)
    rows = []
    for row in range(options.rows):
        extra = (
            draw.randint(0, options.response - max(1, options.response // SHORTEST)) if options.mixed else 0
        )
        prompt = [draw.randrange(3, vocab_size) for _ in range(options.prompt + extra)]
        rows.append(Request(row, prompt, row_seed(SEED, 1, row)))
    return rows


def as_a_run(actor: VLLMActor, requests: list[Request], sampling: Sampling) -> int:
    """Tokens that this replica generated."""
    return sum(len(row.token_ids) for row in actor.generate(requests, sampling))


def bare(actor: VLLMActor, requests: list[Request], sampling: Sampling) -> int:
    """The same from vLLM's own loop."""
    mine = requests[actor.replica :: actor.num_replicas]
    budgets = [
        token_budget(
            replace(request, sampling=sampling),
            max_model_len=actor.max_model_len,
            vocab_size=actor.vocab_size,
        )
        for request in mine
    ]
    params = [
        _sampling_params(sampling, seed=request.seed, max_tokens=budget)
        for request, budget in zip(mine, budgets)
    ]
    with actor._guarded():
        outputs = actor._llm.generate(
            [{"prompt_token_ids": list(request.prompt_token_ids)} for request in mine], params, use_tqdm=False
        )
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(actor: VLLMActor, requests: list[Request], sampling: Sampling, repetitions: int) -> list[Row]:
    """Both in turns, after one round to warm up."""
    ways, found = {"bare vLLM": bare, "as a run": as_a_run}, {}
    for repetition in range(repetitions + 1):
        for name, generate in ways.items():
            actor.reset_cache()
            dist.barrier()
            start = time.perf_counter()
            tokens = generate(actor, requests, sampling)
            seconds = time.perf_counter() - start
            home = float(actor.is_home)
            totals = torch.tensor([tokens * home])
            dist.all_reduce(totals)
            last, first = all_max(torch.tensor([seconds, -seconds], dtype=torch.float64)).tolist()
            if repetition:
                found.setdefault(name, []).append((last, int(totals), 1 + first / last))
    return [
        Row(name=name, seconds=_median(values, 0), tokens=values[0][1], apart=_median(values, 2))
        for name, values in found.items()
    ]


def _median(values: list[tuple], place: int) -> float:
    return sorted(value[place] for value in values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(SHAPES))
    model.add_argument("--hf", type=Path, help="a folder with a config.json; its weights are not read")
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel ranks of a replica; the others are replicas"
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--utilization", type=float, default=0.6)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    if min(options.rows, options.prompt, options.response, options.repetitions) < 1:
        parser.error("--rows, --prompt, --response and --repetitions have to be at least 1")

    device.initialize()
    hf = shape(options.shape) if options.shape else read_config(options.hf)
    arch = Architecture.from_hf(hf)
    config = RolloutConfig(
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.utilization,
        enforce_eager=options.eager,
        sleep=False,
    )
    sampling = Sampling(max_tokens=options.response, min_tokens=1, ignore_eos=True)
    with model_folder(arch, hf) as folder:
        actor = VLLMActor(
            folder,
            options.tp,
            config=config,
            max_model_len=options.prompt + options.response,
            load_weights=False,
        )
        rows = measure(actor, make_requests(options, arch.vocab_size), sampling, options.repetitions)
        actor.close()
    ranks = f"{dist.get_world_size()} x {torch.cuda.get_device_name() if device.is_gpu() else 'CPU rank'}"
    lengths = f"{options.prompt} + {options.response} tokens{', mixed' if options.mixed else ''}"
    say(
        f"{options.shape or options.hf}, {dist.get_world_size() // options.tp} replicas of tp{options.tp}, "
        f"{options.rows} rows of {lengths}, {ranks}"
    )
    say(f"{'':12}{'seconds':>10}{'tokens/s':>12}{'of bare':>10}{'replicas end apart':>20}")
    for row in rows:
        say(
            f"{row.name:12}{row.seconds:>10.3f}{row.tokens / row.seconds:>12,.0f}"
            f"{rows[0].seconds / row.seconds:>10.1%}{row.apart:>20.1%}"
        )
    if options.csv and dist.get_rank() == 0:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "seconds", "tokens", "apart", "replicas", "tp", "date"])
            writer.writerows(
                [
                    row.name,
                    row.seconds,
                    row.tokens,
                    row.apart,
                    dist.get_world_size() // options.tp,
                    options.tp,
                    time.strftime("%Y-%m-%d"),
                ]
                for row in rows
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}" if os.environ.get("RANK", "0") == "0" else 2) from None
