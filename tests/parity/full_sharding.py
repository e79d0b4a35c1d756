"""Full sharding: training, passes without gradients and offload against replicated weights."""

from pathlib import Path

import torch
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import Head
from tests.parity.training import CLASSES, FIELDS, LOSSES, LR, experience, full_weights
from tests.parity.world import (
    check,
    largest,
    metrics_apart,
    share_of,
    shared_folder,
    weights_apart,
    write_once,
)
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.roles.heads import HEADS
from verl_megatron.roles.inference import infer_models

COMMON = {"clip_grad": 0.5, "adam_eps": 1e-4, "lr_decay_style": "cosine", "lr_warmup_steps": 1}
# Head, family, ranks, settings. Three ranks divide few numbers of rows evenly.
CASES: tuple[tuple[Head, str, tuple[int, ...], dict], ...] = (
    ("lm", "qwen3", (0, 1), {"dtype": "float32"}),
    ("lm", "qwen2_tied_yarn", (0, 1, 2, 3), {"dtype": "float32", "recompute": "full"}),
    ("token", "llama_tied_llama3", (0, 1, 2), {"dtype": "float32", "recompute": "selective"}),
    ("lm", "qwen3", (0,), {"dtype": "float32"}),
    ("lm", "qwen3", (0, 1), {"dtype": "bfloat16"}),
    ("lm", "qwen3", (2, 3), {"dtype": "bfloat16", "recompute": "full"}),
)


def skewed(batch: RolloutBatch, layout: Layout) -> tuple[RolloutBatch, list[list[int]]]:
    """Give one sample to each rank of a layout but the first, which gets the rest, one a micro-batch."""
    rank = world().global_rank
    if rank not in layout.ranks:
        return batch, []
    index, count = layout.coordinates(rank).dp, len(batch.sample_id)
    samples = [count - index] if index else range(count - layout.dp + 1)
    return batch.select(torch.tensor(samples)), [[place] for place in range(len(samples))]


def train(engine: Engine, batch: RolloutBatch) -> tuple[list[dict], list[Tensor]]:
    """Take two balanced steps and one with more micro-batches on one rank, with passes without gradients."""
    history, inferred = [], []
    layout, budget = engine.layout, engine.config.tokens_per_micro_batch
    balanced = share_of(batch, layout, budget)
    for step, (mine, micro) in enumerate([balanced, balanced, skewed(batch, layout)]):
        answers = infer_models([engine], mine, micro, HEADS[engine.head].names)[0]
        inferred += list(answers.values()) if answers is not None else []
        engine.offload_async("all" if step else "grads")
        engine.wait_offload()
        sums = engine.train_step(
            mine,
            micro,
            LOSSES[engine.head],
            fields=FIELDS[engine.head],
            scale=LossScale(int(batch.response_mask.sum())),
        )
        history.append(sums.reduce(world()))
    return history, inferred


def make(path: Path, head: Head, layout: Layout, **settings) -> Engine:
    engine = Engine(
        arch=read_architecture(path),
        folder=str(path),
        groups=ProcessGroups(layout, world()),
        head=head,
        options=EngineOptions(config=EngineConfig(tokens_per_micro_batch=64, **COMMON, **settings), seed=1),
    )
    engine.prepare_training(lr=LR, total_steps=6)
    return engine


def check_full_sharding() -> None:
    """Metrics, weights and outputs are those of replicated weights; a rank holds its rows only."""
    folder = shared_folder()
    for head, family, ranks, settings in CASES:
        if ranks[-1] >= world().size:  # on machines with fewer GPUs
            continue
        path, layout = folder / f"{head}_{family}", Layout.parse("tp1", ranks)
        model = write_once(path, family, CLASSES[head], num_hidden_layers=3)
        batch = experience(model.config.vocab_size)
        plain, full = (
            make(path, head, layout, **settings),
            make(path, head, layout, sharding="full", **settings),
        )
        (want, outputs), (got, answers) = train(plain, batch), train(full, batch)
        dtype = plain.compute.dtype
        weights, trained = full_weights(plain), full_weights(full)
        gaps = {
            "metrics": metrics_apart(got, want),
            "outputs": largest([0.0, *((a - b).abs().max().item() for a, b in zip(answers, outputs))]),
            "weights": weights_apart({name: tensor.to(dtype) for name, tensor in trained.items()}, weights),
        }
        # float32: sums of micro-batches in another order. bfloat16 weights may differ by a rounding, on GPUs.
        limit = 5e-5 if dtype == torch.float32 else 5e-2
        check(f"full sharding {head} {family} {ranks} {settings or ''}", limit=limit, **gaps)
        if full.groups.is_member:
            held = sum(tensor.numel() for tensor in full.tensors.values())
            whole = sum(tensor.numel() for tensor in plain.tensors.values())
            rows = max(tensor.shape[0] for tensor in plain.tensors.values())
            assert held <= whole / layout.dp * 1.1 + rows, (held, whole)
