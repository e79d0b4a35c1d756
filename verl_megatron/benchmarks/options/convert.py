"""Speed and memory of `convert.py` compared with `cp`, on random weights of a published shape.

FOLDER/hf is written first, with bfloat16 layers of full width, and reused by a later run. Then these steps
alternate: `cp -r` of it with an fsync of each file, as in the converter; the same with as many `cp` processes
as the converter has; hf-to-mcore; mcore-to-hf; and verify of the first folder against the last. Before each
step, its input is dropped from the page cache.

The programs run as a user starts them, imports included. Memory and processor time are sampled over all
processes of a step. Memory is given as proportional set size, which counts shared pages once, and as resident
set size. The exit status is 1 if the round trip is not bit-identical or a conversion takes more than
--memory-gib.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from parallel.weights.shapes import SHAPES
from verl_megatron.launch.options import COUNT, Options, number, whole_number

EXAMPLES = (
    "outputs/convert --shape llama3-70b --layers 5",
    "outputs/convert --hf outputs/toy/model --workers 1 --repetitions 1 --settle-s 0",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of the model and what is made of it; three times the model's size has to be free",
    )
    options.add_argument(
        "--shape", default="llama3-70b", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    options.add_argument(
        "--hf", type=Path, metavar="DIR", help="folder with the config.json of a shape of its own"
    )
    options.add_argument(
        "--layers", type=whole_number(0), default=0, help="another number of layers than published"
    )
    options.add_argument(
        "--memory-gib", type=number(0.001, 2**20), default=4.0, help="the converter's cap in GiB"
    )
    options.add_argument(
        "--workers", type=COUNT, default=min(8, os.cpu_count() or 1), help="the converter's processes"
    )
    options.add_argument("--repetitions", type=COUNT, default=3, help="of each step")
    options.add_argument(
        "--settle-s",
        type=number(0, 3600),
        default=5.0,
        help="seconds of pause before each step, in which virtual machines hand freed memory back",
    )
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
