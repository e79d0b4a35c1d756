"""How ranks meet; and each thing that is changed so that Megatron-Core runs on a CPU is needed."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import device
from tests.worlds import ROOT, run_world


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without GPUs")
def test_every_cpu_patch_is_needed(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/distributed/device_worker.py"), str(tmp_path)]
    done = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        timeout=180,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "every patch is needed" in done.stdout


def test_hosts_that_count_attempts_differently_meet(tmp_path):
    """torchrun counts an attempt only on hosts where a rank of their own has failed."""
    output = run_world("tests/distributed/restarted_worker.py", 2, tmp_path)
    assert output.count("met") == 2, output


@pytest.mark.parametrize("came", [(), (1,), (2,), (1, 2)])
def test_ranks_do_not_take_an_earlier_attempt_for_theirs(came):
    """A store still has the name of an attempt in which some ranks had come when it ended."""
    shared: Any = dist.TCPStore("127.0.0.1", 0, is_master=True)
    shared.set(device._NAME, "earlier")
    for rank in came:
        shared.add(f"earlier/{rank}", 1)
    if len(came) == 2:
        shared.set("earlier/complete", "")
    with ThreadPoolExecutor(3) as ranks:
        others = [ranks.submit(device._meet, shared.clone(), rank, 3) for rank in (1, 2)]
        time.sleep(3 * device.MEET_S)
        assert not any(other.done() for other in others)
        first = ranks.submit(device._meet, shared.clone(), 0, 3)
        names = {each.result(60) for each in (first, *others)}
    assert len(names) == 1 and "earlier" not in names
