"""A model's training steps, and the samples and losses that its tests share.

Letters: N tokens asked about in a sample.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from parallel.weights.rules import hf_shapes
from tests.parity.world import (
    make_batch,
    share_of,
)
from verl_megatron.algorithms.losses import policy_loss, value_loss
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.algorithms.objectives import clip
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.models.heads import trunk
from verl_megatron.roles.engine import Engine, EngineOptions

FIELDS = {"lm": ("logprobs", "advantages", "ref_logprobs"), "token": ("values", "returns")}
FIELDS["lm_token"] = FIELDS["lm"] + FIELDS["token"]
CLASSES = {"lm": "ForCausalLM", "token": "ForTokenClassification", "lm_token": "ForCausalLM"}
ALGORITHM = AlgorithmConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.3,
    entropy_coef=0.01,
    kl_in="loss",
    kl_estimator="k3",
    cliprange_value=0.2,
)
KL_COEF, LR, VALUE_COEF = 0.1, 3e-3, 0.5


def gather_late(engine: Engine) -> None:
    """Gather what the other data-parallel ranks have updated; nothing to do with one optimizer for all."""
    before = (
        {key: tensor.clone() for key, tensor in engine.tensors.items()} if engine.groups.is_member else {}
    )
    engine.gather_weights()
    changed = (
        world()
        .all_max(
            torch.tensor(
                float(any(not torch.equal(engine.tensors[key], tensor) for key, tensor in before.items()))
            )
        )
        .item()
    )
    assert bool(changed) == (
        engine.config.distributed_optimizer and engine.layout.dp * engine.layout.cp > 1
    ), str(engine.layout)


def full_weights(engine: Engine) -> dict[str, Tensor]:
    """Hugging Face tensors put together from all ranks' shards; the same on every rank."""
    engine.gather_weights()
    return full_tensors(engine, engine.tensors if engine.groups.is_member else {})


def full_gradients(engine: Engine) -> dict[str, Tensor]:
    """The gradients of the latest step, as `full_weights`; without a sharded optimizer."""
    found = {}
    for i, chunk in enumerate(engine.chunks):
        named = trunk(chunk).named_parameters()
        found |= {(i, name): parameter.main_grad for name, parameter in named}
    return full_tensors(engine, found)


def full_tensors(engine: Engine, tensors: Mapping[tuple[int, str], Tensor]) -> dict[str, Tensor]:
    """What all ranks have for their parameters, by the names and in the shapes of Hugging Face."""
    mine = (
        [(p, tensors[p.chunk, p.name]) for p in engine.parameters if p.owner]
        if engine.groups.is_member
        else []
    )
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    full = {
        name: torch.full(shape, torch.nan).view(shape[0], -1)
        for name, shape in hf_shapes(engine.arch, engine.head).items()
    }
    for parameter, tensor in (pair for part in gathered for pair in part):
        matrix = tensor.view(tensor.shape[0], prod(tensor.shape[1:]))
        for block in parameter.blocks:
            height, width = block.rows[1] - block.rows[0], block.cols[1] - block.cols[0]
            full[block.tensor][slice(*block.rows), slice(*block.cols)] = matrix[
                block.row : block.row + height, block.col : block.col + width
            ]
    return full


def experience(vocab_size: int, *, logprobs_BT: Tensor | float = -4.0) -> RolloutBatch:
    """Samples with all that the losses read; old and reference log-probs scatter around `logprobs_BT`."""
    return with_experience(make_batch(vocab_size), logprobs_BT)


def with_experience(batch: RolloutBatch, logprobs_BT: Tensor | float = -4.0) -> RolloutBatch:
    """`experience` of given samples."""
    generator = torch.Generator().manual_seed(5)

    def noise() -> Tensor:
        return torch.randn(batch.generated_ids.shape, generator=generator) * batch.response_mask

    batch.logprobs, batch.advantages, batch.ref_logprobs = (
        logprobs_BT + 0.3 * noise(),
        noise(),
        logprobs_BT + 0.3 * noise(),
    )
    batch.values, batch.returns = noise(), noise()
    return batch


def policy(outputs, micro):
    tokens = PolicyTokens.of(micro)
    return policy_loss(outputs["logprobs"], outputs["entropy"], tokens, clip.objective, ALGORITHM, KL_COEF)


def value(outputs, micro):
    return value_loss(outputs["values"], micro.fields["values"], micro.fields["returns"], ALGORITHM)


def policy_and_value(outputs, micro):
    loss_N, sums = policy(outputs, micro)
    value_N, value_sums = value(outputs, micro)
    sums.merge(value_sums)
    return loss_N + VALUE_COEF * value_N, sums


LOSSES = {"lm": policy, "token": value, "lm_token": policy_and_value}


def train(
    folder: Path,
    head: str,
    layout: Layout,
    batch: RolloutBatch,
    options: EngineOptions,
    *,
    steps: int = 3,
):
    """Optimizer steps on all ranks' samples; the metrics of each and the weights afterwards."""
    arch = read_architecture(folder)
    engine = Engine(
        arch=arch,
        folder=str(folder),
        groups=ProcessGroups(layout, world()),
        head=head,
        options=options,
    )
    engine.prepare_training(lr=LR, total_steps=6)
    mine, micro = share_of(batch, layout, options.config.tokens_per_micro_batch)
    history = []
    for _ in range(steps):
        sums = engine.train_step(
            mine,
            micro,
            LOSSES[head],
            fields=FIELDS[head],
            scale=LossScale(int(batch.response_mask.sum())),
        )
        history.append(sums.reduce(world()))
    gather_late(engine)
    return history, full_weights(engine)
