"""Transfers of a reshard from Megatron's shards to vLLM's, computed without a GPU and without weights.

python tools/reshard_plan.py --hf DIR_or_NAME --train tp8pp4 --rollout tp8 [--ranks 32] [--hosts 4]
    [--rank-order plain] [--peer-memory] [--json FILE] [--png FILE]

DIR needs a config.json only; NAME is one of the built-in shapes. In the JSON, a list has one number per rank;
`train_ranks` and `rollout_ranks` give the rank at each position of the layout, tp fastest, then cp, dp and
pp.
"""

import argparse
import gc
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import lcm, prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where nothing is installed

from parallel.layout import Layout
from parallel.placement import described, place
from parallel.reshard.plan import Plan, compile_plan
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import megatron_parameters, vllm_parameters
from parallel.weights.shapes import SHAPES, shape
from tools.reshard.memory import EXACT_RANKS, Shards, peak_memory

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HOST_RANKS = 8  # per host, unless --hosts is given
MAX_RANKS = 2**14
DRAWN_RANKS = 128  # with more, the picture shows hosts
MODES = ("keep", "swap", "share")  # of `peak_memory`
Flow = dict[tuple[int, int], int]  # bytes by (source rank, destination rank)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second and direction."""

    same_gpu: float = 2.1e12  # bytes copied: 4.19 TB/s read and written, measured on an H200
    same_host: float = 360e9  # NCCL point to point over NVLink, measured between H200s
    other_host: float = 50e9  # of one 400 Gbit/s adapter per GPU, assumed


@dataclass(frozen=True, slots=True)
class Flows:
    """Bytes by source and destination rank; a rank to itself is a copy on its GPU."""

    direct: Flow  # directly from parameter to parameter
    windows: list[Flow]  # staged
    total: Flow


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its two layouts and its hosts."""

    model: str
    arch: Architecture
    train: Layout
    rollout: Layout
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        return len(self.train.ranks)

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def shards(self) -> tuple[Shards, Shards]:
        """Return every rank's shards in Megatron and in vLLM.

        Raises:
            ValueError: a layout does not split the model; names the option.
        """
        train, rollout = self.train, self.rollout
        try:
            option = f"--train {train}"
            held = {
                (tp, pp): megatron_parameters(self.arch, train, train.rank_of(tp=tp, pp=pp), spec="te")
                for tp in range(train.tp)
                for pp in range(train.pp)
            }
            option = f"--rollout {rollout}"
            served = [vllm_parameters(self.arch, rollout.tp, tp_rank) for tp_rank in range(rollout.tp)]
        except ValueError as error:
            raise ValueError(f"{option}: {error}".replace("stage_layers", "--stage-layers")) from None
        places = product(range(train.pp), range(train.dp), range(train.cp), range(train.tp))
        source = {train.rank_of(tp=tp, cp=cp, dp=dp, pp=pp): held[tp, pp] for pp, dp, cp, tp in places}
        return source, {
            rollout.rank_of(tp=tp, dp=dp): served[tp] for dp in range(rollout.dp) for tp in range(rollout.tp)
        }

    def replicas(self) -> list[list[int]]:
        """Return the ranks of every replica of Megatron's model, and of vLLM's."""
        train, rollout = self.train, self.rollout
        trained = [
            [train.rank_of(tp=tp, cp=cp, dp=dp, pp=pp) for pp in range(train.pp) for tp in range(train.tp)]
            for dp in range(train.dp)
            for cp in range(train.cp)
        ]
        return trained + [
            [rollout.rank_of(tp=tp, dp=dp) for tp in range(rollout.tp)] for dp in range(rollout.dp)
        ]

    def placed(self) -> "Case":
        """Return the case with the rank order that moves the fewest bytes; ValueError as for `shards`."""
        self.shards()  # raises with the option's name if a layout does not split the model
        train, rollout = place(self.arch, self.train, self.rollout, ranks_per_host=self.ranks_per_host)
        return replace(self, train=train, rollout=rollout)


def read_case(
    *,
    hf: str,
    train: str,
    rollout: str,
    ranks: int | None = None,
    hosts: int | None = None,
    stage_layers: tuple[int, ...] = (),
) -> Case:
    """Parse the options.

    Args:
        ranks: None: the smallest number that fits both layouts.
        hosts: None: 8 ranks per host.

    Raises:
        ValueError: names the option, its value and a valid replacement.
    """
    if hf not in SHAPES and not Path(hf).is_dir():
        raise ValueError(
            f"--hf {hf} is neither a folder nor a built-in shape; give a folder with a config.json or one of "
            f"{', '.join(SHAPES)}"
        )
    arch = Architecture.from_hf(shape(hf), source=hf) if hf in SHAPES else read_architecture(hf)
    layouts = {}
    smallest = lcm(_num_ranks(train), _num_ranks(rollout))
    if (ranks or smallest) > MAX_RANKS:
        what = f"--ranks {ranks}" if ranks else f"--train {train} with --rollout {rollout}, {smallest} ranks,"
        raise ValueError(f"{what} is more than the {MAX_RANKS} that a plan may have; choose fewer")
    world = tuple(range(ranks or smallest))
    for option, text, stages in (("--train", train, stage_layers), ("--rollout", rollout, ())):
        try:
            layouts[option] = Layout.parse(text, ranks=world, stage_layers=stages)
        except ValueError as error:
            raise ValueError(f"{option} {text} with --ranks {len(world)}: {error}") from None
    if layouts["--rollout"].tp * layouts["--rollout"].dp != len(world):
        raise ValueError(
            f"--rollout {rollout} names more than tp and dp, and vLLM's replicas are split by tp only; write "
            f"tp{layouts['--rollout'].tp}"
        )
    if hosts and len(world) % hosts:
        raise ValueError(
            f"--hosts {hosts} must divide the {len(world)} ranks; choose a divisor or another --ranks"
        )
    return Case(
        hf,
        arch,
        layouts["--train"],
        layouts["--rollout"],
        len(world) // hosts if hosts else min(HOST_RANKS, len(world)),
    )


def _num_ranks(text: str) -> int:
    """Return the number of ranks of a layout's named sizes; `Layout.parse` checks whether it is a layout."""
    return max(1, prod(int(size) for size in re.findall(r"(?<!v)[tpcd]p(\d+)", text.lower())))


def flows_of(plan: Plan) -> Flows:
    direct: Counter[tuple[int, int]] = Counter()
    for transfer in plan.direct:
        direct[transfer.source_rank, transfer.destination_rank] += transfer.elements * plan.element_bytes
    windows = [
        {pair: sum(t.elements for t in message) * plan.element_bytes for pair, message in window.items()}
        for window in plan.windows
    ]
    total = direct.copy()
    for window in windows:
        total.update(window)
    return Flows(direct, windows, total)


def report_of(
    case: Case,
    plan: Plan,
    flows: Flows,
    shards: tuple[Shards, Shards],
    rates: Rates,
    *,
    peer_memory: bool = False,
) -> dict:
    """Return the content of the JSON; lists have one number per rank, from rank 0 on."""
    split, peak = _split(case, flows), plan.staged_bytes
    local, staged = (
        [flows.total.get((rank, rank), 0) for rank in range(case.ranks)],
        [peak[rank] for rank in range(case.ranks)],
    )
    received, sent = (
        [sum(amounts) for amounts in zip(split[f"{way}_same_host_bytes"], split[f"{way}_other_host_bytes"])]
        for way in ("received", "sent")
    )
    return {
        "model": case.model,
        "train": str(case.train),
        "rollout": f"tp{case.rollout.tp}",
        "rollout_replicas": case.rollout.dp,
        "ranks": case.ranks,
        "hosts": case.hosts,
        "ranks_per_host": case.ranks_per_host,
        "train_ranks": list(case.train.ranks),
        "rollout_ranks": list(case.rollout.ranks),
        "rank_order": described(case.train, case.rollout),
        "element_bytes": plan.element_bytes,
        "received_bytes": received,
        "sent_bytes": sent,
        "local_bytes": local,
        **split,
        "busiest_received_bytes": max(received),
        "lower_bound_bytes": plan.lower_bound_bytes,
        "ratio_to_lower_bound": max(received) / plan.lower_bound_bytes if plan.lower_bound_bytes else 1.0,
        "gather_all_bytes": plan.gather_all_bytes,
        "messages": plan.messages,
        "windows": len(plan.windows),
        "window_bytes": plan.window_bytes,
        "staged_bytes": staged,
        "peak_extra_bytes": max(staged),
        "peak_memory": peak_memory(
            plan,
            *shards,
            replicas=case.replicas(),
            host_of=case.host_of,
            peer_memory=peer_memory and case.hosts == 1,
        ),
        "seconds": {
            "overlapped": _overlapped(case, split, local, rates),
            "one_after_another": _one_after_another(case, flows, rates),
        },
        "rates_bytes_per_s": asdict(rates),
    }


def _split(case: Case, flows: Flows) -> dict[str, list[int]]:
    """Return the bytes between ranks, received and sent, by distance."""
    split = {
        f"{way}_{distance}_host_bytes": [0] * case.ranks
        for way in ("received", "sent")
        for distance in ("same", "other")
    }
    for (giver, taker), size in flows.total.items():
        if giver != taker:
            distance = "same" if case.host_of(giver) == case.host_of(taker) else "other"
            split[f"sent_{distance}_host_bytes"][giver] += size
            split[f"received_{distance}_host_bytes"][taker] += size
    return split


def _overlapped(case: Case, split: dict[str, list[int]], local: list[int], rates: Rates) -> float:
    """Return the seconds if every link of the busiest rank runs at full rate, all concurrently."""
    amounts = [local] + [
        [
            max(split[f"{way}_{distance}_host_bytes"][rank] for way in ("received", "sent"))
            for rank in range(case.ranks)
        ]
        for distance in ("same", "other")
    ]
    return max(
        max(sizes) / rate for sizes, rate in zip(amounts, (rates.same_gpu, rates.same_host, rates.other_host))
    )


def _one_after_another(case: Case, flows: Flows, rates: Rates) -> float:
    """Return the seconds if direct copies come first, then each window is packed, exchanged and unpacked."""
    seconds = 0.0
    for flow in (flows.direct, *flows.windows):
        copied: dict[int, float] = defaultdict(float)
        wire: dict[tuple[int, int, float], float] = defaultdict(float)  # by rank, direction and link
        for (giver, taker), size in flow.items():
            if giver != taker:
                rate = rates.same_host if case.host_of(giver) == case.host_of(taker) else rates.other_host
                wire[giver, 0, rate] += size / rate
                wire[taker, 1, rate] += size / rate
            if giver == taker or flow is not flows.direct:
                copied[giver] += size / rates.same_gpu
                copied[taker] += (giver != taker) * size / rates.same_gpu
        seconds += max(copied.values(), default=0) + max(wire.values(), default=0)
    return seconds


def table(report: dict) -> str:
    """Return the report as text: a few lines, whatever the number of ranks."""
    shown = {
        "received, same host": report["received_same_host_bytes"],
        "received, other host": report["received_other_host_bytes"],
        "sent, same host": report["sent_same_host_bytes"],
        "sent, other host": report["sent_other_host_bytes"],
        "copied on its own GPU": report["local_bytes"],
    }
    lines = [
        f"{report['model']}: {report['train']} -> {report['rollout_replicas']} x {report['rollout']}"
        f" on {report['ranks']} ranks, {report['ranks_per_host']} a host; {report['element_bytes']} bytes "
        "an element",
        f"ranks: {report['rank_order']}",
        "",
        f"{'MiB a rank':<24}{'least':>12}{'mean':>12}{'most':>12}{'all ranks':>16}",
    ]
    for name, sizes in shown.items():
        numbers = (min(sizes), sum(sizes) / len(sizes), max(sizes))
        lines.append(
            f"{name:<24}"
            + "".join(f"{size / 2**20:>12,.1f}" for size in numbers)
            + f"{sum(sizes) / 2**20:>16,.1f}"
        )
    received, bound, everything, staged = (
        f"{report[f'{key}_bytes'] / 2**20:,.1f}"
        for key in ("busiest_received", "lower_bound", "gather_all", "peak_extra")
    )
    seconds, window = report["seconds"], f"{report['window_bytes'] / 2**20:g}"
    lines += [
        "",
        (
            f"busiest rank receives   {received} MiB; lower bound {bound}, ratio "
            f"{report['ratio_to_lower_bound']:.3f}; gathering everything {everything}"
        ),
        (
            f"messages                {report['messages']:,} in {report['windows']} windows of {window} MiB; "
            f"a rank stages at most {staged}"
        ),
        (
            f"seconds predicted       {seconds['overlapped']:.4f} if all links run at once, "
            f"{seconds['one_after_another']:.4f} if copies and windows follow each other"
        ),
        (
            f"weights and staging     larger copy {report['peak_memory']['larger_copy_bytes'] / 2**30:,.2f} "
            "GiB; on the fullest rank:"
        ),
    ]
    lines += [
        f"  {mode:<22}{report['peak_memory'][mode]['bytes'] / 2**30:,.2f} GiB{_remark(report, mode)}"
        for mode in MODES
    ]
    return "\n".join(lines)


def _remark(report: dict, mode: str) -> str:
    """Return how much memory of its own vLLM needs, and for how many ranks that was computed."""
    found = report["peak_memory"][mode]
    text = f", {found['own_bytes'] / 2**30:,.2f} of it vLLM's own" if "own_bytes" in found else ""
    if mode == "swap" and not found["planned_ranks"]:
        return text + (
            f"; at least, since where more than {EXACT_RANKS} ranks exchange circles of overwriting are "
            "not looked for"
        )
    return text + (
        f"; planned on {found['planned_ranks']} ranks, which the others repeat"
        if mode == "swap" and found["planned_ranks"] < report["ranks"]
        else ""
    )


def draw(case: Case, flows: Flows, path: Path) -> None:
    """Plot the traffic: source ranks as rows, destination ranks as columns, copies on the diagonal.

    Shows ranks with lines between hosts, or hosts if there are too many ranks.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes files, needs no display
    import numpy as np
    from matplotlib import pyplot

    of = 1 if case.ranks <= DRAWN_RANKS else case.ranks_per_host
    size = -(-case.ranks // of)
    sent_SD = np.zeros((size, size))  # S source, D destination; MiB
    for pair, amount in flows.total.items():
        sent_SD[pair[0] // of, pair[1] // of] += amount / 2**20
    figure, axis = pyplot.subplots(figsize=(9, 8), layout="constrained")
    image = axis.imshow(np.ma.masked_equal(sent_SD, 0), interpolation="nearest", vmin=0)
    figure.colorbar(image, label="MiB (white: nothing)", shrink=0.8)
    for edge in range(case.ranks_per_host, case.ranks, case.ranks_per_host) if of == 1 else ():
        for line in (axis.axhline, axis.axvline):
            line(edge - 0.5, color="black", linewidth=1.2)
    for giver, taker in zip(*sent_SD.nonzero()) if size <= 16 else ():
        amount = sent_SD[giver, taker]
        colour = "black" if amount > sent_SD.max() / 2 else "white"
        axis.text(
            taker,
            giver,
            f"{amount:.3g}" if amount < 1000 else f"{amount:.0f}",
            ha="center",
            va="center",
            fontsize=8,
            color=colour,
        )
    axis.locator_params(integer=True)
    who = "rank" if of == 1 else f"host of {of} ranks"
    axis.set(xlabel=f"{who} that receives (vLLM)", ylabel=f"{who} that sends (Megatron)")
    hosts = "one host" if case.hosts == 1 else f"{case.hosts} hosts" + ", parted by lines" * (of == 1)
    order = f"ranks: {described(case.train, case.rollout)}"
    axis.set_title(
        f"{case.model}: {case.train} to {case.rollout.dp} x tp{case.rollout.tp}, {case.ranks} ranks, "
        f"{hosts}\n{order}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def number(kind: type, remedy: str) -> Callable[[str], float]:
    """Argument type: a positive number, with an example of a valid one for the error."""

    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not accepted; write {remedy}")
        return value

    return read


def stages(text: str) -> tuple[int, ...]:
    count = number(int, "layers of each stage such as 15,16,16,16")
    return tuple(int(count(part)) for part in text.split(","))


class _Options(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def parser() -> argparse.ArgumentParser:
    options = _Options(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    ranks, rate = (
        number(int, f"a whole number from 1 to {MAX_RANKS}"),
        number(float, "bytes a second above 0, such as 50e9"),
    )
    options.add_argument(
        "--hf", required=True, help=f"folder with a config.json, or a built-in shape: {', '.join(SHAPES)}"
    )
    options.add_argument("--train", required=True, help="Megatron's layout, such as tp8pp4 or tp4pp4vpp2")
    options.add_argument(
        "--rollout", required=True, help="vLLM's tensor parallelism, such as tp8; replicas fill the ranks"
    )
    options.add_argument("--ranks", type=ranks, help="default: the smallest number that fits both layouts")
    options.add_argument("--hosts", type=ranks, help=f"default: {HOST_RANKS} ranks a host")
    options.add_argument(
        "--rank-order",
        default="auto",
        choices=["auto", "plain"],
        help="auto: ranks take the places that move least; plain: tp varies fastest",
    )
    options.add_argument(
        "--peer-memory",
        action="store_true",
        help="ranks of one host read each other's memory: neither messages nor staging between them",
    )
    options.add_argument(
        "--stage-layers",
        type=stages,
        default=(),
        help="layers of each pipeline stage, such as 15,16,16,16; default: all alike",
    )
    options.add_argument(
        "--dtype", default="bfloat16", choices=list(ELEMENT_BYTES), help="of the weights in both copies"
    )
    options.add_argument(
        "--window-mib",
        type=number(int, "a whole number of MiB above 0"),
        default=256,
        help="staging memory of one exchange",
    )
    options.add_argument(
        "--same-gpu-rate",
        type=rate,
        default=Rates.same_gpu,
        help="bytes copied a second on one GPU (half of read and written)",
    )
    options.add_argument(
        "--same-host-rate",
        type=rate,
        default=Rates.same_host,
        help="bytes a second between GPUs of one host, each way",
    )
    options.add_argument(
        "--other-host-rate",
        type=rate,
        default=Rates.other_host,
        help="bytes a second of a GPU to other hosts, each way",
    )
    options.add_argument("--json", type=Path, help="write all numbers to this file")
    options.add_argument("--png", type=Path, help="draw who sends what to whom into this file")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parser()
    given = options.parse_args(arguments)
    try:
        _check_files(given.json, given.png)
        case = read_case(
            hf=given.hf,
            train=given.train,
            rollout=given.rollout,
            ranks=given.ranks,
            hosts=given.hosts,
            stage_layers=given.stage_layers,
        )
        case = case.placed() if given.rank_order == "auto" else case
        shards = case.shards()
        sizes = {"element_bytes": ELEMENT_BYTES[given.dtype], "window_bytes": given.window_mib << 20}
        plan = compile_plan(
            source=shards[0],
            destination=shards[1],
            host_of=case.host_of,
            peer_memory=given.peer_memory,
            **sizes,
        )
        flows = flows_of(plan)
        rates = Rates(
            same_gpu=given.same_gpu_rate, same_host=given.same_host_rate, other_host=given.other_host_rate
        )
        report = report_of(case, plan, flows, shards, rates, peer_memory=given.peer_memory)
        print(table(report))
        if given.json:
            given.json.write_text(
                json.dumps(report | {"dtype": given.dtype, "peer_memory": given.peer_memory}, indent=1) + "\n"
            )
        if given.png:
            draw(case, flows, given.png)
    except (ValueError, OSError) as error:
        options.error(str(error))


def _check_files(json_path: Path | None, png_path: Path | None) -> None:
    """Check the output files before the computation."""
    for option, path in (("--json", json_path), ("--png", png_path)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(
                f"{option} {path} cannot be written: it is a folder or in none that exists; name a file in a "
                "folder that exists"
            )
        if path and option == "--png" and path.suffix != ".png":
            raise ValueError(f"--png {path} must end in .png; rename it")


if __name__ == "__main__":
    gc.disable()  # a plan has a million records without reference cycles
    main()
