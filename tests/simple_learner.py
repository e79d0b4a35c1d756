"""A learner whose actor is a simple function: no model, one rank.

Letters: B samples, N response tokens of a micro-batch, T positions of prompt and response.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

from parallel.layout import Layout
from parallel.rank_set import world
from verl_megatron.algorithms.kl import FixedKL
from verl_megatron.config import AlgorithmConfig, EngineConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import DataCollector
from verl_megatron.data.micro_batch import pack
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.data.shared_prompts import pack_shared
from verl_megatron.learner import Learner
from verl_megatron.observe.metrics import PhaseTimer, Sums
from verl_megatron.roles import role
from verl_megatron.roles.role import Role

RESPONSES = [3, 1, 6, 2, 0, 5, 4, 2, 6]  # tokens of each of three samples of three prompts


class SimpleEngine:
    """An engine whose log-prob of a token is a parameter of its position plus a constant of its sample."""

    head, value_head = "lm", None

    def __init__(self, seed: int):
        layout = Layout.parse("tp1", (0,))
        self.layout, self.config = layout, EngineConfig(tokens_per_micro_batch=8)
        self.groups = SimpleNamespace(layout=layout, world=world(), is_member=True, is_last_stage=True)
        generator = torch.Generator().manual_seed(seed)
        self.constant_BT = torch.randn(len(RESPONSES), 8, generator=generator) - 1.5
        self.weight_T = torch.zeros(8, requires_grad=True)
        self.num_inferred = 0  # samples of all separate passes

    def pack(self, batch: RolloutBatch, samples: list[int], **options):
        return (pack_shared if self.config.shared_prompts else pack)(batch, samples, **options)

    def outputs(self, batch: RolloutBatch, micro) -> dict[str, Tensor]:
        constant_N = self.constant_BT[batch.sample_id[micro.sample], micro.offset]
        logprobs_N = constant_N + self.weight_T[micro.offset]
        return {"logprobs": logprobs_N, "entropy": torch.zeros_like(logprobs_N)}

    def infer(self, batch: RolloutBatch, micro_batches) -> dict[str, Tensor]:
        self.num_inferred += sum(map(len, micro_batches))
        micros = [self.pack(batch, samples) for samples in micro_batches]
        with torch.no_grad():
            return role.filled(
                self, batch, [(micro, self.outputs(batch, micro)) for micro in micros], ["logprobs"]
            )

    def train_step(self, batch: RolloutBatch, micro_batches, loss, *, fields, scale) -> Sums:
        sums, total = Sums(), 0.0
        for samples in micro_batches:
            micro = self.pack(batch, samples, fields=fields)
            loss_N, metrics = loss(self.outputs(batch, micro), micro)
            if scale.weight_B is not None:
                loss_N = scale.weight_B[batch.sample_id[micro.sample]] * loss_N
            total = total + loss_N.sum() / scale.divisor
            sums.merge(metrics)
        (gradient_T,) = torch.autograd.grad(total, self.weight_T)
        with torch.no_grad():
            self.weight_T -= 2.0 * gradient_T  # far enough that ratios are clipped
        return sums


def infer_models(engines, batch, micro_batches, names, *, last_token=False):
    """Stands for `role.infer_models` where engines are simple."""
    return [engine.infer(batch, micro_batches) for engine in engines]


def scored_batch() -> RolloutBatch:
    batch = RolloutBatch.from_lists(
        list(range(9)), [[1, 2]] * 9, [[3] * n for n in RESPONSES], [[-1.5] * n for n in RESPONSES]
    )
    batch.group_id = batch.sample_id // 3
    batch.rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0])
    return batch


def learn(
    *,
    step: int,
    reference: bool = False,
    batch: RolloutBatch | None = None,
    shared_prompts: bool = False,
    **settings,
):
    """One iteration; the actor's engine and the metrics."""
    config = AlgorithmConfig(name="grpo", **settings)
    engines = {"actor": SimpleEngine(0)} | ({"reference": SimpleEngine(1)} if reference else {})
    for engine in engines.values():
        engine.config.shared_prompts = shared_prompts
    roles = {
        name: Role(engine, DataCollector(engine.layout, engine.groups.world))
        for name, engine in engines.items()
    }
    learner = Learner(
        roles,
        config=config,
        max_tokens=6,
        kl=FixedKL(0.1),
        residency=SimpleNamespace(enter_training=lambda engine: None),
        clock=PhaseTimer(),
    )
    batch = scored_batch() if batch is None else batch
    table = SampleTable.gather(
        batch, world(), num_mini_batches=config.num_mini_batches, shared_prompts=shared_prompts
    )
    metrics = learner.learn(batch, table, Sums(), step=step)
    return engines["actor"], metrics
