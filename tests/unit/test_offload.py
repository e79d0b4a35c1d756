"""Tensors and their views survive a stay on the host; on GPUs their memory is free meanwhile."""

import mmap
import weakref

import pytest
import torch
from torch import Tensor

from parallel import device as host
from parallel.offload import Offload, Residence
from verl_megatron.checks.settings import check_config
from verl_megatron.config import TrainerConfig

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, NO_GPU])])
def device(request, monkeypatch) -> torch.device:
    """Staging buffers so small that most tensors take several copies, and a thread waits for the first."""
    monkeypatch.setattr("parallel.offload.PIECE_BYTES", 700)
    return torch.device(request.param)


def owned(device: torch.device, *, seed: int = 0) -> list[Tensor]:
    """Tensors of several dtypes and sizes with storages of their own, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((3,), (40, 25), (7, 11, 2), (0,), (1300,))
    return [
        torch.randn(size, generator=generator).to(device, dtype)
        for size in sizes
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]


def nbytes(tensors: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def go_round(mover: Offload, **tensors: list[Tensor]) -> None:
    mover.offload_async(**tensors)
    mover.wait_offload()
    mover.onload_async()
    mover.wait()


def test_kept_tensors_and_their_views_come_back_bitwise_and_dropped_ones_zeroed(device):
    keep, drop, stay = owned(device, seed=1), owned(device, seed=2), owned(device, seed=3)
    want, left = [tensor.clone() for tensor in keep], [tensor.clone() for tensor in stay]
    views = [
        (tensor.view(-1)[1:-1], expected.view(-1)[1:-1])
        for tensor, expected in zip(keep, want)
        if tensor.numel()
    ]
    sizes = nbytes(keep), nbytes(drop), nbytes(stay)
    mover = Offload(device)
    for _ in range(3):
        mover.offload_async(keep=keep, drop=drop, stay=stay)
        assert mover.residence is Residence.LEAVING and (nbytes(keep), nbytes(drop)) == sizes[:2]
        mover.wait_offload()
        assert (
            mover.residence is Residence.ON_HOST
            and not any(nbytes(keep) + nbytes(drop))
            and nbytes(stay) == sizes[2]
        )
        mover.onload_async()
        assert mover.residence is Residence.RETURNING and not any(tensor.any() for tensor in drop)
        mover.wait()
        assert mover.residence is Residence.ON_DEVICE and (nbytes(keep), nbytes(drop)) == sizes[:2]
        assert all(torch.equal(a, b) for a, b in [*zip(keep, want), *views, *zip(stay, left)])
        for tensor in drop + keep + want:  # the next round has other contents
            tensor.add_(1)
    assert mover.device_bytes == sum(sizes[0] + sizes[1]) and mover.host_bytes == sum(sizes[0])


def test_a_storage_moves_once_and_not_at_all_if_something_of_it_stays(device):
    buffer, model = torch.arange(1000.0, device=device), torch.arange(500.0, device=device)
    mover = Offload(device)
    mover.offload_async(
        keep=[buffer[:10], model[:7], buffer[500:].view(2, -1), buffer],
        drop=[buffer[20:], model],
        stay=[model[100:200]],
    )
    assert mover.device_bytes == mover.host_bytes == 4000
    mover.wait_offload()
    assert nbytes([buffer, model]) == [0, 2000]
    mover.onload_async()
    mover.wait()
    assert torch.equal(buffer.cpu(), torch.arange(1000.0)) and torch.equal(model.cpu(), torch.arange(500.0))


def test_tensors_that_come_and_go_between_releases(device):
    mover, first = Offload(device), owned(device)
    go_round(mover, keep=first[:4], drop=[], stay=[])
    before = mover.host_bytes
    go_round(mover, keep=first, drop=[], stay=[])
    largest = sum(nbytes(first))
    assert before < mover.host_bytes == largest
    want = [tensor.clone() for tensor in first]
    go_round(mover, keep=first[::-1], drop=[], stay=[])  # now a storage lies in both blocks of host memory
    assert all(torch.equal(a, b) for a, b in zip(first, want))
    held = weakref.ref(first[1].untyped_storage())
    del first
    assert held() is None, "a tensor that its owner let go of is kept alive"
    second = owned(device, seed=4)[:5]  # new tensors in the place of the old, as after loading a checkpoint
    want = [tensor.clone() for tensor in second]
    go_round(mover, keep=second, drop=[], stay=[])
    assert all(torch.equal(a, b) for a, b in zip(second, want))
    assert mover.device_bytes == sum(nbytes(second)) and mover.host_bytes == largest


def test_a_call_with_nothing_to_do_does_nothing(device):
    mover, keep, drop = Offload(device), [torch.ones(5, device=device)], [torch.ones(6, device=device)]
    mover.wait_offload()
    mover.onload_async()
    mover.wait()
    assert mover.residence is Residence.ON_DEVICE and (mover.device_bytes, mover.host_bytes) == (0, 0)
    for _ in range(2):
        mover.offload_async(keep=keep, drop=drop, stay=[])
    for _ in range(2):
        mover.wait_offload()
    mover.offload_async(keep=[], drop=[], stay=[])
    assert mover.residence is Residence.ON_HOST and nbytes(keep + drop) == [0, 0]
    for _ in range(2):
        mover.onload_async()
    for _ in range(2):
        mover.wait()
    assert torch.equal(keep[0].cpu(), torch.ones(5)) and not drop[0].any()


def test_a_release_may_be_called_off_and_a_restore_cut_short(device):
    mover, keep, drop = Offload(device), owned(device, seed=1), [torch.ones(6, device=device)]
    want = [tensor.clone() for tensor in keep]
    mover.offload_async(keep=keep, drop=drop, stay=[])
    mover.onload_async()
    mover.wait_offload()  # nothing is leaving any more
    mover.wait()
    assert drop[0].all() and all(torch.equal(a, b) for a, b in zip(keep, want))
    for _ in range(3):
        mover.offload_async(keep=keep, drop=drop, stay=[])
        mover.wait_offload()
        mover.onload_async()
    mover.wait()
    assert not drop[0].any() and all(torch.equal(a, b) for a, b in zip(keep, want))


def test_waiting_for_what_nobody_brings_back_is_an_error(device):
    mover = Offload(device)
    mover.offload_async(keep=[torch.ones(3, device=device)], drop=[], stay=[])
    with pytest.raises(AssertionError, match="LEAVING; call onload_async first"):
        mover.wait()
    mover.wait_offload()
    with pytest.raises(AssertionError, match="ON_HOST; call onload_async first"):
        mover.wait()


class Runtime:
    """In place of the CUDA runtime: what was registered, and an answer."""

    def __init__(self, failure: int = 0):
        self.failure, self.registered = failure, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.registered[address] = size
        return self.failure

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.registered[address]


def test_host_memory_is_pinned_until_its_owner_is_gone(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(host, "is_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    owners = [Offload(torch.device("cpu")) for _ in range(2)]
    memories = [host.host_memory(size, owner) for size, owner in zip((3, 9000), owners)]
    assert {memory.data_ptr(): len(memory) for memory in memories} == runtime.registered and not any(
        address % mmap.PAGESIZE for address in runtime.registered
    )
    memories[1].fill_(7)
    view = memories[0][1:]
    del memories[0], owners[0]
    assert list(runtime.registered.values()) == [9000] and not view.any() and (memories[0] == 7).all()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(failure=2))
    with pytest.raises(
        ValueError,
        match=r"cannot be pinned \(CUDA error 2\); set reshard.offload=none and run.async_save=false",
    ):
        host.host_memory(8, owners[0])


@pytest.mark.gpu
@NO_GPU
def test_on_a_gpu_the_memory_is_free_and_copies_run_beside_and_in_order():
    device, mebibyte = torch.device("cuda:0"), 2**20
    keep, drop = (
        [torch.empty(128 * mebibyte, device=device) for _ in range(4)],
        [torch.empty(256 * mebibyte, device=device)],
    )
    busy, mover = torch.randn(8192, 8192, device=device), Offload(device)

    def delay() -> None:
        """Keep the stream busy, so that what follows is not done when the host goes on."""
        for _ in range(20):
            busy.mul_(busy @ busy > 0)

    delay()  # libraries take their own memory at first use
    for round_ in range(3):
        for tensor in (*keep, *drop):
            tensor.fill_(-1)
        torch.cuda.empty_cache()
        free_before = torch.cuda.mem_get_info()[0]
        delay()
        for number, tensor in enumerate(keep):
            tensor.fill_(10 * round_ + number)  # the copies have to come after this
        mover.offload_async(keep=keep, drop=drop, stay=[busy])
        mover.wait_offload()
        assert mover.device_bytes == 3072 * mebibyte
        assert (
            abs(torch.cuda.mem_get_info()[0] - free_before - mover.device_bytes) <= 64 * mebibyte
        )  # the driver takes some for a new stream
        taken = torch.full(
            (768 * mebibyte,), 7.0, device=device
        )  # memory that comes back with work still queued on it
        delay()
        taken.fill_(9)
        del taken
        mover.onload_async()
        mover.wait()
        assert [(tensor == 10 * round_ + number).all().item() for number, tensor in enumerate(keep)] == [
            True
        ] * 4
        assert not drop[0].any()
    assert all(block.is_pinned() for block in mover._blocks) and mover.host_bytes == 2048 * mebibyte


@pytest.mark.parametrize(
    ("what", "sleep", "problem"), [("all", True, False), ("none", False, False), ("grads", False, True)]
)
def test_offloading_needs_a_vllm_that_sleeps(what, sleep, problem):
    config = TrainerConfig()
    config.reshard.offload, config.rollout.sleep = what, sleep
    found = [text for text in check_config(config, world_size=1) if "reshard.offload" in text]
    assert bool(found) is problem and all("rollout.sleep=false" in text for text in found)


@pytest.mark.gpu
@NO_GPU
def test_copies_of_the_work_beside_come_in_between():
    """Not after all of what returns, as they do where that is queued on one stream."""
    device = host.device()
    state, inputs = [torch.ones(2**26, device=device) for _ in range(16)], torch.arange(2**20).pin_memory()
    mover = Offload(device)
    go_round(mover, keep=state, drop=[], stay=[])
    mover.offload_async(keep=state, drop=[], stay=[])
    mover.wait_offload()
    cleared = [torch.zeros(2**26, device=device) for _ in state]
    del cleared  # the memory that is taken again
    mover.onload_async()
    for _ in range(3):
        assert torch.equal(inputs.to(device, non_blocking=True).cpu(), inputs)
    assert state[-1][-1].item() == 0, "everything is back already"
    mover.wait()
    assert all(tensor.all() for tensor in state)
