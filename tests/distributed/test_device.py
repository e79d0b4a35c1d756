"""Each thing that is changed so that Megatron-Core runs on a CPU is needed: training fails without it."""

import os
import subprocess
import sys

import pytest
import torch

from tests.worlds import ROOT


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
