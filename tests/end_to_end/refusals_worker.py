"""Runs the command line with one bad input after the other: refusals_worker.py CASES.json.

CASES.json maps a name to [number of ranks, settings]. A line of JSON per case has the exit code of each
rank, their output, and whether vLLM was imported (a run starts it before it builds a model). Processes are
forked after the imports.
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers

import verl_megatron.trainer  # noqa: F401
from tests.forked import run_ranks
from verl_megatron.launch.command_line import run_command
from verl_megatron.train import main

transformers.AutoTokenizer  # noqa: B018 (imported when it is first touched)
TIMEOUT_S = 60


def checked_main(config) -> None:
    try:
        main(config)
    finally:
        if "vllm" in sys.modules:
            print("vllm was imported", flush=True)


def run_case(nproc: int, settings: list[str], log: Path) -> dict:
    command = ["train", *settings]
    codes = run_ranks(
        lambda: run_command(checked_main), command, nproc=nproc, stdout=log, timeout_s=TIMEOUT_S
    )
    return {"codes": codes, "text": log.read_text()}


if __name__ == "__main__":
    for name, (nproc, settings) in json.loads(Path(sys.argv[1]).read_text()).items():
        log = Path(tempfile.mkstemp(dir=Path(sys.argv[1]).parent)[1])
        print(json.dumps({"name": name} | run_case(nproc, settings, log)), flush=True)
