"""Latency of a small copy while optimizer state moves between a GPU and the host: `benchmark copies`."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from torch import Tensor

from parallel import device
from parallel.offload import PIECE_BYTES, copy_beside
from verl_megatron.benchmarks.options.copies import read_options

BESIDE_BYTES = 2**19


def beside(
    copies: list[tuple[Tensor, Tensor]], streams: list[torch.cuda.Stream], work: Callable[[], None]
) -> tuple[float, list[float]]:
    """Return the seconds until the copies (target, source) are done, and of each concurrent `work`."""
    torch.cuda.synchronize()
    waited = []
    with ThreadPoolExecutor(1) as thread:
        began = time.perf_counter()
        copied = thread.submit(copy_beside, copies, streams, torch.cuda.current_stream().record_event())
        while not (copied.done() and copied.result().query()):
            start = time.perf_counter()
            work()
            waited.append(time.perf_counter() - start)
        return time.perf_counter() - began, waited


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of one call, waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    pieces = read_options().gib * 2**30 // PIECE_BYTES
    if not device.is_gpu() or pieces < 1:
        print(
            "error: a GPU and at least --gib 1 are needed: on a CPU nothing is copied beside other work",
            file=sys.stderr,
        )
        return 2
    gpu = device.device()
    there = torch.randint(256, (pieces, PIECE_BYTES), dtype=torch.uint8, device=gpu)
    here = device.host_memory(there.numel(), owner=there).view(there.shape)
    small, small_here = (
        torch.zeros(BESIDE_BYTES, dtype=torch.uint8, device=gpu),
        torch.zeros(BESIDE_BYTES, dtype=torch.uint8).pin_memory(),
    )
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {there.numel() / 2**30:.0f} GiB in "
        f"pieces of {PIECE_BYTES / 2**20:.0f} MiB"
    )
    print(
        f"{'direction':12s}{'copies':14s}{'GB/s':>8s}{'wait, median ms':>18s}{'largest ms':>12s}{'waits':>8s}"
    )
    for direction, target, source, (small_target, small_source) in (
        ("to the host", here, there, (small_here, small)),
        ("to the GPU", there, here, (small, small_here)),
    ):

        def work(to: Tensor = small_target, of: Tensor = small_source) -> None:
            to.copy_(of, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        def line(how: str, whole: float, waited: list[float], direction: str = direction) -> None:
            print(
                f"{direction:12s}{how:14s}{there.numel() / whole / 1e9:8.1f}{median(waited) * 1e3:18.3f}"
                f"{max(waited) * 1e3:12.3f}{len(waited):8d}",
                flush=True,
            )

        copies = list(zip(target, source))
        beside(copies, streams, work)  # warms up
        line(
            "alone (floor)",
            seconds(lambda to=target, of=source: to.copy_(of, non_blocking=True)),
            [seconds(work) for _ in range(20)],
        )
        line("one stream", *beside(copies, [streams[0]], work))
        line("two in turns", *beside(copies, streams, work))
    if not torch.equal(there.cpu(), here):
        print("error: the copies differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
