"""This machine's rates, measured for the planner: `benchmark calibrate`."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import Architecture
from parallel.weights.shapes import shape
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.benchmarks.options.calibrate import read_options
from verl_megatron.config import EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.planner.machine import LAYER_SHARE, MACHINES, Machine
from verl_megatron.planner.preflight import machine_here
from verl_megatron.roles.engine import Engine, EngineOptions

MIB = 2**20
MOST_REPEATS = 10_000
# Rows, inner and outer size: an 8B model's layers, whole and split; on a CPU, sizes that take milliseconds.
PRODUCTS = {
    True: [(8192, 4096, 4096), (8192, 4096, 14_336), (8192, 14_336, 4096), (8192, 8192, 8192)],
    False: [(256, 256, 256), (512, 512, 512)],
}
# rows, heads, tokens, head size
ATTENTION = {
    True: [(8, 32, 1024, 128), (2, 32, 4096, 128), (1, 32, 8192, 128)],
    False: [(1, 4, 256, 64)],
}
COPY_BYTES = {True: 1024 * MIB, False: 16 * MIB}
# Models with negligible compute per layer: additional layers only add launch time. Each micro-batch is one
# sample.
LAUNCHED = dict(hidden_size=256, intermediate_size=512, num_heads=2, num_kv_heads=1, vocab_size=256)
LAUNCHED_LAYERS, LAUNCHED_TOKENS = (2, 6), 64
LAUNCHED_ROWS = {True: 16, False: 2}
LAUNCHED_ROUNDS = 3  # the fastest counts: a difference is sensitive to disturbances of one side
# Figures of a machine file: factor and unit in which they are shown, and what they are.
SHOWN = {
    "layer_flops": (1e-9, "GFLOP/s", f"matrix products inside layers ({LAYER_SHARE:.0%} of the best alone)"),
    "attention_flops": (1e-9, "GFLOP/s", "causal attention, forward"),
    "copy_rate": (1e-9, "GB/s", "copies on the device, read and written"),
    "pinned_rate": (1e-9, "GB/s", "copies from and to pinned host memory"),
    "forward_launch_s": (1e3, "ms", "to launch a layer's forward pass"),
    "backward_launch_s": (1e3, "ms", "to launch a layer's backward pass"),
    "collective_s": (1e3, "ms", "to start a collective"),
    "same_host_rate": (1e-9, "GB/s", "between ranks of a host, each way"),
    "other_host_rate": (1e-9, "GB/s", "of a rank to other hosts, each way"),
    "gpu_bytes": (2**-30, "GiB", "memory of a rank's device"),
    "host_bytes": (2**-30, "GiB", "memory of the host"),
}
MESSAGE_BYTES = {True: [MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB], False: [MIB // 4, 4 * MIB]}


def seconds_of(work: Callable[[], object], budget_s: float) -> float:
    """Return the seconds of one call on the slowest rank, averaged over as many calls as fit in the budget.

    All ranks make the same number of calls.
    """
    work()
    once = _timed(work, 1)
    return _timed(work, min(MOST_REPEATS, max(3, int(budget_s / max(once, 1e-7)))))


def _timed(work: Callable[[], object], repeats: int) -> float:
    _barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    device.synchronize()
    return _slowest((time.perf_counter() - start) / repeats)


def _barrier() -> None:
    device.synchronize()
    if dist.get_world_size() > 1:
        dist.barrier()


def _slowest(value: float) -> float:
    if dist.get_world_size() == 1:
        return value
    found = torch.tensor([value], dtype=torch.float64, device=device.device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def measure_products(budget_s: float) -> dict[str, float]:
    """Return the FLOP/s of bfloat16 matrix products by size."""
    found = {}
    for rows, inner, outer in PRODUCTS[device.is_gpu()]:
        left, right = (
            torch.randn(*size, device=device.device(), dtype=torch.bfloat16)
            for size in ((rows, inner), (inner, outer))
        )
        found[f"{rows}x{inner}x{outer}"] = (
            2 * rows * inner * outer / seconds_of(lambda left=left, right=right: left @ right, budget_s)
        )
    return found


def measure_attention(budget_s: float) -> dict[str, float]:
    """Return the FLOP/s of causal attention forward, counting half of the square.

    Uses transformer-engine's attention if installed, otherwise PyTorch's.
    """
    found = {}
    for rows, heads, tokens, size in ATTENTION[device.is_gpu()]:
        attend, make = _attention(heads, size)
        q, k, v = (make(rows, tokens) for _ in range(3))
        found[f"{rows}x{heads}x{tokens}x{size}"] = (
            2
            * rows
            * heads
            * tokens
            * tokens
            * size
            / seconds_of(lambda a=attend, q=q, k=k, v=v: a(q, k, v), budget_s)
        )
    return found


def _attention(heads: int, size: int) -> tuple[Callable, Callable[[int, int], torch.Tensor]]:
    """Return causal attention, and a function that creates its operands for rows and tokens."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device.device(), dtype=torch.bfloat16)

    if device.is_gpu():
        try:
            from transformer_engine.pytorch import DotProductAttention

            return DotProductAttention(
                heads, size, qkv_format="bshd", attn_mask_type="causal"
            ), lambda rows, tokens: randn(rows, tokens, heads, size)
        except ImportError:
            pass
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ), lambda rows, tokens: randn(rows, heads, tokens, size)


def measure_copies(budget_s: float) -> dict[str, float]:
    """Return B/s on the device (read and written), and from and to a GPU's host with all ranks at once."""
    size = COPY_BYTES[device.is_gpu()]
    here, there = (torch.empty(size, dtype=torch.uint8, device=device.device()) for _ in range(2))
    found = {"device": 2 * size / seconds_of(lambda: there.copy_(here), budget_s)}
    if device.is_gpu():
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["to host"] = size / seconds_of(lambda: pinned.copy_(here, non_blocking=True), budget_s)
        found["from host"] = size / seconds_of(lambda: here.copy_(pinned, non_blocking=True), budget_s)
    return found


def measure_launch(budget_s: float) -> dict[str, float]:
    """Return the seconds in which a process launches a layer's forward and backward pass for one micro-batch.

    Measured through the training engine, as differences; not above 0 if other work disturbed the process.
    """
    (few, many), num_rows = LAUNCHED_LAYERS, LAUNCHED_ROWS[device.is_gpu()]
    shallow, deep = (_passes_of(layers, budget_s) for layers in LAUNCHED_LAYERS)
    forward, both = ((slow - quick) / (many - few) / num_rows for quick, slow in zip(shallow, deep))
    return {"forward": forward, "backward": both - forward}


def _passes_of(layers: int, budget_s: float) -> tuple[float, float]:
    """Return the seconds of a forward pass and of an optimizer step of a small model."""
    arch = replace(Architecture.from_hf(shape("llama3-8b")), num_layers=layers, **LAUNCHED)
    groups = ProcessGroups(Layout.parse("tp1", world().ranks), world())
    options = EngineOptions(config=EngineConfig(), seed=1)
    engine = Engine(arch=arch, folder=None, groups=groups, head="token", options=options)
    engine.prepare_training(lr=0.0, total_steps=1)
    rows = list(range(LAUNCHED_ROWS[device.is_gpu()]))
    ids = [[0] * (LAUNCHED_TOKENS // 2)] * len(rows)
    batch, micro = RolloutBatch.from_lists(rows, ids, ids), [[row] for row in rows]

    def step() -> None:
        engine.train_step(
            batch,
            micro,
            lambda outputs, micro: (outputs["values"].square() / outputs["values"].numel(), Sums()),
            fields=(),
            scale=LossScale(1),
        )

    share = budget_s / LAUNCHED_ROUNDS
    rounds = [
        (seconds_of(lambda: engine.infer(batch, micro), share), seconds_of(step, share))
        for _ in range(LAUNCHED_ROUNDS)
    ]
    engine.gather_weights()
    forward, both = map(min, zip(*rounds))
    return forward, both


def measure_links(budget_s: float) -> dict[str, dict[str, float]]:
    """Return the B/s that a rank receives by kind and message size.

    Counted are the algorithm's bytes: (n-1)/n of a gathered tensor, twice that for a reduction.
    """
    world, rank, on_host = dist.get_world_size(), dist.get_rank(), device.ranks_per_host()
    first = rank // on_host * on_host  # the first rank of this host
    neighbours = {}  # the ranks that a rank sends to and receives from
    if on_host > 1:
        neighbours["next_rank"] = (first + (rank + 1 - first) % on_host, first + (rank - 1 - first) % on_host)
    if on_host < world:
        neighbours["next_host"] = ((rank + on_host) % world, (rank - on_host) % world)
    found: dict[str, dict[str, float]] = {"all_gather": {}, "all_reduce": {}} | {
        kind: {} for kind in neighbours
    }
    for size in MESSAGE_BYTES[device.is_gpu()]:
        part = torch.empty(size // world, dtype=torch.uint8, device=device.device())
        whole, numbers = (
            torch.empty(size // world * world, dtype=torch.uint8, device=device.device()),
            torch.zeros(size // 4, device=device.device()),
        )
        share = (world - 1) / world * size
        found["all_gather"][str(size)] = share / seconds_of(
            lambda part=part, whole=whole: dist.all_gather_into_tensor(whole, part), budget_s
        )
        found["all_reduce"][str(size)] = (
            2 * share / seconds_of(lambda numbers=numbers: dist.all_reduce(numbers), budget_s)
        )
        mine, other = (torch.empty(size, dtype=torch.uint8, device=device.device()) for _ in range(2))
        for kind, (to, source) in neighbours.items():
            found[kind][str(size)] = size / seconds_of(_exchange(mine, other, to=to, source=source), budget_s)
    return found


def _exchange(mine: torch.Tensor, other: torch.Tensor, *, to: int, source: int) -> Callable[[], None]:
    def run() -> None:
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, to), dist.P2POp(dist.irecv, other, source)]
        ):
            request.wait()

    return run


def measure_latency(budget_s: float) -> float:
    """Return the seconds of an all-reduce of a kilobyte."""
    few = torch.zeros(256, device=device.device())
    return seconds_of(lambda: dist.all_reduce(few), budget_s)


def measure(budget_s: float) -> dict:
    """Return a machine file: the most similar built-in machine, the differences, and all measurements."""
    here, measured = machine_here() or _cpu(), {}
    measured["products"] = measure_products(budget_s)
    measured["attention"] = measure_attention(budget_s)
    measured["copies"] = measure_copies(budget_s)
    measured["launch"] = launch = measure_launch(budget_s)
    best = max(measured["products"].values())
    values = {
        "layer_flops": LAYER_SHARE * best,
        "attention_flops": max(measured["attention"].values()),
        "copy_rate": measured["copies"]["device"],
    }
    values |= {f"{way}_launch_s": seconds for way, seconds in launch.items() if seconds > 0} | {
        "gpu_bytes": here.gpu_bytes,
        "host_bytes": here.host_bytes,
    }
    if device.is_gpu():
        values["pinned_rate"] = min(measured["copies"]["to host"], measured["copies"]["from host"])
    else:
        values["peak_flops"] = best
    if dist.get_world_size() > 1:
        measured["links"] = links = measure_links(budget_s)
        values["collective_s"] = measure_latency(budget_s)
        for field, kind in (
            ("same_host_rate", "all_gather" if "next_host" not in links else "next_rank"),
            ("other_host_rate", "next_host"),
        ):
            if kind in links:
                values[field] = max(links[kind].values())
    name = torch.cuda.get_device_name() if device.is_gpu() else "cpu"
    source = f"verl-megatron benchmark calibrate, {dist.get_world_size()} ranks, torch {torch.__version__}"
    return {"base": here.name, "name": name, "source": source} | values | {"measured": measured}


def _cpu() -> Machine:
    """Return a CPU machine: a rank's share of host memory; other figures are an h200's until measured."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return replace(MACHINES["h200"], gpu_bytes=total / dist.get_world_size(), host_bytes=total)


def summary(found: dict, path: Path) -> str:
    """Return what was measured, each with its unit, and what to do with the file that it is in."""
    lines = [f"measured on {dist.get_world_size()} x {found['name']}; the slowest rank counts:"]
    for name, (factor, unit, meaning) in SHOWN.items():
        if name in found:
            lines.append(f"  {meaning:<52}{found[name] * factor:>12,.1f} {unit}")
    is_alone = dist.get_world_size() == 1
    remark = "; rates between ranks need --ranks 2 or more" if is_alone else ""
    return "\n".join(
        [
            *lines,
            f"all other figures are those of the built-in {found['base']}{remark}",
            f"wrote {path}; plan with it: verl-megatron plan --model MODEL --gpus N --gpu {path}",
        ]
    )


def main() -> None:
    given = read_options()
    device.initialize()
    found = measure(given.seconds)
    if dist.get_rank() == 0:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        Machine.from_file(given.out)  # the values that plans will read
        print(summary(found, given.out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
