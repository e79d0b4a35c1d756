"""Forward passes and optimizer steps of a model without vLLM: seconds, FLOP/s, MFU and memory.

FLOP/s are compared with this GPU's own matrix product. All samples have the same length; --rows is the number
per data-parallel rank and optimizer step. --steps steps run in sequence: the new weights of each are gathered
concurrently with the next, and after the last, as in an iteration of a run.

MFU counts matrix products and the causal half of attention, a backward pass twice. It leaves out the input
embedding, logits of unneeded tokens, and recomputation. With --baseline, a step with full logits and
Megatron-Core's own cross-entropy is measured alternately.

With --samples-per-prompt, samples are groups, which `--set shared_prompts=true` packs with their prompt once.
Its tokens and FLOPs then count once, too; the seconds are those of the same samples.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from parallel.weights.shapes import SHAPES
from verl_megatron.launch.options import COUNT, Options, add_launcher_options, whole_number

EXAMPLES = (
    "--ranks 4 --shape llama3-8b --layout tp2sp --set dtype=fp8",
    "--rows 32 --prompt 4096 --samples-per-prompt 8 --set shared_prompts=true",
    "--ranks 2 --hf outputs/toy/model --layout tp2 --rows 8 --prompt 16 --response 16",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    add_launcher_options(options)
    options.add_argument(
        "--shape", default="llama3-8b", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    options.add_argument(
        "--hf", type=Path, metavar="DIR", help="a folder with a config.json, instead of a published shape"
    )
    options.add_argument(
        "--layers", type=whole_number(0), default=0, help="another number of layers than published"
    )
    options.add_argument("--layout", default="tp1", help="of the model, such as tp2pp2")
    options.add_argument("--rows", type=COUNT, default=64, help="samples of a data-parallel rank and step")
    options.add_argument("--prompt", type=COUNT, default=512, help="tokens of a prompt")
    options.add_argument("--response", type=COUNT, default=512, help="tokens of a response")
    options.add_argument(
        "--samples-per-prompt",
        type=COUNT,
        default=1,
        metavar="N",
        help="rows of one prompt; a divisor of them",
    )
    options.add_argument(
        "--set", nargs="*", action="extend", default=[], metavar="SETTING=VALUE", help="of the section engine"
    )
    options.add_argument(
        "--steps", type=COUNT, default=4, help="optimizer steps in a row, an iteration's mini-batches"
    )
    options.add_argument("--repetitions", type=COUNT, default=5, help="of each measurement")
    options.add_argument(
        "--no-train", action="store_true", help="forward passes only: no gradients, no optimizer"
    )
    options.add_argument(
        "--baseline", action="store_true", help="measure full logits and Megatron-Core's loss as well"
    )
    options.add_argument("--profile", action="store_true", help="list the kernels that take the time")
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
