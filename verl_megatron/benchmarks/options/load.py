"""Time to load a rank's slices of a Hugging Face folder: byte ranges, as in training, or the whole model.

FOLDER/hf is one file of random bfloat16 weights (up to 4 GiB), written first and reused by a later run. Two
methods alternate, each in its own process and with the file dropped from the page cache:

- `load_parameters` fills a rank's Megatron-Core parameters from byte ranges of the file.
- `AutoModelForCausalLM.from_pretrained` loads the model, from which the same parameters are sliced. It maps
  the file too, and copies all of it if --dtype is not the file's.

Times begin after the imports. Bytes read are the process's disk reads. Memory is the process's peak resident
set, including mapped pages of the file, and its peak anonymous memory alone. The exit status is 1 if the two
methods fill the parameters with different bits.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from parallel.weights.shapes import SHAPES
from verl_megatron.launch.options import COUNT, Options, whole_number

EXAMPLES = (
    "outputs/load --shape llama3-8b --layers 4 --tp 4 --rank 1",
    "outputs/load --hf outputs/toy/model --layers 2 --tp 2 --repetitions 1",
)
RANGES, WHOLE = "byte ranges", "from_pretrained and slicing"  # names of the methods


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument("folder", type=Path, metavar="FOLDER", help="of the model; it is written there")
    options.add_argument(
        "--shape", default="llama3-8b", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    options.add_argument(
        "--hf", type=Path, metavar="DIR", help="folder with the config.json of a shape of its own"
    )
    options.add_argument("--layers", type=COUNT, default=4, help="of the model")
    options.add_argument("--tp", type=COUNT, default=4, help="tensor-parallel ranks")
    options.add_argument("--rank", type=whole_number(0), default=1, help="whose slices are read")
    options.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of the parameters; the file is bfloat16",
    )
    options.add_argument("--repetitions", type=COUNT, default=3, help="of each method")
    options.add_argument(
        "--only",
        choices=(RANGES, WHOLE),
        help="measure one method once in this process, and print its result as JSON",
    )
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
