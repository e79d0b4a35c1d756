"""Report of a plan: bytes, messages, memory and predicted seconds, as the content of a JSON and as text."""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from operator import add

from parallel.placement import described
from parallel.reshard.plan import Plan
from parallel.reshard.transfer import Transfer
from parallel.weights.shard import Shards
from verl_megatron.planner.reshard.case import PlanCase
from verl_megatron.planner.reshard.memory import EXACT_RANKS, peak_memory

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


def flows_of(plan: Plan) -> Flows:
    direct: Counter[tuple[int, int]] = Counter()
    for transfer in plan.direct:
        direct[transfer.source_rank, transfer.destination_rank] += transfer.elements * plan.element_bytes
    windows, total = [], direct.copy()
    for window in plan.windows:
        flow = {pair: _elements(message) * plan.element_bytes for pair, message in window.items()}
        windows.append(flow)
        total.update(flow)
    return Flows(direct, windows, total)


def _elements(message: list[Transfer]) -> int:
    return sum(transfer.elements for transfer in message)


def report_of(
    case: PlanCase,
    plan: Plan,
    flows: Flows,
    shards: tuple[Shards, Shards],
    rates: Rates,
    *,
    peer_memory: bool = False,
) -> dict:
    """Return the content of the JSON; lists have one number per rank, from rank 0 on."""
    split, peak = _split(case, flows), plan.staged_bytes
    local = [flows.total.get((rank, rank), 0) for rank in range(case.ranks)]
    staged = [peak[rank] for rank in range(case.ranks)]
    received, sent = (
        list(map(add, split[f"{way}_same_host_bytes"], split[f"{way}_other_host_bytes"]))
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


def _split(case: PlanCase, flows: Flows) -> dict[str, list[int]]:
    """Return the bytes between ranks, received and sent, by distance."""
    split = {
        f"{way}_{distance}_host_bytes": [0] * case.ranks
        for way in ("received", "sent")
        for distance in ("same", "other")
    }
    for (src, dst), size in flows.total.items():
        if src != dst:
            distance = "same" if case.host_of(src) == case.host_of(dst) else "other"
            split[f"sent_{distance}_host_bytes"][src] += size
            split[f"received_{distance}_host_bytes"][dst] += size
    return split


def _overlapped(case: PlanCase, split: dict[str, list[int]], local: list[int], rates: Rates) -> float:
    """Return the seconds if every link of the busiest rank runs at full rate, all concurrently."""
    seconds = [max(local) / rates.same_gpu]
    for distance, rate in (("same", rates.same_host), ("other", rates.other_host)):
        for way in ("received", "sent"):
            seconds.append(max(split[f"{way}_{distance}_host_bytes"]) / rate)
    return max(seconds)


def _one_after_another(case: PlanCase, flows: Flows, rates: Rates) -> float:
    """Return the seconds if direct copies come first, then each window is packed, exchanged and unpacked."""
    seconds = 0.0
    for flow in (flows.direct, *flows.windows):
        copied: dict[int, float] = defaultdict(float)
        wire: dict[tuple[int, int, float], float] = defaultdict(float)  # by rank, direction and link
        for (src, dst), size in flow.items():
            if src != dst:
                rate = rates.same_host if case.host_of(src) == case.host_of(dst) else rates.other_host
                wire[src, 0, rate] += size / rate
                wire[dst, 1, rate] += size / rate
            if src == dst or flow is not flows.direct:
                copied[src] += size / rates.same_gpu
                copied[dst] += (src != dst) * size / rates.same_gpu
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
    memory = report["peak_memory"][mode]
    text = f", {memory['own_bytes'] / 2**30:,.2f} of it vLLM's own" if "own_bytes" in memory else ""
    if mode == "swap" and not memory["planned_ranks"]:
        return text + (
            f"; at least, since where more than {EXACT_RANKS} ranks exchange cycles of overwriting are "
            "not looked for"
        )
    return text + (
        f"; planned on {memory['planned_ranks']} ranks, which the others repeat"
        if mode == "swap" and memory["planned_ranks"] < report["ranks"]
        else ""
    )
