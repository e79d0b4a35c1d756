"""Options of the benchmarks, a file each; they are read without torch.

Each file has `read_options(arguments)`, which exits with a message if they are wrong, or shows the help. Its
docstring is the help's text.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel.weights.shapes import SHAPES
from verl_megatron.launch.options import LAUNCHER_OPTIONS, is_rank


def add_model(parser: argparse.ArgumentParser, *, read: str = "its weights are not read") -> None:
    """Add the options of the model: a published shape or a folder, of which `read` says what is read."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    model.add_argument("--hf", type=Path, metavar="DIR", help=f"a folder with a config.json; {read}")


def read_run(arguments: Sequence[str], *, text: str) -> None:
    """Check the options and the recipe of a whole run; show what is asked for, and exit.

    Args:
        text: the help.

    Raises:
        ValueError: wrong options, or settings that cannot be read.
    """
    show_help(arguments, text=text)
    from verl_megatron.launch.command_line import settings_of

    known, _ = settings_of(list(arguments), () if is_rank() else LAUNCHER_OPTIONS)
    if known.cfg or known.info:
        sys.exit()  # Hydra has printed it


def show_help(arguments: Sequence[str], *, text: str) -> None:
    """Show `text` and exit, if help is asked for."""
    if {"-h", "--help"} & set(arguments):
        print(text)
        sys.exit()
