"""Speed of the reshard from Megatron's shards to vLLM's, compared with link rates and other methods.

Both layouts are plain tensors: our own rows start neither Megatron nor vLLM. Every source element is a
function of its position in the Hugging Face tensor. Each rank thus knows what it must receive, and compares
it bit by bit before anything is timed. Then the methods alternate, repetition by repetition; each takes as
long as its slowest rank. Megatron-Core's refit ends in Megatron's layout.

A floor is the larger of two times: what the busiest rank must receive under any plan, at this run's
point-to-point rate, and what is copied within a GPU, at its copy rate. The floor's own row is that of a
second copy (keep). Every other row's share is of its own floor: the refit ends in another layout, and in
share and swap some weights are already in place. The second copy is the destination's memory in addition to
the source.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_megatron.benchmarks.options import add_model
from verl_megatron.launch.options import COUNT, Options, add_launcher_options, number, whole_number

EXAMPLES = (
    "--ranks 4 --shape llama3-8b --train tp2pp2 --rollout tp4 --csv rows.csv",
    "--ranks 2 --hf outputs/toy/model --train tp2 --rollout tp2 --modes keep share",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    add_launcher_options(options)
    add_model(options)
    options.add_argument(
        "--layers", type=whole_number(0), default=0, help="another number of layers than the model has"
    )
    options.add_argument("--train", default="tp2pp2", help="layout of the source")
    options.add_argument(
        "--rollout", default="tp4", help="layout of the destination: tp only; the other ranks are replicas"
    )
    options.add_argument(
        "--window-mib", type=number(0.001, 2**20), default=256, help="staging memory of one exchange"
    )
    options.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the weights"
    )
    options.add_argument("--repetitions", type=COUNT, default=10, help="at least 10 are made")
    options.add_argument(
        "--modes",
        nargs="+",
        choices=["keep", "share", "swap"],
        default=["keep", "share", "swap"],
        help="where vLLM's parameters lie",
    )
    options.add_argument(
        "--rank-order",
        choices=["auto", "plain"],
        default="auto",
        help="auto: ranks are placed so that the least has to move",
    )
    options.add_argument(
        "--verify",
        choices=["sample", "none", "all"],
        default="sample",
        help="slices checked in the timed repetitions of the verified row; none: no such row",
    )
    options.add_argument(
        "--no-megatron",
        action="store_true",
        help="leave out Megatron-Core's refit and the memory of its second model",
    )
    options.add_argument(
        "--gather-mib",
        type=whole_number(0),
        nargs="+",
        help="bucket sizes tried, in MiB; 0: tensor by tensor (default: 0 64 256 1024, on a CPU 0 1 16)",
    )
    options.add_argument(
        "--link-mib",
        type=COUNT,
        help="MiB of the message that measures the links (default: 1024, on a CPU 16)",
    )
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    options.add_argument("--png", type=Path, help="draw the rows into this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
