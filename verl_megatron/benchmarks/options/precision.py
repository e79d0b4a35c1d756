"""Log-probs, or scores, of one model in several dtypes: how far apart, and the memory and seconds of each.

MODEL is built frozen in one dtype after the other, and the same samples pass through it. The first dtype is
what the others are compared with. `fp8` computes the layers' products in fp8 from bfloat16 weights, as
engine.dtype=fp8 does. `fp8-weights` has these weights in fp8, too, as reference.dtype=fp8 does.

Samples are demonstrations of --data. Without it they are random tokens, which a trained model finds unlikely:
differences are larger then.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_megatron.launch.options import COUNT, Options, add_launcher_options

EXAMPLES = (
    "--hf MODEL --data demonstrations.jsonl",
    "--ranks 2 --hf MODEL --layout tp2sp --dtypes bfloat16 fp8 fp8-weights",
    "--hf REWARD_MODEL --head sequence --data demonstrations.jsonl",
)
# By name: engine.dtype, and the setting that asks for weights in fp8.
DTYPES = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "fp8": ("fp8", ""),
    "fp8-weights": ("bfloat16", "reference.dtype"),
}


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    add_launcher_options(options)
    options.add_argument("--hf", type=Path, required=True, metavar="DIR", help="a Hugging Face folder")
    options.add_argument("--data", metavar="FILE", help="demonstrations: prompts and responses")
    options.add_argument(
        "--head", choices=["lm", "sequence"], default="lm", help="sequence: a reward model's scores"
    )
    options.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16", "fp8-weights"], help="of the model"
    )
    options.add_argument("--layout", default="tp1", help="of the model, such as tp2pp2")
    options.add_argument("--rows", type=COUNT, default=64, help="samples")
    options.add_argument("--prompt", type=COUNT, default=512, help="tokens of a prompt")
    options.add_argument(
        "--response",
        type=COUNT,
        default=512,
        help="tokens of a response; of --data longer samples are left out",
    )
    options.add_argument("--tokens", type=COUNT, default=8192, help="of a micro-batch")
    options.add_argument("--repetitions", type=COUNT, default=3, help="of each pass")
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
