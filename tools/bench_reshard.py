"""How fast weights go from Megatron's shards into vLLM's, beside the link's own rates and beside what others do, in one run.

torchrun --nproc_per_node 4 tools/bench_reshard.py --shape llama3-8b --train tp2pp2 --rollout tp4 [--csv FILE] [--png FILE]

Both layouts are plain tensors: our own rows start neither Megatron nor vLLM. Every source element is a function of its place in the
Hugging Face tensor, so each rank knows what it must receive and compares it bit by bit before anything is timed. Then the methods
take turns, repetition by repetition; each takes as long as its slowest rank. Megatron-Core's refit ends in Megatron's layout. The floor
is the larger of what the busiest rank must receive under any plan, at this run's point-to-point rate, and what stays on a card, at its
copy rate. The second copy is what vLLM's parameters take beside Megatron's.
"""

import argparse
import csv
import importlib.util
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from gather_everything import GatherEverything, part
from torch import Tensor

from parallel import device
from parallel.collectives import all_max
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.placement import described, place
from parallel.reshard.execute import Parameters, Resharder, addresses_of, allocations_of
from parallel.reshard.overlay import overlay
from parallel.reshard.peers import Mapped, map_tensors
from parallel.reshard.plan import Plan, compile_plan, matrix_shape
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import megatron_parameters, vllm_parameters
from parallel.weights.shapes import SHAPES, shape
from parallel.weights.shard import ShardedParameter

MIB = 2**20
_PIECE = 2**24  # elements computed at a time in int64
_BITS = {2: torch.int16, 4: torch.int32}
WARM_UPS, TUNING_REPETITIONS = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its two layouts over the whole world, and how slices travel."""

    model: str
    arch: Architecture
    train: Layout
    rollout: Layout
    dtype: torch.dtype
    window_bytes: int
    spec: str  # of Megatron's layers, which decides the names of the norms
    hardware: str  # what the ranks are, for people

    def trained(self, rank: int, layout: Layout | None = None) -> list[ShardedParameter]:
        return megatron_parameters(self.arch, layout or self.train, rank, spec=self.spec)

    def served(self, rank: int) -> list[ShardedParameter]:
        return vllm_parameters(self.arch, self.rollout.tp, self.rollout.coordinates(rank).tp)

    def sides(self) -> dict[str, object]:
        """What every plan is made of."""
        source, destination = ({rank: shards(rank) for rank in self.train.ranks} for shards in (self.trained, self.served))
        return dict(source=source, destination=destination, element_bytes=self.dtype.itemsize, window_bytes=self.window_bytes, host_of=device.host_of)

    def __str__(self) -> str:
        return f"{self.model} ({self.arch.num_layers} layers, {str(self.dtype)[6:]}), {self.train} -> {self.rollout}"


@dataclass(slots=True, kw_only=True)
class Contender:
    """One thing to time. What it says of bytes holds for this rank until `measure` takes the maximum over the ranks."""

    kind: str  # link, gather, megatron or ours
    name: str
    run: Callable[[], object]
    received_bytes: int
    staging_bytes: int = 0  # memory it keeps between repetitions
    second_copy_bytes: int = 0  # of vLLM's parameters beside Megatron's
    target: Parameters = field(default_factory=dict)  # what it writes
    described: list[ShardedParameter] = field(default_factory=list)
    in_place: bool = False  # what it writes lies over what it reads


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table and of the CSV; times are of the slowest rank."""

    kind: str
    name: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    received_bytes: int  # by the busiest rank
    gb_per_s: float  # 1e9 bytes received a second
    floor_share: float  # floor / median; 0 for a link's row
    peak_extra_bytes: int  # staging, and on a GPU also what a run allocates and frees
    second_copy_bytes: int
    bitwise: str  # yes, no, or empty for a link's row


def weights_of(parameter: ShardedParameter, dtype: torch.dtype) -> Tensor:
    """The parameter as its blocks of the Hugging Face tensors fill it, with zeros for padding."""
    tensor = torch.zeros(parameter.shape, dtype=dtype, device=device.device())
    matrix_RC = tensor.view(matrix_shape(parameter.shape))
    for block in parameter.blocks:
        step = max(1, _PIECE // (block.cols[1] - block.cols[0]))
        for first in range(*block.rows, step):
            piece_RC = _content(block.tensor, range(first, min(first + step, block.rows[1])), range(*block.cols), dtype)
            part(matrix_RC, block)[first - block.rows[0] :][: len(piece_RC)] = piece_RC
    return tensor


def _content(name: str, rows: range, cols: range, dtype: torch.dtype) -> Tensor:
    """Hashes of (tensor, row, column) as the bits of numbers in (-2, 2): with the exponent's highest bit off none is infinite or NaN."""
    seed, bits = zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 % 2**63, 8 * dtype.itemsize
    row_R = torch.arange(rows.start + 1, rows.stop + 1, device=device.device()) * 0x5851F42D4C957F2D + seed
    col_C = torch.arange(cols.start + 1, cols.stop + 1, device=device.device()) * 0x2545F4914F6CDD1D
    mixed_RC = row_R[:, None] + col_C
    mixed_RC = ((mixed_RC ^ mixed_RC >> 29) * 0x369DEA0F31A53F85 >> 64 - bits) & ~(1 << bits - 2)
    return mixed_RC.to(_BITS[dtype.itemsize]).view(dtype)


def trained_weights(case: Case) -> Parameters:
    """This rank's source: parameters one after the other in one allocation, as Megatron's distributed optimizer keeps them."""
    parameters, ends = case.trained(dist.get_rank()), [0]
    for parameter in parameters:
        ends.append(ends[-1] + -(-prod(parameter.shape) // 64) * 64)
    memory = torch.zeros(ends[-1], dtype=case.dtype, device=device.device())
    source = {(p.chunk, p.name): memory[start:][: prod(p.shape)].view(p.shape) for start, p in zip(ends, parameters)}
    for parameter in parameters:
        source[parameter.chunk, parameter.name].copy_(weights_of(parameter, case.dtype))
    return source


def holds_the_weights(described: list[ShardedParameter], tensors: Parameters) -> bool:
    """Whether every parameter on every rank has exactly the bits of `weights_of`; takes one parameter's memory."""
    pairs = ((tensors[p.chunk, p.name], p) for p in described)
    wrong = sum(not torch.equal(*(x.view(_BITS[x.element_size()]) for x in (held, weights_of(p, held.dtype)))) for held, p in pairs)
    return not all_max(torch.tensor(wrong)).item()


def links(link_bytes: int) -> list[Contender]:
    """The machine's own rates: each rank exchanges with the one half a world away, and copies on its card."""
    world, rank, copies = dist.get_world_size(), dist.get_rank(), 4
    out, back = (torch.zeros(link_bytes, dtype=torch.uint8, device=device.device()) for _ in range(2))

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, out, (rank + world // 2) % world), dist.P2POp(dist.irecv, back, (rank - world // 2) % world)]
        for message in dist.batch_isend_irecv(operations):
            message.wait()

    def copy() -> None:
        for _ in range(copies):
            back.copy_(out)

    wire = Contender(kind="link", name="point to point, both ways", run=exchange, received_bytes=link_bytes)
    return [wire] * (world > 1) + [Contender(kind="link", name="on-card copy", run=copy, received_bytes=copies * link_bytes)]


def megatron_refit(case: Case, groups: list[ProcessGroups]) -> tuple[Contender, Parameters]:
    """Megatron-Core's resharding between models in the two layouts, and the tensors of the first, which serve as source for all."""
    from megatron.core.resharding.refit import swap_model_weights

    from parallel import megatron
    from verl_megatron.models.build import Compute, build_chunks

    models = []
    for members in groups:
        megatron.seed(members, 1)
        models += [model.requires_grad_(False) for model in build_chunks(case.arch, members, Compute(dtype=case.dtype, spec=case.spec), head="lm")]
    source, target = trained_weights(case), {(0, name): parameter.data for name, parameter in models[1].named_parameters()}
    for name, parameter in models[0].named_parameters():
        parameter.data = source[0, name]

    run = partial(swap_model_weights, *models, refit_method="nccl")
    run()  # plans
    described, ranks = case.trained(dist.get_rank(), case.rollout), case.train.ranks
    wanted = {rank: case.trained(rank, case.rollout) for rank in ranks}
    needed = compile_plan(**case.sides() | {"destination": wanted}).received_bytes[dist.get_rank()]  # it may receive more
    return Contender(kind="megatron", name="Megatron-Core's refit, into Megatron's layout", run=run, received_bytes=needed, target=target, described=described), source


def best_gather(make: Callable[[int], GatherEverything], buckets_mib: list[int]) -> tuple[GatherEverything, str]:
    """The one with the bucket size of the smallest median in a few repetitions, and its name."""
    seconds = {}
    for mib in buckets_mib:
        gather = make(mib * MIB)
        gather.run()
        seconds[mib] = sorted(all_max(torch.tensor([_seconds(gather.run) for _ in range(TUNING_REPETITIONS)])).tolist())[TUNING_REPETITIONS // 2]
        del gather
    best = min(seconds, key=seconds.__getitem__)
    say("re-enactment by bucket: " + ", ".join(f"{mib} MiB {1000 * value:.2f} ms" for mib, value in seconds.items()))
    return make(best * MIB), f"re-enactment: gather everything, {f'{best} MiB buckets' if best else 'tensor by tensor'}"


def check(contender: Contender) -> tuple[str, int]:
    """Spoil what it writes, run it, compare every bit: "yes" or "no", and the bytes that the run allocated on the way."""
    if not contender.in_place:
        torch._foreach_mul_(list(contender.target.values()), 0.5)  # zeros in the padding stay zeros
    if device.is_gpu():
        torch.cuda.reset_peak_memory_stats()  # elsewhere the allocator's figures are 0
    before = torch.cuda.memory_allocated()
    contender.run()
    device.synchronize()
    transient = torch.cuda.max_memory_allocated() - before
    return "yes" if holds_the_weights(contender.described, contender.target) else "no", transient


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    device.synchronize()
    start = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - start


def measure(contenders: list[Contender], plan: Plan, repetitions: int) -> list[Row]:
    """Check each, then time them in turns."""
    checks = [check(contender) if contender.target else ("", 0) for contender in contenders]
    for contender in contenders * WARM_UPS:
        contender.run()
    seconds_KN = all_max(torch.tensor([[_seconds(contender.run) for contender in contenders] for _ in range(repetitions)], dtype=torch.float64)).T
    sizes = all_max(torch.tensor([[c.received_bytes, c.staging_bytes + transient, c.second_copy_bytes] for c, (_, transient) in zip(contenders, checks)])).tolist()
    rates = {c.name: received / seconds_N.median().item() for c, (received, *_), seconds_N in zip(contenders, sizes, seconds_KN) if c.kind == "link"}
    floor = max(plan.lower_bound_bytes / rates.get("point to point, both ways", float("inf")), max(plan.local_bytes.values()) / rates["on-card copy"])
    rows = []
    for contender, (received, extra, second), (bitwise, _), seconds_N in zip(contenders, sizes, checks, seconds_KN):
        low, median, high = torch.quantile(seconds_N, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        times, share = [1000 * median, 1000 * low, 1000 * high], 0 if contender.kind == "link" else floor / median
        rows.append(Row(contender.kind, contender.name, *times, received, received / median / 1e9, share, extra, second, bitwise))
    return [Row("floor", "floor of any plan", *[1000 * floor] * 3, plan.lower_bound_bytes, plan.lower_bound_bytes / floor / 1e9, 1.0, 0, 0, ""), *rows]


class Modes:
    """Our own rows: every mode over the same source."""

    def __init__(self, case: Case, source: Parameters, verify: str):
        self.case, self.source, self.verify, self.rank = case, source, verify, dist.get_rank()
        self.described = case.served(self.rank)
        self.peers = map_tensors(source, None)
        self.plan = compile_plan(**case.sides(), peer_memory=self.peers is not None)
        self.destination = {(0, p.name): self._empty(p.shape) for p in self.described}

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.case.dtype, device=device.device())

    def _resharder(self, plan: Plan, source: Parameters, destination: Parameters, peers: dict[int, Mapped] | None = None) -> Resharder:
        common = dict(rank=self.rank, dtype=self.case.dtype, group=None, device=device.device(), peers=peers)
        resharder = Resharder(plan, source=source, destination=destination, verify="all", **common)
        count = resharder.run().checked_slices  # raises and names them if one differs
        say(f"{plan}\n  all {count} slices proved at both ends")
        resharder.proof.verify = self.verify
        resharder.proof.prepare()
        return resharder

    def _contender(self, name: str, resharder: Resharder, run: Callable[[], object], **changes) -> Contender:
        sizes = dict(received_bytes=resharder.bytes["received"], staging_bytes=resharder.plan.staged_bytes[self.rank])
        into = dict(target=self.destination, described=self.described, second_copy_bytes=_bytes(self.destination))
        return Contender(kind="ours", name=f"ours, {name}", run=run, **sizes, **into | changes)

    def keep(self) -> list[Contender]:
        say(f"{self.case}, keep:")
        found, moving = [], torch.no_grad()
        keep = self._resharder(self.plan, self.source, self.destination, self.peers)
        found.append(self._contender("keep", keep, moving(keep.move)))
        if self.verify != "none":
            found.append(self._contender(f"keep, with proof ({self.verify})", keep, keep.run))
        if self.peers is not None:
            by_messages = self._resharder(compile_plan(**self.case.sides()), self.source, self.destination)
            found.append(self._contender("keep, by messages", by_messages, moving(by_messages.move)))
        return found

    def laid_over(self, mode: str) -> list[Contender]:
        """share or swap: vLLM's parameters in Megatron's memory."""
        say(f"{self.case}, {mode}:")
        memory: list = [None] * dist.get_world_size()
        dist.all_gather_object(memory, addresses_of(self.source))
        found = overlay(**self.case.sides(), memory=dict(enumerate(memory)), in_place=mode == "swap", peer_memory=self.peers is not None)
        allocations, taken, own = allocations_of(self.source), {}, {}
        for parameter in self.described:
            key = (parameter.chunk, parameter.name)
            if key in found.addresses[self.rank]:
                space, first = found.addresses[self.rank][key]
                taken[key] = torch.empty(0, dtype=self.case.dtype, device=device.device()).set_(allocations[space], first // self.case.dtype.itemsize, parameter.shape)
            else:
                taken[key] = own[key] = self._empty(parameter.shape)
        out = self._resharder(found.forth, self.source, taken, self.peers)
        changes, moving = dict(target=taken, second_copy_bytes=_bytes(own), in_place=True), torch.no_grad()
        contenders = [self._contender(f"{mode}, to rollout", out, moving(out.move), **changes)]
        if found.back is not None:
            home = self._resharder(found.back, taken, self.source)
            changes |= dict(target=self.source, described=self.case.trained(self.rank))
            contenders.append(self._contender(f"{mode}, back to training", home, moving(home.move), **changes))
        return contenders


def _bytes(parameters: Parameters) -> int:
    return sum(tensor.nbytes for tensor in parameters.values())


def bench(case: Case, options: argparse.Namespace) -> list[Row]:
    """Build both sides, collect the contenders and measure them. Collective over the world."""
    groups, contenders = [ProcessGroups(case.train), ProcessGroups(case.rollout)], links(options.link_mib * MIB)
    if options.no_megatron or case.train.vpp > 1 or not device.is_gpu() or not importlib.util.find_spec("megatron.core.resharding"):
        say("Megatron-Core's refit is left out: it needs CUDA, one model chunk a rank (no vpp), megatron.core.resharding and no --no-megatron")
        source = trained_weights(case)
    else:
        refit, source = megatron_refit(case, groups)
        contenders.append(refit)
    modes = Modes(case, source, options.verify)
    gather, name = best_gather(lambda size: GatherEverything(case, groups[0], source, modes.destination, size), options.gather_mib)
    sizes = dict(received_bytes=gather.received_bytes, staging_bytes=gather.staging_bytes, second_copy_bytes=_bytes(modes.destination))
    contenders.append(Contender(kind="gather", name=name, run=gather.run, target=modes.destination, described=modes.described, **sizes))
    for mode in options.modes:
        contenders += modes.keep() if mode == "keep" else modes.laid_over(mode)
    return measure(contenders, modes.plan, max(10, options.repetitions))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def table(rows: list[Row]) -> str:
    lines = [f"{'':52}{'median ms':>11}{'p10':>10}{'p90':>10}{'MiB':>10}{'GB/s':>9}{'of floor':>9}{'extra MiB':>11}{'2nd copy':>10}  bitwise"]
    for row in rows:
        cells = f"{row.median_ms:>11.3f}{row.p10_ms:>10.3f}{row.p90_ms:>10.3f}{row.received_bytes / MIB:>10.1f}{row.gb_per_s:>9.2f}"
        cells += f"{row.floor_share:>9.0%}" if row.floor_share else " " * 9
        lines.append(f"{row.name:52}{cells}{row.peak_extra_bytes / MIB:>11.1f}{row.second_copy_bytes / MIB:>10.1f}  {row.bitwise}".rstrip())
    return "\n".join(lines)


def write_csv(path: Path, case: Case, rows: list[Row]) -> None:
    """One line a row, each with what was measured and with which version."""
    run = {"model": case.model, "layers": case.arch.num_layers, "dtype": str(case.dtype)[6:], "train": str(case.train), "rollout": str(case.rollout)}
    run |= {"window_bytes": case.window_bytes, "ranks": case.hardware, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*run, *asdict(rows[0])])
        writer.writeheader()
        writer.writerows(run | asdict(row) for row in rows)


def write_png(path: Path, case: Case, rows: list[Row]) -> None:
    """Median time of each method with p10 and p90, and the floor as a line."""
    from matplotlib.figure import Figure  # without pyplot it needs no display

    floor, methods = rows[0].median_ms, [row for row in rows if row.kind not in ("floor", "link")][::-1]
    colours = {"gather": "#d9730d", "megatron": "#7a5195", "ours": "#3465a4"}
    axis = Figure(figsize=(11, 1.6 + 0.7 * len(methods)), layout="constrained").subplots()
    for height, row in enumerate(methods):
        axis.barh(height, row.median_ms, color=colours[row.kind], height=0.6)
        axis.plot([row.p10_ms, row.p90_ms], [height, height], color="black", linewidth=1.5, marker="|", markersize=9)
        text = f"  {row.median_ms:.3g} ms, {row.floor_share:.0%} of floor, {row.peak_extra_bytes / MIB:.3g} MiB extra"
        axis.text(max(row.median_ms, row.p90_ms), height, text, va="center", fontsize=9)
    axis.axvline(floor, color="#2e8b57", linewidth=2)
    axis.set_yticks(range(len(methods)), [row.name.replace(": ", ":\n") for row in methods])
    axis.set_xlim(0, 1.45 * max(row.p90_ms for row in methods))
    axis.set_xlabel(f"milliseconds of the slowest rank: median, p10 to p90; the green line is the floor, {floor:.3g} ms")
    axis.set_title(f"{case}, {case.hardware}", fontsize=11)
    axis.figure.savefig(path, dpi=110)


def read_options() -> tuple[argparse.Namespace, Case]:
    """The command line, refused early where it contradicts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=list(SHAPES))
    model.add_argument("--hf", type=Path, help="a folder with a config.json; its weights are not read")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers than the model has")
    parser.add_argument("--train", default="tp2pp2", help="layout of the source")
    parser.add_argument("--rollout", default="tp4", help="layout of the destination: tp only; the other ranks are replicas")
    parser.add_argument("--window-mib", type=float, default=256, help="staging memory of one exchange")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=10, help="at least 10 are made")
    parser.add_argument("--modes", nargs="+", choices=["keep", "share", "swap"], default=["keep", "share", "swap"])
    parser.add_argument("--rank-order", choices=["auto", "plain"], default="auto", help="auto: ranks are placed so that the least has to move")
    parser.add_argument("--verify", choices=["sample", "none", "all"], default="sample", help="proof in the timed repetitions of the last row")
    parser.add_argument("--no-megatron", action="store_true", help="leave out Megatron-Core's refit and the memory of its second model")
    parser.add_argument("--gather-mib", type=int, nargs="+", default=[0, 64, 256, 1024] if device.is_gpu() else [0, 1, 16], help="bucket sizes tried; 0: tensor by tensor")
    parser.add_argument("--link-mib", type=int, default=1024 if device.is_gpu() else 16, help="message that measures the links")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    ranks = tuple(range(int(os.environ.get("WORLD_SIZE", "1"))))
    hardware = f"{len(ranks)} x {torch.cuda.get_device_name() if device.is_gpu() else 'CPU rank'}"
    try:
        arch = Architecture.from_hf(shape(options.shape), source=options.shape) if options.shape else read_architecture(options.hf)
        arch = replace(arch, num_layers=options.layers or arch.num_layers)
        train, rollout = (Layout.parse(text, ranks=ranks) for text in (options.train, options.rollout))
        if rollout.pp * rollout.cp > 1:
            raise ValueError(f"--rollout {options.rollout} names more than tp; vLLM's replicas are split by tp only, so write tp{rollout.tp}")
        if options.rank_order == "auto":
            train, rollout = place(arch, train, rollout, ranks_per_host=int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks))))
    except ValueError as error:
        parser.error(str(error))
    spec = "te" if device.is_gpu() and importlib.util.find_spec("transformer_engine") else "local"
    model, window_bytes = options.shape or options.hf.resolve().name, int(options.window_mib * MIB)
    return options, Case(model=model, arch=arch, train=train, rollout=rollout, dtype=getattr(torch, options.dtype), window_bytes=window_bytes, spec=spec, hardware=hardware)


if __name__ == "__main__":
    options, case = read_options()
    device.initialize()
    say(f"order of ranks: {described(case.train, case.rollout)}")
    rows = bench(case, options)
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        for write, path in ((write_csv, options.csv), (write_png, options.png)):
            if path:
                write(path, case, rows)
    dist.destroy_process_group()
    sys.exit(any(row.bitwise == "no" for row in rows))
