"""Latency of a small copy while optimizer state moves between a GPU and the host.

Compares the streams of parallel/offload.py with a single stream. The floor is the small copy alone; for the
state's rate it is one large copy alone. Each small copy is of half a MiB of pinned memory and is waited for.
"""

import argparse
from collections.abc import Sequence

from verl_megatron.launch.options import COUNT, Options

EXAMPLES = (
    "",
    "--gib 4",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    options.add_argument("--gib", type=COUNT, default=16, help="GiB of state")
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    return parser().parse_args(arguments)
