"""Runs a recipe on several numbers of ranks, reports its scaling, and models larger sizes.

A recipe is a .yaml file with actor.path in the settings, or a script with MODEL in the environment or random
weights. All responses have the same length, prompts are random words, and nothing is saved, validated or
exported. The number of prompts is proportional to the ranks, or constant with --strong. Layouts are the
recipe's, with data parallelism adjusted, unless --layouts and --rollout give others.

OUT/scaling.md, .csv and .png: the table, its numbers and a picture. OUT/nN: the run on N ranks, with
timeline.json and timeline.png. Larger sizes, up to --to GPUs, are modelled from the measured ones and are
marked as such everywhere (verl_megatron/benchmarks/scaling/model.py has the formulas).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from parallel.runtime.environment import MOST_RANKS
from verl_megatron.launch.options import COUNT, Options, number
from verl_megatron.planner.machine import MACHINES

EXAMPLES = (
    "--recipe ppo_toy_cpu --gpus 1,2,4 actor.path=outputs/toy/model",
    "--recipe llama3_8b_ppo.sh --gpus 2,4 --layouts 2:tp2,4:tp2pp2 --rollout 2:2,4:2",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument(
        "--recipe",
        required=True,
        metavar="RECIPE",
        help="a .yaml or .sh file, or the name of one in recipes/",
    )
    options.add_argument(
        "--gpus",
        type=numbers,
        required=True,
        metavar="N,...",
        help="numbers of ranks to measure, such as 1,2,4",
    )
    options.add_argument(
        "--steps", type=COUNT, default=5, help="iterations of a run; the first does not count"
    )
    options.add_argument(
        "--layouts",
        type=by_size,
        default={},
        metavar="RANKS:LAYOUT,...",
        help="of all models, by number of ranks; default: the recipe's",
    )
    options.add_argument(
        "--rollout",
        type=sizes_by_size,
        default={},
        metavar="RANKS:SIZE,...",
        help="vLLM's tensor-parallel size, by number of ranks",
    )
    options.add_argument(
        "--prompts", type=COUNT, help="of an iteration on the largest number of ranks; default: the recipe's"
    )
    options.add_argument(
        "--prompt-tokens",
        type=COUNT,
        help="of every prompt; default: data.max_prompt_tokens, for random weights 512",
    )
    options.add_argument(
        "--response-tokens", type=COUNT, help="of every response; default: rollout.max_tokens"
    )
    options.add_argument("--strong", action="store_true", help="as many prompts on every number of ranks")
    options.add_argument(
        "--out", type=Path, default=Path("outputs/scaling"), metavar="DIR", help="for table and runs"
    )
    options.add_argument(
        "settings",
        nargs="*",
        metavar="SECTION.SETTING=VALUE",
        help="other settings of the run, such as actor.path=DIR",
    )
    _add_modelled(options)
    return options


def _add_modelled(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--gpu",
        help=(
            f"machine of predictions and MFU: {', '.join(MACHINES)} or a file of `benchmark calibrate`; "
            "default: this one's, none on a CPU"
        ),
    )
    options.add_argument(
        "--to", type=COUNT, default=16_384, help="GPUs up to which larger sizes are modelled"
    )
    options.add_argument("--ranks-per-host", type=COUNT, default=8, help="of modelled sizes")
    options.add_argument(
        "--link-gbytes",
        type=number(0.001, 10**6),
        help="GB/s of a GPU to others of its host, for modelled sizes; default: the machine's",
    )
    options.add_argument(
        "--host-gbps",
        type=number(0.001, 10**6),
        help="Gbit/s of a GPU to other hosts, for modelled sizes; default: the machine's",
    )


def by_size(text: str) -> dict[int, str]:
    """Argument type: 1:tp1,2:tp2 as a dictionary."""
    pairs = [part.split(":") for part in text.split(",") if part]
    if not all(len(pair) == 2 and pair[0].isdecimal() and pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not understood; write RANKS:VALUE, such as 1:tp1,2:tp2"
        )
    return {int(ranks): value for ranks, value in pairs}


def sizes_by_size(text: str) -> dict[int, int]:
    """Argument type: 1:1,2:2 as a dictionary of integers."""
    found = by_size(text)
    if not all(value.isdecimal() and int(value) for value in found.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not understood; write RANKS:SIZE, such as 1:1,2:2")
    return {ranks: int(value) for ranks, value in found.items()}


def numbers(text: str) -> list[int]:
    """Argument type: 1,2,4 as an increasing list."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts) or len({int(part) for part in parts}) < len(
        parts
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not understood; write distinct numbers of ranks, such as 1,2,4"
        )
    if max(map(int, parts)) > MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text[:200]!r} is more than {MOST_RANKS} ranks; write those that are there to measure"
        )
    return sorted(int(part) for part in parts)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_intermixed_args(arguments)
