"""A role: an engine that borrows rows from their homes, works on them under its own layout and sends the results back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.layout import Layout, parse_devices
from parallel.weights.architecture import Architecture
from verl_megatron.batch import RolloutBatch
from verl_megatron.collector import DataCollector
from verl_megatron.config import EngineConfig, ModelConfig
from verl_megatron.metrics import Sums
from verl_megatron.models.build import Head
from verl_megatron.roles.engine import Engine, Loss, infer_models
from verl_megatron.roles.rows import RowTable


@dataclass(slots=True)
class Borrowed:
    """The rows of this rank's data-parallel index and how they are packed."""

    batch: RolloutBatch
    micro_batches: list[list[list[int]]]  # of each mini-batch; the same for forward passes and updates, so ratios start at 1


class Role:
    """Actor, critic, reference or reward model. Every rank of the world calls its methods together."""

    def __init__(self, engine: Engine, collector: DataCollector):
        self.engine, self.collector = engine, collector

    def borrow(self, batch: RolloutBatch, rows: RowTable) -> Borrowed:
        layout = self.engine.layout
        borrowed = self.collector.to_role(batch, rows.assign(layout.dp))
        budget = self.engine.config.tokens_per_micro_batch * layout.cp
        micro = rows.micro_batches(borrowed.row_id, tokens_per_micro_batch=budget, multiple_of=layout.pp if layout.vpp > 1 else 1)
        return Borrowed(borrowed, micro)

    def infer(self, batch: RolloutBatch, rows: RowTable, *, last_token: bool = False) -> dict[str, Tensor]:
        """Per-token results [B, T] float32 for the rows at home here: logprobs and entropy, or values."""
        return infer_together([self], batch, rows, last_token=last_token)[0]

    def update(self, batch: RolloutBatch, rows: RowTable, loss: Loss, *, fields: tuple[str, ...], epochs: int, stop: Callable[[Sums], bool] | None = None) -> tuple[Sums, int]:
        """Optimizer steps over all mini-batches, `epochs` times; returns the metrics and the number of steps taken.

        Args:
            stop: asked after each step with its metrics, on every rank; True leaves the rest out.
        """
        borrowed, sums, steps = self.borrow(batch, rows), Sums(), 0
        for _ in range(epochs):
            for number, micro in enumerate(borrowed.micro_batches):
                metrics = self.engine.train_step(borrowed.batch, micro, loss, fields=fields, num_tokens=max(rows.tokens(number), 1))
                sums.merge(metrics)
                steps += 1
                if stop is not None and stop(metrics):
                    return sums, steps
        return sums, steps


def infer_together(roles: Sequence[Role], batch: RolloutBatch, rows: RowTable, *, last_token: bool = False) -> list[dict[str, Tensor]]:
    """`Role.infer` of several roles under the same layout, in one pass over the rows."""
    lender, engines = roles[0], [role.engine for role in roles]
    borrowed = lender.borrow(batch, rows)
    flat = [micro for mini_batch in borrowed.micro_batches for micro in mini_batch]
    found = []
    for engine, results in zip(engines, infer_models(engines, borrowed.batch, flat, last_token=last_token)):
        names = ("logprobs", "entropy") if engine.head == "lm" else ("values",)
        found.append({name: lender.collector.to_home(results[name] if results else None, borrowed.batch.row_id, rows.home_R, batch) for name in names})
    return found


def layout_of(model: ModelConfig) -> Layout:
    """The layout as the settings give it, with ranks in their usual order."""
    return Layout.parse(model.layout, parse_devices(model.devices, dist.get_world_size()), tuple(model.stage_layers))


def make_role(
    model: ModelConfig,
    layout: Layout,
    *,
    arch: Architecture,
    engine: EngineConfig,
    head: Head,
    seed: int,
    temperature: float,
    train_steps: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Role:
    """A role on its own layout; with `train_steps` above 0 it learns. `progress` is called before each micro-batch."""
    groups = ProcessGroups(layout)
    made = Engine(arch=arch, folder=model.path, groups=groups, config=engine, head=head, seed=seed, temperature=temperature, progress=progress)
    if train_steps:
        made.prepare_training(lr=model.lr, total_steps=train_steps)
    return Role(made, DataCollector(layout, rank=dist.get_rank(), group=None, device=device.device()))
