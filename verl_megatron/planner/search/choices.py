"""What the layout search tries: settings on top of a base configuration.

They choose the layout of the models (the critic's equals the actor's), replicated weights or full sharding,
and the micro-batch size or recomputation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil

import torch

from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head
from verl_megatron.algorithms import get_algorithm
from verl_megatron.checks.settings import check_planned
from verl_megatron.config import RewardConfig, TrainerConfig
from verl_megatron.config.section import attribute_of
from verl_megatron.model_specs import scoring_worlds
from verl_megatron.planner.machine import Machine
from verl_megatron.planner.planned_run import served_elements, splits
from verl_megatron.planner.static import smallest_tp
from verl_megatron.rollout.vllm_weights.fp8 import fp8_problems

LONG_SAMPLE = 8192  # tokens of a sample from which context parallelism is tried
# Simplest first.
MODES, OFFLOADS = ("keep", "share", "swap"), ("none", "grads", "optimizer", "all", "steps")
FROZEN_SHARE = 1 / 8  # of a GPU, at most, for the reward model's weights, which stay there all the time
VPPS, CPS = (1, 2, 4), (1, 2, 4, 8)
CHOSEN = ("actor.layout", "critic.layout", "actor.stage_layers", "critic.stage_layers",
          "rollout.devices", "rollout.tp", "rollout.gpu_memory_utilization",
          "reshard.mode", "reshard.offload", "engine.recompute")  # fmt: skip
ALWAYS_SAID = (
    "actor.layout",
    "critic.layout",
    "engine.tokens_per_micro_batch",
    "rollout.tp",
    "rollout.gpu_memory_utilization",
    "reshard.mode",
    "reshard.offload",
)
Settings = dict[str, str | int | float | list[int]]  # by SECTION.SETTING


def configured(base: TrainerConfig, chosen: Settings) -> TrainerConfig:
    """Return a copy of `base` with the chosen settings."""
    changes: dict[str, dict] = {}
    for name, value in chosen.items():
        section, setting = name.split(".")
        changes.setdefault(attribute_of(section), {})[setting] = value
    return replace(
        base, **{section: replace(getattr(base, section), **values) for section, values in changes.items()}
    )


def setting_of(config: TrainerConfig, name: str):
    section, setting = name.split(".")
    return getattr(getattr(config, attribute_of(section)), setting)


def spelled(value: str | int | float | list[int]) -> str:
    """Format a value for a command line: lists without spaces."""
    return str(value).replace(" ", "")


def layouts(
    base: TrainerConfig, world: int, ranks_per_host: int, read: Callable[[str], Architecture]
) -> Iterator[Settings]:
    """Yield layout settings of all models, and full sharding where dp is all; dp is what is left.

    Tensor parallelism stays within a host and comes with sequence parallelism.
    """
    models = {"actor": base.actor.path}
    if "critic" in get_algorithm(base.algorithm).needs and not base.critic.share_trunk:
        models["critic"] = base.critic.path or base.actor.path
    layers = {name: read(path).num_layers for name, path in models.items()}
    may_shard = _may_shard(base, read(base.actor.path), world)
    is_long = base.data.max_prompt_tokens + base.rollout.max_tokens >= LONG_SAMPLE
    stages = [pp for pp in range(1, min(world, *layers.values()) + 1) if world % pp == 0]
    for tp, pp, cp in product(tensor_sizes(ranks_per_host), stages, CPS if is_long else (1,)):
        if world % (tp * pp * cp) or (base.engine.sharding == "full" and tp * pp * cp > 1):
            continue
        split = {f"{name}.stage_layers": uneven_stages(count, pp) for name, count in layers.items()}
        for vpp in VPPS if pp > 1 and not any(split.values()) else (1,):
            if all(count // pp % vpp == 0 for count in layers.values()):
                sizes = "".join(
                    f"{axis}{size}"
                    for axis, size in (("tp", tp), ("pp", pp), ("vpp", vpp), ("cp", cp))
                    if size > 1
                )
                models_layouts: Settings = {
                    f"{name}.layout": (sizes or "tp1") + "sp" * (tp > 1) for name in models
                }
                yield models_layouts | split
                if may_shard and tp * pp * cp == 1:
                    yield models_layouts | {"engine.sharding": "full"}


def _may_shard(base: TrainerConfig, arch: Architecture, world: int) -> bool:
    """Whether full sharding is a choice: not set already, and nothing in `base` contradicts it."""
    if base.engine.sharding == "full":
        return False
    plain, sharded = (
        configured(base, {"engine.sharding": sharding, "reshard.mode": "keep"})
        for sharding in ("replicated", "full")
    )
    known = check_planned(plain, arch, world)
    return all(problem in known for problem in check_planned(sharded, arch, world))


def uneven_stages(layers: int, pp: int) -> list[int]:
    """Layers of each stage if `pp` does not divide them.

    The first and the last stage have fewer, because they have embedding and output. Empty if `pp` divides the
    layers, or if nothing would be left for those two.
    """
    middle = ceil(layers / pp)
    ends = layers - middle * (pp - 2)
    if layers % pp == 0 or ends < 2:
        return []
    return [ceil(ends / 2)] + [middle] * (pp - 2) + [ends // 2]


def activation_options(base: TrainerConfig) -> Iterator[Settings]:
    """Yield sizes of micro-batches, and recomputation.

    These are: as configured, smaller micro-batches that still fit a sample, in fp8 larger ones, as its
    kernels are quicker to compute and slower to launch, and full recomputation.
    """
    tokens, length = base.engine.tokens_per_micro_batch, base.data.max_prompt_tokens + base.rollout.max_tokens
    sizes = [tokens]
    if not base.engine.dynamic_batching:
        sizes += [size for size in (tokens // 2, tokens // 4) if size >= length]
        sizes += [2 * tokens] if base.engine.dtype == "fp8" else []
    for size in sizes:
        yield {"engine.recompute": "none", "engine.tokens_per_micro_batch": size}
    yield {"engine.recompute": "full", "engine.tokens_per_micro_batch": tokens}


def tensor_sizes(ranks_per_host: int) -> list[int]:
    """Powers of two whose groups stay within a host."""
    return [2**power for power in range(ranks_per_host.bit_length()) if ranks_per_host % 2**power == 0]


def serves(base: TrainerConfig, arch: Architecture, tp: int) -> bool:
    """Whether vLLM can have the model at tensor-parallel size `tp`."""
    if base.rollout.weight_dtype == "fp8" and fp8_problems(arch, tp, torch.bfloat16):
        return False
    return splits(served_elements, arch, tp)


def frozen_layouts(
    base: TrainerConfig, machine: Machine, sizes: Sequence[int], read: Callable[[str], Architecture]
) -> Settings:
    """Layouts under which reward model and teacher take little of a GPU, unless the user chose them.

    Args:
        sizes: of tensor parallelism, to choose from.
    """
    layouts, apart = {}, {name for world in scoring_worlds(base) for name in world.models}
    heads: dict[str, Head] = {"reward": "sequence", "teacher": "lm"}
    for section, head in heads.items():
        model = getattr(base, section)
        if model.path and model.layout == RewardConfig().layout and section not in apart:
            tp = smallest_tp(read(model.path), head, sizes, base, machine, share=FROZEN_SHARE)
            layouts[f"{section}.layout"] = f"tp{tp}" + "sp" * (tp > 1)
    return layouts
