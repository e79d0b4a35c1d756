"""Time and memory to start on many prompts: what a run does with data.train before anything is built.

FOLDER/prompts.FORMAT is written first and reused by a later run: chats about arithmetic in verl's columns, of
60 to 120 tokens, from five sources. Each number of prompts is read in a process of its own, through the chat
template and tokenizer of --model, as the first rank of a host does it.

Seconds begin after the imports: to read and tokenize all, those of all cores together, and to draw the first
256 in a run's order. Memory is what the process's peak resident set grew by.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_megatron.launch.options import Options

EXAMPLES = (
    "outputs/prompts --model outputs/toy/model",
    "outputs/prompts --model MODEL --prompts 10000,1000000 --format jsonl --csv rows.csv",
)
FORMATS = ("parquet", "jsonl")


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument("folder", type=Path, metavar="FOLDER", help="of the prompts; they are written there")
    options.add_argument("--model", required=True, help="Hugging Face folder with the tokenizer")
    options.add_argument("--prompts", default="100000,1000000", metavar="N[,N]", help="how many to read")
    options.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the file")
    options.add_argument(
        "--only", action="store_true", help="measure in this process, and print the result as JSON"
    )
    options.add_argument("--csv", type=Path, help="write the rows to this file")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
