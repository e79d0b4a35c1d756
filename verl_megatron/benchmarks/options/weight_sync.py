"""Weight sync between training and rollout in both directions: time and memory.

A Megatron-Core model and a vLLM engine share the same ranks. Weights are those of FOLDER, or random and a
function of their position in the Hugging Face tensors. They are the same in every layout and mode, so runs
with other modes print the same digest of the generated tokens.

The calls are those of a training iteration, in its order, up to the log-probs of the generated tokens. Half
of the repetitions synchronize the GPUs after every phase. The others do so only at both ends of each
direction, as training does, so that copies to and from the host overlap with other work. Times are those of
the slowest rank, memory that of the fullest. The exit status is 1 if a check fails.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_megatron.benchmarks.options import add_model
from verl_megatron.launch.options import COUNT, SHARE, Options, add_launcher_options, whole_number

EXAMPLES = (
    "--ranks 4 --shape llama3-8b --train tp2pp2 --rollout 2 --mode swap --offload all",
    "--ranks 2 --hf outputs/toy/model --load --train tp2 --rollout 2 --no-optimizer --verify all",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    add_launcher_options(options)
    add_model(options, read="its weights are read with --load only")
    options.add_argument("--load", action="store_true", help="the weights of --hf instead of random ones")
    options.add_argument(
        "--layers", type=whole_number(0), default=0, help="another number of layers than the model has"
    )
    options.add_argument("--train", default="tp2", help="Megatron's layout")
    options.add_argument(
        "--rollout", type=COUNT, default=2, help="vLLM's tensor-parallel size; the other ranks are replicas"
    )
    options.add_argument("--mode", choices=["keep", "share", "swap"], default="keep", help="as reshard.mode")
    options.add_argument(
        "--offload", choices=["none", "grads", "optimizer", "all"], default="none", help="as reshard.offload"
    )
    options.add_argument(
        "--optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradient buffers and Adam's state, made by one step",
    )
    options.add_argument(
        "--repetitions", type=COUNT, default=5, help="of each kind: phase by phase, and in one go"
    )
    options.add_argument("--tokens", type=COUNT, default=32, help="generated for each prompt")
    options.add_argument("--prompts", type=COUNT, default=8, help="that each replica answers")
    options.add_argument("--utilization", type=SHARE, default=0.5, help="vLLM's gpu_memory_utilization")
    options.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    options.add_argument(
        "--verify",
        choices=["sample", "all", "none"],
        default="sample",
        help="slices that each reshard verifies, as reshard.verify",
    )
    options.add_argument("--window-mib", type=COUNT, default=256, help="as reshard.window_mib")
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
