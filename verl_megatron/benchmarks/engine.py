"""Forward passes and optimizer steps of a model without vLLM, in turns: `benchmark engine`.

Letters: P packed tokens of a micro-batch, V vocabulary rows of a tensor-parallel rank.
"""

import argparse
import csv
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import agree, world
from parallel.runtime.refusal import RefusalError, complain
from parallel.weights.architecture import Architecture, read_architecture
from parallel.weights.shapes import shape
from verl_megatron.algorithms.losses import policy_loss
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.algorithms.objectives import clip
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.benchmarks.case import check_room, say
from verl_megatron.benchmarks.options.engine import read_options
from verl_megatron.checks.limits import check_values
from verl_megatron.checks.problems import refuse
from verl_megatron.config import EngineConfig, TrainerConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.packing import Units, members_of
from verl_megatron.models.heads import head_weight
from verl_megatron.observe.metrics import Sums
from verl_megatron.observe.profiling import described, make_profiler
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.preflight import machine_here
from verl_megatron.planner.training import forward_flops
from verl_megatron.roles.engine import Engine, EngineOptions, Loss

# once parallel.device has prepared the machine
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # isort: skip

GIB = 2**30
FIELDS = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: seconds of the slowest rank, memory of the fullest."""

    name: str
    seconds: float
    flops: float  # per GPU
    peak_bytes: float  # above the memory allocated beforehand

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12


def make_rows(options: argparse.Namespace, *, vocab_size: int, seed: int) -> RolloutBatch:
    """Return random tokens with random advantages; old log-probs are about right for an untrained model."""
    draw, count, prompt = torch.Generator().manual_seed(seed), options.rows, options.prompt
    ids = torch.randint(3, vocab_size, (count, prompt + options.response), generator=draw).tolist()
    group_id = torch.arange(count) // options.samples_per_prompt
    batch = RolloutBatch.from_lists(
        list(range(count)),
        [ids[group * options.samples_per_prompt][:prompt] for group in group_id.tolist()],
        [row[prompt:] for row in ids],
    )
    batch.group_id = group_id
    batch.advantages = torch.randn(batch.generated_ids.shape, generator=draw) * batch.response_mask
    batch.logprobs = (
        -torch.full_like(batch.advantages, torch.tensor(float(vocab_size)).log().item()) * batch.response_mask
    )
    return batch


def parse_settings(given: list[str]) -> EngineConfig:
    """Parse `name=value` pairs of the section engine; commas separate the numbers of a list.

    Raises:
        ValueError: a name that the section does not have, or a value of another type.
    """
    config = EngineConfig(adam_eps=1e-5)
    known = {field.name: type(getattr(config, field.name)) for field in fields(config)}
    read = {
        bool: lambda text: {"true": True, "false": False}[text.lower()],
        list: lambda text: [float(part) for part in text.strip("[]").split(",")],
    }
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            raise ValueError(f"--set {text}: engine has no setting {name}; it has {', '.join(known)}")
        try:
            config = replace(config, **{name: read.get(known[name], known[name])(value)})
        except (KeyError, ValueError):
            raise ValueError(f"--set {text}: {name} is of type {known[name].__name__}") from None
    return config


@contextmanager
def measured(rows: dict[str, list[tuple[float, float]]], name: str):
    """Record the seconds of the block, between barriers of all ranks, and its peak memory."""
    dist.barrier()
    device.synchronize()
    before = torch.cuda.memory_allocated() if device.is_gpu() else 0
    if device.is_gpu():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    device.synchronize()
    dist.barrier()
    peak = torch.cuda.max_memory_allocated() - before if device.is_gpu() else 0
    rows.setdefault(name, []).append((time.perf_counter() - start, peak))


def product_rate() -> float:
    """Return the FLOP/s of a large matrix product on this device, in the models' compute dtype."""
    size, dtype = (8192, torch.bfloat16) if device.is_gpu() else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device.device(), dtype=dtype) for _ in range(2))
    for count in (3, 20):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            torch.matmul(a, b)
        device.synchronize()
    return 20 * 2 * size**3 / (time.perf_counter() - start)


def policy(outputs, micro):
    """Return PPO's clipped loss with its usual settings."""
    tokens, config = PolicyTokens.of(micro), TrainerConfig().algorithm
    return policy_loss(outputs["logprobs"], outputs["entropy"], tokens, clip.objective, config, 0.0)


class Bench:
    """The engine and its samples."""

    def __init__(self, arch: Architecture, layout: Layout, config: EngineConfig, options: argparse.Namespace):
        self.engine = Engine(
            arch=arch,
            folder=None,
            groups=ProcessGroups(layout, world()),
            head="lm",
            options=EngineOptions(config=config, seed=1),
        )
        seed = self.engine.groups.coordinates.dp
        self.batch = make_rows(options, vocab_size=arch.vocab_size, seed=seed)
        units = Units([[row] for row in range(options.rows)], self.batch.lengths.tolist())
        if config.shared_prompts:
            members = members_of(self.batch.required("group_id").tolist())
            units = Units(members, units.lengths, [options.prompt] * options.rows)
        self.micro = units.micro_batches(
            tokens_per_micro_batch=config.tokens_per_micro_batch * layout.cp,
            multiple_of=layout.pp if layout.vpp > 1 else 1,
        )
        self.num_tokens, self.num_steps = options.rows * options.response * layout.dp, options.steps

    def infer(self) -> None:
        self.engine.infer(self.batch, self.micro)

    def step(self) -> None:
        self._steps(policy, FIELDS)

    def _steps(self, loss: Loss, given: tuple[str, ...]) -> None:
        for _ in range(self.num_steps):
            self.engine.train_step(
                self.batch, self.micro, loss, fields=given, scale=LossScale(self.num_tokens)
            )
        self.engine.gather_weights()

    def plain_step(self) -> None:
        """Run a step on all tokens' cross-entropies: full logits, Megatron-Core's function."""
        usual = self.engine.outputs

        def outputs(output, micro, model):
            logits_P1V = (output.squeeze(0) @ head_weight(model).t()).unsqueeze(1).float()
            return {"losses": vocab_parallel_cross_entropy(logits_P1V, micro.tokens.transpose(0, 1))}

        self.engine.outputs = outputs
        try:
            self._steps(lambda outputs, micro: (outputs["losses"].sum(), Sums()), ())
        finally:
            self.engine.outputs = usual


def run(
    bench: Bench, work: dict[str, Callable[[], None]], flops: dict[str, float], *, repetitions: int
) -> list[Row]:
    """Run the methods alternately after a warm-up round; returns medians, for steps in seconds per step."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for repetition in range(repetitions + 1):
        for name, do in work.items():
            with measured(rows if repetition else {}, name):
                do()
    found = []
    for name, values in rows.items():
        seconds, peaks = zip(*world().all_max(torch.tensor(values, dtype=torch.float64)).tolist())
        count = 1 if name == "log-probs" else bench.num_steps
        found.append(
            Row(
                name=name,
                seconds=sorted(seconds)[len(seconds) // 2] / count,
                flops=flops[name],
                peak_bytes=max(peaks),
            )
        )
    return found


def profile(bench: Bench) -> None:
    """Profile one step and one pass on the first rank's GPU and process."""
    for name, do in (("step", bench.step), ("log-probs", bench.infer)):
        with make_profiler() as found:
            do()
            device.synchronize()
        say(f"{name}:\n{described(found)}")


def planned_run(
    options: argparse.Namespace, arch: Architecture, layout: Layout, settings: EngineConfig
) -> PlannedRun:
    """Return the planned run of one optimizer step on all ranks.

    Raises:
        ValueError: settings outside their range.
    """
    config = TrainerConfig(engine=settings)
    config.actor.path, config.actor.layout, config.algorithm.name = (
        str(options.hf or options.shape),
        options.layout,
        "grpo",
    )
    rows, group = options.rows, options.samples_per_prompt
    if group < 1 or rows % group:
        raise ValueError(f"--samples-per-prompt={group} does not divide --rows={rows}; choose a divisor")
    if settings.shared_prompts and layout.cp > 1:
        raise ValueError(f"--set shared_prompts=true needs a layout without cp, not --layout={layout}")
    config.data.prompts_per_iteration, config.data.samples_per_prompt = rows * layout.dp // group, group
    config.data.max_prompt_tokens, config.rollout.max_tokens = options.prompt, options.response
    refuse(check_values(config))
    return PlannedRun.of(config, world_size=dist.get_world_size(), read=lambda _: arch)


def read_case(
    options: argparse.Namespace, world_size: int
) -> tuple[EngineConfig, Architecture, Layout, PlannedRun]:
    """Return what the options name; ValueError if they name nothing that can be measured."""
    settings = parse_settings(options.set)
    arch = (
        read_architecture(options.hf)
        if options.hf
        else Architecture.from_hf(shape(options.shape, layers=options.layers))
    )
    layout = Layout.parse(options.layout, tuple(range(world_size)))
    # float32: weights, and to train gradients and Adam's two moments
    check_room(arch, layout, bytes_per_parameter=4 if options.no_train else 16)
    return settings, arch, layout, planned_run(options, arch, layout, settings)


def prompt_logits_flops(planned: PlannedRun) -> float:
    """Return the FLOPs of logits that nothing asks for, of which only the baseline computes any."""
    arch, tokens = planned.actor.arch, planned.samples * (planned.packed_tokens - planned.response_tokens)
    return 2 * tokens * arch.hidden_size * arch.vocab_size


def main() -> None:
    options = read_options()
    device.initialize()
    ranks = world().size
    settings, arch, layout, planned = agree(lambda: read_case(options, ranks), world())
    forward = forward_flops(planned, planned.actor) / ranks
    all_logits = prompt_logits_flops(planned) / ranks

    bench = Bench(arch, layout, settings, options)
    work, flops = (
        {"log-probs": bench.infer},
        {"log-probs": forward, "step": 3 * forward, "step, plain": 3 * (forward + all_logits)},
    )
    if not options.no_train:
        bench.engine.prepare_training(lr=1e-6, total_steps=1000)
        work |= {"step": bench.step} | ({"step, plain": bench.plain_step} if options.baseline else {})
    rate = product_rate()
    rows = run(bench, work, flops, repetitions=options.repetitions)
    show(rows, planned, layout, settings, rate=rate, path=options.csv)
    if options.profile:
        profile(bench)
    dist.destroy_process_group()


def show(
    rows: list[Row],
    planned: PlannedRun,
    layout: Layout,
    settings: EngineConfig,
    *,
    rate: float,
    path: Path | None,
) -> None:
    machine, arch = machine_here(), planned.actor.arch
    peak = machine.peak_flops if machine else 0.0
    what = (
        f"{planned.config.actor.path} ({arch.num_layers} layers) {layout}, {planned.samples} samples of "
        f"{planned.prompt_tokens} + {planned.response_tokens} tokens, {planned.config.engine.dtype}, "
    )
    say(
        f"{what}micro-batches of {settings.tokens_per_micro_batch} tokens, recompute {settings.recompute}, "
        f"{torch.cuda.get_device_name() if device.is_gpu() else 'CPU ranks'}"
    )
    logits_bytes = 4 * settings.tokens_per_micro_batch * arch.vocab_size / layout.tp
    say(
        f"whole float32 logits of a micro-batch would take {logits_bytes / GIB:.1f} GiB a rank; this "
        f"device's matrix product reaches {rate / 1e12:.1f} TFLOP/s"
    )
    say(
        f"{'':14}{'seconds':>9}{'TFLOP/s':>10}{'of product':>12}{'MFU':>8}{'peak GiB':>10}"
        f"{'tokens/s/rank':>15}"
    )
    tokens = planned.samples * planned.packed_tokens / planned.world_size
    for row in rows:
        mfu = f"{row.flops / row.seconds / peak:>8.1%}" if peak else f"{'-':>8}"
        say(
            f"{row.name:14}{row.seconds:>9.3f}{row.tflops:>10.2f}{row.flops / row.seconds / rate:>12.1%}{mfu}"
            f"{row.peak_bytes / GIB:>10.1f}{tokens / row.seconds:>15,.0f}"
        )
    if path and dist.get_rank() == 0:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["name", "layout", "seconds", "tflops", "product_tflops", "peak_tflops", "peak_bytes"]
            )
            writer.writerows(
                [row.name, str(layout), row.seconds, row.tflops, rate / 1e12, peak / 1e12, row.peak_bytes]
                for row in rows
            )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        complain(str(error), agreed=isinstance(error, RefusalError))
