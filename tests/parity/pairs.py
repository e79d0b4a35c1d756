"""Steps on pairs under several layouts, against one rank, and its loss and gradient against plain PyTorch."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.groups import ProcessGroups
from parallel.layout import Layout
from parallel.rank_set import world
from parallel.weights.architecture import read_architecture
from tests.parity.world import check, make_batch, metrics_apart, sample_logits, shared_folder, write_once
from verl_megatron.algorithms.normalizers import pair_mean
from verl_megatron.config import DPOConfig, EngineConfig, RewardModelConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.roles.engine import Engine, EngineOptions
from verl_megatron.supervised.dpo import DPO
from verl_megatron.supervised.reward_model import REWARD_MODEL
from verl_megatron.supervised.task import Step, Task

CLASSES = {"dpo": "ForCausalLM", "reward_model": "ForSequenceClassification"}
KINDS = {"dpo": "policy", "reward_model": "reward_model"}  # of the gradient norm
LAYOUTS = ("tp1", "tp2", "pp2", "tp2pp2sp", "pp2vpp2", "cp2", "cp2tp2sp")


def steps(
    task: Task, folder: Path, layout: Layout, batch: RolloutBatch, budget: int
) -> list[dict[str, float]]:
    """Metrics of two optimizer steps on all pairs."""
    groups = ProcessGroups(layout, world())
    engine = Engine(
        arch=read_architecture(folder),
        folder=str(folder),
        groups=groups,
        head="lm" if task is DPO else "sequence",
        options=EngineOptions(config=EngineConfig(tokens_per_micro_batch=budget, adam_eps=1e-4), seed=1),
    )
    engine.prepare_training(lr=3e-3, total_steps=2)
    zero_B, whole = torch.zeros_like(batch.sample_id), range(len(batch))
    table = SampleTable(batch.lengths, batch.response_mask.sum(1), zero_B, zero_B, [whole], unit=2)
    mine, micro = batch, []
    if groups.is_member:
        place = layout.coordinates(dist.get_rank()).dp
        mine = batch.select((table.assign(layout.dp) == place).nonzero().squeeze(1))
        multiple = layout.pp if layout.vpp > 1 else 1
        (micro,) = table.micro_batches(
            mine.sample_id, tokens_per_micro_batch=budget * layout.cp, multiple_of=multiple
        )
    step = Step(
        config=DPOConfig() if task is DPO else RewardModelConfig(),
        num_samples=len(mine),
        cp_group=groups.cp if layout.cp > 1 else None,
    )
    fields, scale = ("ref_logprobs",) if task is DPO else (), pair_mean(table.response_B, whole)
    loss = partial(task.loss, step=step)
    return [
        engine.train_step(mine, micro, loss, fields=fields, scale=scale).reduce(world()) for _ in range(2)
    ]


def plain_loss(task: Task, model, batch: RolloutBatch) -> Tensor:
    """Mean over the pairs of the papers' losses, from a Hugging Face model."""
    rewards = []
    for b, logits in enumerate(sample_logits(model, batch)):
        if task is REWARD_MODEL:
            rewards.append(logits[0])
            continue
        asked = batch.response_mask[b].nonzero().squeeze(1)
        logprobs = torch.log_softmax(logits[asked - 1], -1)
        logprob_N = logprobs.gather(1, batch.generated_ids[b, asked][:, None]).squeeze(1)
        rewards.append(0.1 * (logprob_N - batch.ref_logprobs[b, asked]).sum())
    reward_P2 = torch.stack(rewards).view(-1, 2)
    return -torch.log(torch.sigmoid(reward_P2[:, 0] - reward_P2[:, 1])).mean()


def check_pairs() -> None:
    """Losses, accuracies and gradient norms do not depend on layout or packing, and are the papers'."""
    folder = shared_folder()
    for task, family in ((DPO, "qwen3"), (REWARD_MODEL, "llama_tied_llama3")):
        path = folder / f"{task.name}_{family}"
        model = write_once(path, family, CLASSES[task.name], num_hidden_layers=4)
        batch = make_batch(model.config.vocab_size)
        noise_BT = torch.randn(batch.generated_ids.shape, generator=torch.Generator().manual_seed(7))
        batch.ref_logprobs = (noise_BT - 5) * batch.response_mask
        want = steps(task, path, Layout(), batch, 1000)
        loss = plain_loss(task, model, batch)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
        found = want[0][f"{KINDS[task.name]}/grad_norm"]
        check(
            f"{task.name} {family} against PyTorch",
            limit=1e-5,
            loss=abs(want[0][f"{task.name}/loss"] - loss.item()),
            relative_norm=abs(found - norm) / norm,
        )
        for text in LAYOUTS:
            got = steps(task, path, Layout.parse(text, (0, 1, 2, 3)), batch, 64)
            check(f"{task.name} {family} {text}", limit=5e-5, metrics=metrics_apart(got, want))
