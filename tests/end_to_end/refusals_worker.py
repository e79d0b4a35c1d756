"""Runs the command line with one bad input after the other and reports how it ended: refusals_worker.py CASES.json.

CASES.json maps a name to [number of ranks, settings]. A line of JSON for each tells the exit code of each rank, what all of them
wrote, and whether vLLM (which a run starts before it builds a model) was imported. The processes are forked, so that the imports are paid for once.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import transformers

import verl_megatron.trainer  # noqa: F401
from parallel.device import _free_port
from verl_megatron.command_line import run_command
from verl_megatron.train import main

transformers.AutoTokenizer  # noqa: B018 (imported when it is first touched)
TIMEOUT_S = 60


def checked_main(config) -> None:
    try:
        main(config)
    finally:
        if "vllm" in sys.modules:
            print("vllm was imported", flush=True)


def fork(rank: int, settings: list[str], log: Path) -> int:
    if child := os.fork():
        return child
    try:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv[1:] = settings
        run_command(checked_main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def run_case(nproc: int, settings: list[str], log: Path) -> dict:
    """As torchrun does: when one rank has failed the others get SIGTERM."""
    os.environ |= {"WORLD_SIZE": str(nproc), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    running = {fork(rank, settings, log) for rank in range(nproc)}
    codes, deadline = [], time.monotonic() + TIMEOUT_S
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            running.discard(child)
            codes.append(os.waitstatus_to_exitcode(status))
            for other in running:
                os.kill(other, signal.SIGTERM)
        elif time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.02)
    return {"codes": codes, "text": log.read_text()}


if __name__ == "__main__":
    for name, (nproc, settings) in json.loads(Path(sys.argv[1]).read_text()).items():
        log = Path(tempfile.mkstemp(dir=Path(sys.argv[1]).parent)[1])
        print(json.dumps({"name": name} | run_case(nproc, settings, log)), flush=True)
