"""`plan`: its arguments are read and checked before the modules that plan are imported."""

import argparse
import sys
from pathlib import Path

from verl_megatron.commands.plan.options import parser
from verl_megatron.config.gpus import machine_here
from verl_megatron.launch.options import check_output, words_of
from verl_megatron.planner.machine import find_machine

MAX_GPUS = 2**12


def run(arguments: list[str]) -> int:
    options = parser()
    given = options.parse_intermixed_args(arguments)
    given.gpu = given.gpu or machine_here()
    try:
        _check(given)
        machine = find_machine(given.gpu)
        from verl_megatron.commands.plan.planning import plan

        return plan(given, machine)
    except (ValueError, OSError) as error:
        options.error(words_of(error))


def _check(given: argparse.Namespace) -> None:
    """Raise ValueError if the options contradict each other, or --json cannot be written."""
    if given.gpus > MAX_GPUS:
        raise ValueError(
            f"--gpus {given.gpus} is more than the {MAX_GPUS} that are planned for; choose fewer"
        )
    if given.json and given.compare:
        raise ValueError(f"--json {given.json} takes candidates, and --compare has none; leave one out")
    if given.json:
        check_output("--json", given.json, inputs=[Path(given.model, "config.json"), given.gpu])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
