"""GPUs of the worlds that one command starts."""

import pytest

from parallel import device
from verl_megatron.launch import worlds


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "visible_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_world_gets_its_own(four_gpus, monkeypatch):
    assert worlds._gpus(range(3)) == {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    assert worlds._gpus((3,)) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5")
    assert worlds._gpus((1,)) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_too_few_are_refused(four_gpus):
    with pytest.raises(ValueError, match="ranks to 4 need 5 GPUs, and this host has 4; name lower ranks"):
        worlds._gpus((3, 4))


def test_a_fault_is_started_again_and_an_error_is_not():
    statuses = (0, 1, 2, 75, 130, 134, 137, 139, 143, -9, -15)
    assert [status for status in statuses if worlds._is_fault(status)] == [75, 134, 137, 139, -9]
