"""What only GPUs reach: transformer-engine, half precision, NCCL. Skipped where there are none."""

import pytest
import torch

from tests.worlds import run_world

RANKS = next((n for n in (4, 2, 1) if n <= torch.cuda.device_count()), 0)
pytestmark = pytest.mark.skipif(not RANKS, reason="no GPU on this machine: run `python -m pytest tests/gpu` on one")


@pytest.mark.gpu
def test_models_and_training_under_every_layout():
    assert "all passed" in run_world("tests/gpu/models_worker.py", RANKS, timeout=600)


@pytest.mark.gpu
@pytest.mark.skipif(RANKS < 4, reason="the pairs of layouts need four GPUs")
def test_reshard_over_nccl():
    assert "all reshard checks passed" in run_world("tests/distributed/reshard_worker.py", 4, timeout=300)
