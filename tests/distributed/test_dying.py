"""A rank dies in the middle of a reshard: the others fail by name within seconds, nothing is left."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallel.runtime.store import reserved_port
from tests.end_to_end.launch import start
from tests.worlds import ROOT

NUM_RANKS = 4
WORKER = "tests.distributed.dying_worker"
START_S, END_S = 240, 60  # to import and to build; from the death until the last rank has ended


@dataclass(frozen=True, kw_only=True)
class EndedRank:
    code: int
    output: str


def run_without_launcher(folder: Path, *args: object) -> dict[int, EndedRank]:
    """Start the ranks one by one: torchrun would end the survivors before each has told what it saw."""
    holder = reserved_port()
    world = dict(
        WORLD_SIZE=str(NUM_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(holder.getsockname()[1]),
        OMP_NUM_THREADS="1",
        TORCH_COMPILE_DISABLE="1",
        PYTHONPATH=str(ROOT),
    )
    processes = []
    try:
        for rank in range(NUM_RANKS):
            environment = {**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"{rank}").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", WORKER, *map(str, args)],
                        cwd=ROOT,
                        env=environment,
                        stdout=output,
                        stderr=output,
                    )
                )
        first_end(processes)
        deadline = time.monotonic() + END_S
        codes = [process.wait(max(0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        holder.close()
    return {
        rank: EndedRank(code=code, output=(folder / f"{rank}").read_text()) for rank, code in enumerate(codes)
    }


def first_end(processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + START_S
    while all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline, f"no rank ended within {START_S} s"
        time.sleep(0.05)


# Where a rank dies, and what the others say of it.
DEATHS = {(2, "window"): r"window \d+ of \d+", (0, "verify"): ""}


@pytest.mark.parametrize("victim, where", DEATHS)
def test_survivors_say_where_the_reshard_stopped(tmp_path, victim, where):
    ranks = run_without_launcher(tmp_path, victim, where)
    assert ranks.pop(victim).code == -signal.SIGKILL
    for rank, ended in ranks.items():
        said = re.search(rf"^rank {rank} got ReshardError: (.*)", ended.output, re.MULTILINE)
        assert ended.code == 1 and said, ended.output
        assert re.search(rf"on rank {rank}\b", said[1]) and re.search(DEATHS[victim, where], said[1]), said[1]


def test_torchrun_ends_and_leaves_nothing_behind(tmp_path):
    started = start(NUM_RANKS, WORKER, "1", "posted", folder=tmp_path)
    ended = started.wait(timeout_s=START_S + END_S)
    assert ended.code != 0, ended.text
    assert ended.stderr.count("Signal 9 (SIGKILL)") == 1, ended.text  # torchrun's summary names the rank
    assert not started.leftovers()
