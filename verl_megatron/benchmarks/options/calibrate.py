"""Measures this machine's rates for the planner and writes them for `verl-megatron plan --gpu FILE`.

Measured are matrix products and attention in bfloat16, copies on the device and to pinned host memory, and
the time in which a process launches a layer's work. With several ranks, messages and collectives are measured
at several sizes. With one process, the links are those of the most similar built-in machine; on a CPU, so are
the GPU figures. Every rank measures, and the slowest counts.

It takes about 20 times --seconds, with several ranks up to 60 times, and half a minute to start. Start it on
all GPUs of a host, while nothing else runs there. What was measured is printed with its units. The file is
for `verl-megatron plan --gpu FILE` and for `--dry-run --gpu FILE` of a run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_megatron.launch.options import Options, add_launcher_options, check_output, number

EXAMPLES = (
    "--ranks 8 machine.json",
    "quick.json --seconds 0.1",
)


def parser() -> Options:
    options = Options(description=__doc__, examples=EXAMPLES)
    add_launcher_options(options)
    options.add_argument("out", type=Path, metavar="FILE", help="file to write, ending in .json")
    options.add_argument(
        "--seconds",
        type=number(0.001, 60),
        default=1.0,
        help="seconds of each measurement, up to 60; a long load lowers clocks as training does",
    )
    return options


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, those of the process if None."""
    options = parser()
    given = options.parse_args(arguments)
    try:
        check_output("FILE", given.out)
    except ValueError as error:
        options.error(str(error))
    if given.out.suffix != ".json":
        options.error(f"FILE {given.out} must end in .json; rename it")
    return given
