"""Log-probs, or scores, of one model in several dtypes, one after the other: `benchmark precision`."""

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import agree, world
from parallel.runtime.refusal import RefusalError, complain
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.rules import Head
from verl_megatron.benchmarks.case import say
from verl_megatron.benchmarks.options.precision import DTYPES, read_options
from verl_megatron.benchmarks.output import versions, write_csv
from verl_megatron.checks.folders import check_weights
from verl_megatron.config import EngineConfig, SFTDataConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import balance, micro_batches
from verl_megatron.data.prompts import DemonstrationDataset
from verl_megatron.data.tokenizer import load_tokenizer
from verl_megatron.roles.compute import compute_of
from verl_megatron.roles.engine import Engine, EngineOptions

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: the fullest rank's weights, the slowest rank's pass, gaps to the first line."""

    dtype: str
    weights_gib: float  # 0 on CPUs
    seconds: float
    gap_mean: float  # mean absolute difference, of log-probs in nats
    gap_max: float
    kl: float  # mean k3 of a token from the first line's distribution, nats; 0 of scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its layout, and this rank's samples with their micro-batches."""

    arch: Architecture
    groups: ProcessGroups
    head: Head
    batch: RolloutBatch
    micro: list[list[int]]


def read_samples(options: argparse.Namespace, arch: Architecture) -> RolloutBatch:
    """Return the first demonstrations of --data, or random tokens.

    Raises:
        ValueError: the tokenizer or the data cannot be read.
    """
    if options.data is None:
        generator = torch.Generator().manual_seed(1)
        shape = (options.rows, options.prompt + options.response)
        ids = torch.randint(3, arch.vocab_size, shape, generator=generator).tolist()
        texts = [(row[: options.prompt], row[options.prompt :]) for row in ids]
    else:
        config = SFTDataConfig(
            train=options.data, max_tokens=options.prompt + options.response, overlong="drop"
        )
        rows = DemonstrationDataset(
            options.data,
            load_tokenizer(options.hf),
            config,
            vocab_size=arch.vocab_size,
            max_rows=options.rows,
        )
        texts = [rows[i].samples()[0] for i in range(len(rows))]
    return RolloutBatch.from_lists(list(range(len(texts))), *map(list, zip(*texts)))


def read_case(options: argparse.Namespace, ranks: int) -> tuple[Architecture, Layout, RolloutBatch]:
    """Return what the options name; ValueError if it cannot be measured here."""
    for name in options.dtypes:
        dtype, by = DTYPES[name]
        compute_of(EngineConfig(dtype=dtype), fp8_weights_by=by)
    check_weights(str(options.hf), options.head)
    arch = read_architecture(options.hf)
    return arch, Layout.parse(options.layout, tuple(range(ranks))), read_samples(options, arch)


def results_of(case: Case, engine: Engine) -> Tensor:
    """Return log-probs of this rank's response tokens, or scores of its samples; empty without last stage."""
    is_score = case.head == "sequence"
    results = engine.infer(case.batch, case.micro, last_token=is_score)
    if results is None:
        return torch.zeros(0)
    return results["values"].sum(1) if is_score else results["logprobs"][case.batch.response_mask]


def measure(case: Case, name: str, folder: Path, *, repetitions: int) -> tuple[float, float, Tensor]:
    """Return bytes of the weights, seconds of a pass, and its results, of this rank."""
    dtype, by = DTYPES[name]
    before = _allocated()
    engine = Engine(
        arch=case.arch,
        folder=str(folder),
        groups=case.groups,
        head=case.head,
        options=EngineOptions(config=EngineConfig(dtype=dtype), seed=1, fp8_weights_by=by),
    )
    held, results = _allocated() - before, results_of(case, engine)  # which also warms up
    seconds = []
    for _ in range(repetitions):
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        results = results_of(case, engine)
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    return held, median(seconds), results


def _allocated() -> int:
    gc.collect()  # modules and their parameters refer to each other
    return torch.cuda.memory_allocated() if device.is_gpu() else 0


def gaps(results: Tensor, usual: Tensor, *, of_scores: bool) -> tuple[float, float, float]:
    """Return mean and largest absolute difference and the mean k3, over all ranks.

    k3 is exp(-x) - 1 + x with x = log p - log q, of p the usual distribution and q the other.
    """
    x = (usual - results).double()
    k3 = torch.zeros(1) if of_scores else torch.expm1(-x) + x
    total = world().all_sum(torch.tensor([x.abs().sum(), k3.sum(), len(x)], dtype=torch.float64))
    largest = world().all_max(x.abs().max() if len(x) else torch.zeros((), dtype=torch.float64))
    return float(total[0] / total[2]), float(largest), float(total[1] / total[2])


def compare(case: Case, options: argparse.Namespace) -> list[Row]:
    """Return a row per dtype, in the order of the options."""
    rows, usual = [], None
    for name in options.dtypes:
        held, seconds, results = measure(case, name, options.hf, repetitions=options.repetitions)
        usual = results if usual is None else usual
        most = world().all_max(torch.tensor([held, seconds], dtype=torch.float64)).tolist()
        mean, largest, kl = gaps(results, usual, of_scores=case.head == "sequence")
        rows.append(
            Row(
                dtype=name,
                weights_gib=most[0] / GIB,
                seconds=most[1],
                gap_mean=mean,
                gap_max=largest,
                kl=kl,
            )
        )
    return rows


def show(rows: list[Row], case: Case, options: argparse.Namespace) -> None:
    """Print the table, and write the CSV if one is wanted."""
    what = "scores" if options.head == "sequence" else "log-probs"
    say(
        f"{options.hf} {case.groups.layout}, {options.data or 'random tokens'}, "
        f"{torch.cuda.get_device_name() if device.is_gpu() else 'CPU ranks'}; differences of {what} are from "
        f"{options.dtypes[0]}'s"
    )
    say(f"{'':14}{'weights GiB':>12}{'seconds':>10}{'mean |gap|':>12}{'max |gap|':>11}{'KL of a token':>15}")
    for row in rows:
        kl = "-" if options.head == "sequence" else f"{row.kl:.2e}"
        say(
            f"{row.dtype:14}{row.weights_gib:>12.2f}{row.seconds:>10.3f}{row.gap_mean:>12.4f}"
            f"{row.gap_max:>11.3f}{kl:>15}"
        )
    if options.csv and dist.get_rank() == 0:
        run = dict(model=options.hf, layout=str(case.groups.layout), data=options.data or "random")
        write_csv(options.csv, run | versions(), rows)


def main() -> None:
    options = read_options()
    device.initialize()
    arch, layout, samples = agree(lambda: read_case(options, world().size), world())
    groups = ProcessGroups(layout, world())
    own = balance(samples.lengths.tolist(), layout.dp)[groups.coordinates.dp]
    batch = samples.select(torch.tensor(own, dtype=torch.int64))
    micro = micro_batches(
        batch.lengths.tolist(),
        tokens_per_micro_batch=options.tokens * layout.cp,
        multiple_of=layout.pp if layout.vpp > 1 else 1,
    )
    case = Case(arch=arch, groups=groups, head=options.head, batch=batch, micro=micro)
    show(compare(case, options), case, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        complain(str(error), agreed=isinstance(error, RefusalError))
