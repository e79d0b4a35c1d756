"""Copy and checksum kernels against torch on a GPU, then their speed.

python tests/gpu/kernels_check.py [--gib 4] [--only-check]
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # for a script, Python looks in the script's folder only
from parallel.reshard.checksum import checksum
from parallel.reshard.kernels import Checksums, Copies
from parallel.reshard.tiles import CHECKSUM, COPY, Tiling

# Letters: R rows, C columns.

SMALL = Tiling(rows=2, row_bytes=256, steps=2)  # many borders between tiles in little memory
DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
WARM_UPS, REPETITIONS = 2, 9

COPY_VARIANTS = [
    COPY,
    replace(COPY, rows=4),
    replace(COPY, rows=16),
    replace(COPY, rows=16, num_warps=8),
    replace(COPY, rows=4, num_warps=2),
    replace(COPY, rows=4, row_bytes=4096),
    replace(COPY, rows=16, row_bytes=1024),
    replace(COPY, cache_modifier=".cg"),
    replace(COPY, cache_modifier=".cv"),
    replace(COPY, eviction_policy="evict_first"),
]
CHECKSUM_VARIANTS = [
    CHECKSUM,
    replace(CHECKSUM, steps=1),
    replace(CHECKSUM, steps=16),
    replace(CHECKSUM, rows=4, steps=8),
    replace(CHECKSUM, rows=4, steps=16, stages=3),
    replace(CHECKSUM, steps=8, stages=2),
    replace(CHECKSUM, row_bytes=4096, num_warps=8),
    replace(CHECKSUM, eviction_policy="evict_first"),
]


class Memory:
    """Random bytes; sources lie in the first half, destinations in the second."""

    def __init__(self, *, seed: int, size: int, device: torch.device):
        self.rng = np.random.default_rng(seed)
        self.bytes = torch.from_numpy(self.rng.integers(0, 256, size, dtype=np.uint8)).to(device)
        self.next = size // 2

    def view(self, start: int, shape: tuple[int, int], stride: int, dtype: torch.dtype) -> Tensor:
        """[R, C] from byte `start` on; the stride in elements."""
        return (
            self.bytes[start : start + (len(self.bytes) - start) // 8 * 8]
            .view(dtype)
            .as_strided(shape, (stride, 1))
        )

    def pair(self) -> tuple[Tensor, Tensor]:
        """Random source and destination: any element size, alignment and strides, empty ones included."""
        size = int(self.rng.choice([1, 2, 4, 8]))
        unit = max(
            size, int(self.rng.choice([1, 2, 4, 8, 16, 16]))
        )  # what all lengths are multiples of, at least
        rows, width = (
            int(self.rng.choice([0, 1, 1, 3, 8, 17, 50])),
            unit * int(self.rng.choice([1, 1, 2, 5, 16, 17, 80])),
        )
        source_pad, destination_pad = (unit * int(self.rng.choice([0, 0, 1, 3])) for _ in range(2))
        source = unit * int(self.rng.integers(0, len(self.bytes) // 4 // unit))
        destination = unit * (-(-self.next // unit) + int(self.rng.integers(0, 4)))
        self.next = destination + rows * (width + destination_pad)
        read, write = (
            self.view(start, (rows, width // size), (width + pad) // size, DTYPES[size])
            for start, pad in ((source, source_pad), (destination, destination_pad))
        )
        return write, read

    def after(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """What all the bytes would be after plain copies."""
        before = self.bytes.clone()
        for destination, source in pairs:
            destination.copy_(source)
        after = self.bytes.clone()
        self.bytes.copy_(before)
        return after


def check_copies(device: torch.device, tiling: Tiling, *, seed: int) -> None:
    """Random rectangles; no other byte changes. A replay copies what the sources hold by then."""
    memory = Memory(seed=seed, size=2**23, device=device)
    pairs = [memory.pair() for _ in range(200)]
    cast = torch.zeros(7, 9, dtype=torch.bfloat16, device=device), torch.randn(7, 9, device=device)
    copies = Copies(
        [*pairs, cast], device=device, groups=[number % 3 for number in range(201)], tiling=tiling
    )
    for _ in range(2):
        memory.bytes[: len(memory.bytes) // 2].random_(0, 256)
        cast[1].normal_()
        expected = memory.after(pairs)
        copies.run()
        assert torch.equal(memory.bytes, expected), f"copies with {tiling} differ from torch's"
        assert torch.equal(cast[0], cast[1].bfloat16())


def check_checksums(device: torch.device, tiling: Tiling, *, seed: int) -> None:
    """Random slices, and a change of one bit in each."""
    memory = Memory(seed=seed, size=2**23, device=device)
    pairs = [memory.pair() for _ in range(200)]
    slices = [source for _, source in pairs if source.numel()]
    slices += [
        torch.randn(300, 5000, device=device).to(dtype)[3:, 64:] for dtype in DTYPES.values()
    ]  # more than a tile in both directions
    sums = Checksums(slices, device=device, tiling=tiling)
    for _ in range(2):
        assert torch.equal(sums.run(), torch.stack([checksum(slice_RC) for slice_RC in slices])), (
            f"checksums with {tiling} differ from the formula's"
        )
        memory.bytes[: len(memory.bytes) // 2].bitwise_xor_(1)


def check_stream(device: torch.device) -> None:
    """Both work on the current stream: after what it does before, late as that may be."""
    source, destination = torch.zeros(64, 1024, device=device), torch.zeros(64, 2048, device=device)[:, :1024]
    copies, sums = Copies([(destination, source)], device=device), Checksums([destination], device=device)
    copies.run(), sums.run()  # compiled before the sleep
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(100_000_000)  # cycles
        source.fill_(3)
        copies.run()
        sum_now = sums.run()
    torch.cuda.synchronize(device)
    assert (destination == 3).all() and sum_now.item() == checksum(destination).item()


def check_peer(device: torch.device, peer: torch.device) -> None:
    """Sources in another GPU's memory."""
    memory, wide = torch.zeros(512, 3000, device=device), torch.randn(512, 4000, device=peer)
    enable_peer_access(device, peer)
    Copies([(memory[:, :2048], wide[:, 1024:3072]), (memory[:, 2048:], wide[:, 3:955])], device=device).run()
    assert torch.equal(memory.cpu(), torch.cat([wide[:, 1024:3072], wide[:, 3:955]], dim=1).cpu())
    assert Checksums([wide[:, 3:955]], device=device).run().item() == checksum(wide[:, 3:955]).item()


def check(device: torch.device) -> None:
    """All of the above on `device`, which names its index; raises AssertionError."""
    for seed, tiling in enumerate((COPY, SMALL)):
        check_copies(device, tiling, seed=seed)
    for seed, tiling in enumerate((CHECKSUM, SMALL, replace(CHECKSUM, stages=2))):
        check_checksums(device, tiling, seed=seed)
    check_stream(device)
    if torch.cuda.device_count() > 1:
        check_peer(device, torch.device("cuda", 1 - device.index))


def enable_peer_access(device: torch.device, peer: torch.device) -> None:
    """torch maps the GPUs' memories into each other when it first copies between them."""
    torch.zeros(1, device=device).copy_(torch.ones(1, device=peer))
    torch.zeros(1, device=peer).copy_(torch.ones(1, device=device))
    torch.cuda.synchronize(device), torch.cuda.synchronize(peer)


def milliseconds(run: Callable[[], object]) -> float:
    """Median on the GPU, which sleeps until all is launched."""
    times = []
    for repetition in range(WARM_UPS + REPETITIONS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # cycles
        start.record()
        run()
        end.record()
        end.synchronize()
        if repetition >= WARM_UPS:
            times.append(start.elapsed_time(end))
    return float(np.median(times))


def report(what: str, how: str, num_bytes: int, run: Callable[[], object], note: str = "") -> None:
    ms = milliseconds(run)
    print(f"{what:<28} {how:<44} {ms:9.3f} ms {num_bytes / ms / 1e6:9.1f} GB/s  {note}", flush=True)


def named(tiling: Tiling, default: Tiling) -> str:
    """What differs from the default."""
    return (
        " ".join(
            f"{name}={value}" for name, value in asdict(tiling).items() if value != getattr(default, name)
        )
        or "default"
    )


def time_copies(
    what: str, pairs: list[tuple[Tensor, Tensor]], *, device: torch.device, variants: list[Tiling]
) -> None:
    """Copies of bf16 bits, NaN included. GB/s count a copied byte once; memory moves it twice."""
    num_bytes = sum(source.numel() * source.element_size() for _, source in pairs)
    destinations, sources = [destination for destination, _ in pairs], [source for _, source in pairs]
    report(
        what,
        "torch",
        num_bytes,
        lambda: (
            torch._foreach_copy_(destinations, sources)
            if len(pairs) > 1
            else destinations[0].copy_(sources[0])
        ),
    )
    for tiling in variants:
        for destination in destinations:
            destination.zero_()
        start = time.perf_counter()
        copies = Copies(pairs, device=device, tiling=tiling)
        torch.cuda.synchronize(device)
        report(
            what,
            named(tiling, COPY),
            num_bytes,
            copies.run,
            f"prepared in {1e3 * (time.perf_counter() - start):.0f} ms",
        )
        assert all(
            torch.equal(destination.view(torch.int16), source.to(device).view(torch.int16))
            for destination, source in pairs[:: max(1, len(pairs) // 50)]
        )


def time_checksums(what: str, slices: list[Tensor], *, device: torch.device) -> None:
    num_bytes = sum(slice_RC.numel() * slice_RC.element_size() for slice_RC in slices)
    report(what, "torch", num_bytes, lambda: [checksum(slice_RC) for slice_RC in slices])
    expected = torch.stack([checksum(slice_RC) for slice_RC in slices])
    for tiling in CHECKSUM_VARIANTS:
        sums = Checksums(slices, device=device, tiling=tiling)
        report(what, named(tiling, CHECKSUM), num_bytes, sums.run)
        assert torch.equal(sums.run(), expected)


def noise(rows: int, columns: int, device: torch.device) -> Tensor:
    """bf16 [rows, columns] of random bits."""
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns // 2), dtype=torch.int32, device=device).view(
        torch.bfloat16
    )


def time_all(device: torch.device, *, gib: int) -> None:
    rows = gib * 2**30 // 4096  # of 4 KiB
    source, destination = (
        noise(rows, 2048, device),
        torch.zeros(rows, 2048, dtype=torch.bfloat16, device=device),
    )
    halves = destination.view(-1)[: destination.numel() // 2].view(rows, 1024)
    time_copies("copy, dense", [(destination, source)], device=device, variants=COPY_VARIANTS)
    time_copies(
        "copy, 2 of 4 KiB to dense", [(halves, source[:, 1024:])], device=device, variants=COPY_VARIANTS[:4]
    )
    time_copies(
        "copy, 2 of 4 KiB both",
        [(destination[:, :1024], source[:, 1024:])],
        device=device,
        variants=COPY_VARIANTS[:1],
    )
    time_copies(
        "copy, 2-byte alignment",
        [(destination[:, :1023], source[:, 1:1024])],
        device=device,
        variants=COPY_VARIANTS[:1],
    )
    pieces = list(zip(destination[:, :1024].tensor_split(5000), source[:, 1024:].tensor_split(5000)))
    time_copies("copy, 5,000 rectangles", pieces, device=device, variants=COPY_VARIANTS[:1])
    time_checksums("checksum, rows of 4 KiB", [source], device=device)
    time_checksums("checksum, 1 of 4 KiB", [source[:, 512:1024]], device=device)
    time_checksums("checksum, 500 slices", list(source.tensor_split(500)), device=device)
    if torch.cuda.device_count() > 1:
        peer = torch.device("cuda", 1 - device.index)
        enable_peer_access(device, peer)
        far = source.to(peer)
        torch.cuda.synchronize(peer)
        time_copies("copy from peer, dense", [(destination, far)], device=device, variants=COPY_VARIANTS)
        time_copies(
            "copy from peer, 2 of 4 KiB", [(halves, far[:, 1024:])], device=device, variants=COPY_VARIANTS
        )


def check_then_time(parser: argparse.ArgumentParser, what: str, check: Callable, time_all: Callable) -> None:
    """Run `check(device)`, then unless --only-check `time_all(device, **options)`, on the first GPU."""
    parser.add_argument("--only-check", action="store_true", help="time nothing")
    options = vars(parser.parse_args())
    only_check, device = options.pop("only_check"), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    check(device)
    print(f"all {what} passed", flush=True)
    if not only_check:
        time_all(device, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gib", type=int, default=4, help="GiB of the timed source; the GPU holds two of them"
    )
    check_then_time(parser, "kernel checks", check, time_all)


if __name__ == "__main__":
    main()
