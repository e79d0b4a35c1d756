"""Finds the layouts for a run on a number of GPUs, and predicts their memory and time per iteration.

Needs neither a GPU nor weights: a model is a folder with a config.json, a hub name, or a built-in shape.
Settings after the options are those of `verl-megatron train`. With --compare OUTPUT_DIR there is no search:
the plan of exactly these settings is shown next to that run's measurements. With --separate the rollout has
GPUs of its own, and the search also chooses how many; compare its best iteration with that of a search
without.
"""

import argparse
from pathlib import Path

from parallel.weights.shapes import SHAPES
from verl_megatron.config import ALGORITHM_NAMES, SCORERS
from verl_megatron.config.gpus import USUAL
from verl_megatron.launch.options import COUNT, Options
from verl_megatron.planner.machine import MACHINES
from verl_megatron.planner.rollout.lengths import Lengths

EXAMPLES = (
    "--model llama3-8b --gpus 8",
    "--model qwen2.5-32b --gpus 16 --gpu h100 --algorithm grpo --best 3 --json plan.json",
    "--model llama3-8b --gpus 8 --separate algorithm.kl_coef=0",
)

HOST_RANKS = 8  # per host, unless --hosts is given


def parser() -> argparse.ArgumentParser:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help=f"the actor: a folder with a config.json, a hub name, or a built-in shape: {', '.join(SHAPES)}",
    )
    options.add_argument(
        "--critic", default="", metavar="MODEL", help="the critic, where it is not like the actor"
    )
    options.add_argument("--gpus", type=COUNT, required=True, help="of all hosts together")
    options.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"{', '.join(MACHINES)}, or a file of benchmark calibrate (this host's, without any {USUAL})",
    )
    options.add_argument("--hosts", type=COUNT, help=f"number of hosts; default: {HOST_RANKS} GPUs a host")
    _add_iteration(options)
    options.add_argument("--best", type=COUNT, default=10, help="candidates that are shown")
    options.add_argument(
        "--separate",
        action="store_true",
        help="the rollout on GPUs of its own (rollout.devices), as many as are best; samples are at most "
        "async.max_staleness updates old, 1 unless it is given",
    )
    options.add_argument(
        "--apart",
        type=frozen_models,
        default=(),
        metavar="MODEL,...",
        help=f"with --separate: frozen models on GPUs of their own: {', '.join(SCORERS)}",
    )
    options.add_argument("--json", type=Path, help="write all candidates that fit to this file")
    options.add_argument(
        "--compare",
        type=Path,
        metavar="OUTPUT_DIR",
        help="no search: the plan of exactly these settings beside the metrics.jsonl of a run of them",
    )
    options.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="SECTION.SETTING=VALUE",
        help="other settings, such as algorithm.kl_coef=0 (no reference model) or reward.path=DIR",
    )
    return options


def _add_iteration(options: argparse.ArgumentParser) -> None:
    options.add_argument("--samples-per-iteration", type=COUNT, default=1024, help="of all prompts together")
    options.add_argument(
        "--samples-per-prompt", type=COUNT, help="default: 8 where they are compared, else 1"
    )
    options.add_argument("--prompt", type=COUNT, default=512, help="tokens of a prompt")
    options.add_argument(
        "--response", type=COUNT, help="most tokens of a response; default: 1024, or the longest of --lengths"
    )
    options.add_argument(
        "--lengths",
        type=lengths,
        metavar="A-B:WEIGHT,...",
        help="lengths of responses that differ: ranges of tokens with weights, such as 64-2048 or "
        "512:70,1024-8192:30; memory counts the longest",
    )
    options.add_argument("--mini-batches", type=COUNT, default=4, help="optimizer steps an iteration")
    options.add_argument("--algorithm", default="ppo", metavar="NAME", help=", ".join(ALGORITHM_NAMES))


def lengths(text: str) -> Lengths:
    """Argument type: a distribution of lengths."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def frozen_models(text: str) -> tuple[str, ...]:
    """Argument type: names of frozen models."""
    names = text.split(",")
    if not set(names) <= set(SCORERS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; write one of {', '.join(SCORERS)}, or several with commas"
        )
    return tuple(names)
