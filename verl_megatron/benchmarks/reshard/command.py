"""The methods of a reshard, measured in turns: `benchmark reshard`."""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.placement import described, place
from parallel.rank_set import world
from parallel.reshard.plan import Plan
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.shapes import shape
from verl_megatron.benchmarks.case import (
    MIB,
    ReshardCase,
    check_room,
    holds_the_weights,
    say,
    trained_weights,
)
from verl_megatron.benchmarks.options.reshard import parser, read_options
from verl_megatron.benchmarks.output import write_csv
from verl_megatron.benchmarks.reshard.contenders import CARD, WIRE, Contender, Ours, links, megatron_refit
from verl_megatron.benchmarks.reshard.gather_everything import GatherEverything
from verl_megatron.benchmarks.reshard.report import Row, columns, table, write_png

# Letters: K contenders, N repetitions.

WARM_UPS, TUNING_REPETITIONS = 2, 3
# On a GPU or not, unless they are given.
BUCKETS_MIB = {True: [0, 64, 256, 1024], False: [0, 1, 16]}
LINK_MIB = {True: 1024, False: 16}


def bench(case: ReshardCase, options: argparse.Namespace) -> list[Row]:
    """Build both sides, collect the contenders and measure them. Collective over the world."""
    groups, contenders = (
        [ProcessGroups(case.train, world()), ProcessGroups(case.rollout, world())],
        links(options.link_mib * MIB),
    )
    if (
        options.no_megatron
        or case.train.vpp > 1
        or not device.is_gpu()
        or not importlib.util.find_spec("megatron.core.resharding")
    ):
        say(
            "Megatron-Core's refit is left out: it needs CUDA, one model chunk a rank (no vpp), "
            "megatron.core.resharding and no --no-megatron"
        )
        source = trained_weights(case)
    else:
        refit, source = megatron_refit(case, groups)
        contenders.append(refit)
    ours = Ours(case, source, options.verify)
    contenders.append(
        best_gather(
            lambda size: GatherEverything(case, groups[0], source, ours.destination, size),
            options.gather_mib,
            ours,
        )
    )
    for mode in options.modes:
        contenders += ours.contenders(mode)
    return measure(contenders, ours.plan, max(10, options.repetitions))


def best_gather(make: Callable[[int], GatherEverything], buckets_mib: list[int], ours: Ours) -> Contender:
    """Return the method with the fastest bucket size (by median), with the same destination as our `keep`."""
    medians = {}
    for mib in buckets_mib:
        gather = make(mib * MIB)
        gather.run()
        medians[mib] = sorted(
            world().all_max(torch.tensor([_seconds(gather.run) for _ in range(TUNING_REPETITIONS)])).tolist()
        )[TUNING_REPETITIONS // 2]
        del gather
    best = min(medians, key=medians.__getitem__)
    say(
        "re-enactment by bucket: "
        + ", ".join(f"{mib} MiB {1000 * value:.2f} ms" for mib, value in medians.items())
    )
    gather, name = (
        make(best * MIB),
        f"re-enactment: gather everything, {f'{best} MiB buckets' if best else 'tensor by tensor'}",
    )
    sizes: dict[str, Any] = dict(received_bytes=gather.received_bytes, staging_bytes=gather.staging_bytes)
    return Contender(kind="gather", name=name, run=gather.run, plan=ours.plan, **sizes, **ours.kept)


def measure(contenders: list[Contender], plan: Plan, repetitions: int) -> list[Row]:
    """Check each contender, then time them alternately; the first row is the floor of `plan`."""
    checks = [check(contender) if contender.target else ("", 0) for contender in contenders]
    for contender in contenders * WARM_UPS:
        contender.run()
    seconds_NK = torch.zeros(repetitions, len(contenders), dtype=torch.float64)
    for seconds_K in seconds_NK:
        for number, contender in enumerate(contenders):
            seconds_K[number] = _seconds(contender.run)
    seconds_KN = world().all_max(seconds_NK).T
    own_sizes = [
        [c.received_bytes, c.staging_bytes + transient, c.second_copy_bytes]
        for c, (_, transient) in zip(contenders, checks)
    ]
    sizes = world().all_max(torch.tensor(own_sizes)).tolist()
    rates = {
        c.name: received / seconds_N.median().item()
        for c, (received, *_), seconds_N in zip(contenders, sizes, seconds_KN)
        if c.kind == "link"
    }
    floor, needed = floor_of(plan, rates), needed_bytes(plan)
    rows = [
        Row(
            kind="floor",
            name="floor of any plan",
            **_times([floor] * 3),
            received_bytes=needed,
            gb_per_s=needed / floor / 1e9,
            floor_share=1.0,
        )
    ]
    for contender, (received, extra, second), (bitwise, _), seconds_N in zip(
        contenders, sizes, checks, seconds_KN
    ):
        low, median, high = torch.quantile(
            seconds_N, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        ).tolist()
        rated: dict[str, Any] = dict(
            gb_per_s=received / median / 1e9,
            floor_share=floor_of(contender.plan, rates) / median if contender.plan else 0.0,
        )
        what: dict[str, Any] = dict(
            kind=contender.kind,
            name=contender.name,
            received_bytes=received,
            peak_extra_bytes=extra,
            second_copy_bytes=second,
            bitwise=bitwise,
        )
        rows.append(Row(**what, **_times([low, median, high]), **rated))
    return rows


def check(contender: Contender) -> tuple[str, int]:
    """Overwrite the target, run the contender and compare every bit.

    Returns:
        "yes" or "no", and the bytes that the run allocated temporarily.
    """
    if contender.overwritable:
        torch._foreach_mul_(list(contender.overwritable.values()), 0.5)  # zeros in the padding stay zeros
    if device.is_gpu():
        torch.cuda.reset_peak_memory_stats()  # without a GPU, the allocator's figures are 0
    before = torch.cuda.memory_allocated()
    contender.run()
    device.synchronize()
    transient = torch.cuda.max_memory_allocated() - before
    return "yes" if holds_the_weights(contender.described, contender.target) else "no", transient


def needed_bytes(plan: Plan) -> int:
    """Return the bytes that the busiest rank must receive.

    Less than the bound of a second copy if the direction to training of `swap` restores only overwritten
    weights.
    """
    return min(plan.lower_bound_bytes, max(plan.received_bytes.values()))


def floor_of(plan: Plan, rates: dict[str, float]) -> float:
    """Return the seconds at the links' rates (bytes per second, by name)."""
    needed = needed_bytes(plan)
    return max(needed / rates[WIRE] if needed else 0.0, max(plan.local_bytes.values()) / rates[CARD])


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    device.synchronize()
    start = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - start


def _times(seconds: list[float]) -> dict[str, Any]:
    return dict(zip(("p10_ms", "median_ms", "p90_ms"), (1000 * value for value in seconds)))


def read_case() -> tuple[argparse.Namespace, ReshardCase]:
    """Parse the command line, and reject contradictory options early."""
    options = read_options()
    options.gather_mib = options.gather_mib or BUCKETS_MIB[device.is_gpu()]
    options.link_mib = options.link_mib or LINK_MIB[device.is_gpu()]
    ranks = tuple(range(int(os.environ.get("WORLD_SIZE", "1"))))
    try:
        arch = (
            Architecture.from_hf(shape(options.shape), source=options.shape)
            if options.shape
            else read_architecture(options.hf)
        )
        arch = replace(arch, num_layers=options.layers or arch.num_layers)
        train, rollout = (Layout.parse(text, ranks=ranks) for text in (options.train, options.rollout))
        if rollout.pp * rollout.cp > 1:
            raise ValueError(
                f"--rollout {options.rollout} names more than tp; vLLM's replicas are split by tp only, so "
                f"write tp{rollout.tp}"
            )
        check_room(arch, train, bytes_per_parameter=4)  # bfloat16, on both sides
        if options.rank_order == "auto":
            train, rollout = place(
                arch, train, rollout, ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks)))
            )
    except ValueError as error:
        parser().error(str(error))
    return options, ReshardCase(
        model=options.shape or options.hf.resolve().name,
        arch=arch,
        train=train,
        rollout=rollout,
        dtype=getattr(torch, options.dtype),
        window_bytes=int(options.window_mib * MIB),
        spec="te" if device.is_gpu() and importlib.util.find_spec("transformer_engine") else "local",
        hardware=f"{len(ranks)} x {torch.cuda.get_device_name() if device.is_gpu() else 'CPU rank'}",
    )


def main() -> None:
    options, case = read_case()
    device.initialize()
    say(f"order of ranks: {described(case.train, case.rollout)}")
    rows = bench(case, options)
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        if options.csv:
            write_csv(options.csv, columns(case), rows)
        if options.png:
            write_png(options.png, case, rows)
    dist.destroy_process_group()
    sys.exit(any(row.bitwise == "no" for row in rows))


if __name__ == "__main__":
    main()
