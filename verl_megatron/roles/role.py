"""Role: an engine with dispatch of samples to its layout, and return of results to the owner ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from parallel import device
from parallel.groups import ProcessGroups
from parallel.rank_set import RankSet
from parallel.weights.architecture import Architecture
from parallel.weights.rules import Head
from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.config import EngineConfig, ModelConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.collector import DataCollector, trim
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.data.packing import MICRO_BATCHES_PER_STAGE
from verl_megatron.data.sample_table import SampleTable
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.engine import Engine, EngineOptions, Loss
from verl_megatron.roles.heads import HEADS, Outputs
from verl_megatron.roles.inference import filled, infer_models
from verl_megatron.roles.token_budget import LongestRows, TokenBudget, budget_of_updates

# Fields that every pass needs; the temperature is not always set, and groups matter to shared prompts only.
TOKENS = ("generated_ids", "attention_mask", "response_mask", "temperature")


def token_fields(config: EngineConfig) -> tuple[str, ...]:
    """Return the fields of a batch that every pass needs."""
    return (*TOKENS, "group_id") if config.shared_prompts else TOKENS


@dataclass(slots=True)
class DispatchedBatch:
    """Samples of this rank's data-parallel index and their micro-batches."""

    batch: RolloutBatch
    table: SampleTable  # of the iteration
    dp_of_sample: Tensor  # [B] int64, data-parallel index of each sample of the iteration
    # By mini-batch; the same for forward passes and updates, so that ratios start at 1.
    micro_batches: list[list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class Update:
    """Optimizer steps on the mini-batches of an iteration."""

    loss: Loss
    # Response tokens of all samples of the iteration [B], samples of the step → scale of its loss.
    normalizer: Callable[[Tensor, range], LossScale]
    fields: Sequence[str] = ()  # per-token fields that the loss reads
    first_fields: Sequence[str] | None = None  # those of the first step; None: the same
    # Called after each step with the number of steps, on every rank.
    after_step: Callable[[int], None] = lambda steps: None
    epochs: int = 1  # passes over all mini-batches
    # Called after each step with its metrics, on every rank; True skips the remaining steps.
    stop: Callable[[Sums], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is known of a model's training before it begins."""

    steps: int  # of the optimizer, in the whole run
    rows: LongestRows  # of a mini-batch, on a data-parallel rank


class RemoteRole(ABC):
    """Stands for a frozen model on ranks of its own. Methods are collective over the ranks that train."""

    @abstractmethod
    def begin(self, batch: RolloutBatch, table: SampleTable) -> None:
        """Start the pass whose results the next `infer` returns; nothing happens if it has been started."""

    @abstractmethod
    def infer(
        self, batch: RolloutBatch, table: SampleTable, names: Sequence[str], *, last_token: bool = False
    ) -> dict[str, Tensor]:
        """Wait for the results of the samples owned by this rank; as of `Role.infer`."""

    @abstractmethod
    def add_metrics(self, sums: Sums) -> None:
        """Add the seconds since the last call: those that this rank has waited, and those of the model."""


class Role:
    """Actor, critic, reference, teacher or reward model. Methods are collective over its `world`."""

    def __init__(self, engine: Engine, collector: DataCollector, *, budget: TokenBudget | None = None):
        """
        Args:
            budget: of updates; None: engine.tokens_per_micro_batch.
        """
        self.engine, self.collector, self.budget = engine, collector, budget

    @property
    def world(self) -> RankSet:
        """All ranks of the run, which may own samples."""
        return self.engine.groups.world

    def dispatch(self, batch: RolloutBatch, table: SampleTable) -> DispatchedBatch:
        """Dispatch the samples' tokens to the ranks of this layout; once per iteration serves all passes."""
        dp_of_sample, names = table.assign(self.engine.layout.dp), token_fields(self.engine.config)
        return self.arrived(self.collector.to_role(batch, dp_of_sample, names), table, dp_of_sample)

    def arrived(
        self, fields: Mapping[str, Tensor], table: SampleTable, dp_of_sample: Tensor
    ) -> DispatchedBatch:
        """Return samples that were dispatched, from their fields, ordered by sample_id."""
        width = max(int(fields["attention_mask"].sum(1).max()), 1) if len(fields["sample_id"]) else 1
        here = RolloutBatch(
            input_ids=fields["sample_id"].new_zeros(len(fields["sample_id"]), 0), **trim(fields, width)
        )
        return DispatchedBatch(here, table, dp_of_sample, self._micro_batches(here, table))

    def _micro_batches(self, here: RolloutBatch, table: SampleTable) -> list[list[list[int]]]:
        """Return the micro-batches of each mini-batch of the samples on this rank."""
        layout, usual = self.engine.layout, self.engine.config.tokens_per_micro_batch * self.engine.layout.cp
        budget = usual
        if self.budget is not None:
            budget = self.budget.tokens * layout.cp
            if layout.pp > 1:
                share = table.largest_tokens // (layout.dp * layout.pp * MICRO_BATCHES_PER_STAGE)
                budget = min(budget, max(usual, share))
        return table.micro_batches(
            here.sample_id, tokens_per_micro_batch=budget, multiple_of=layout.pp if layout.vpp > 1 else 1
        )

    def send_fields(self, dispatched: DispatchedBatch, batch: RolloutBatch, names: Sequence[str]) -> None:
        """Send per-token fields of dispatched samples; fields that are None are skipped."""
        fields = self.collector.to_role(batch, dispatched.dp_of_sample, names)
        assert torch.equal(fields.pop("sample_id"), dispatched.batch.sample_id), (
            "fields follow the samples that were dispatched"
        )
        width = dispatched.batch.generated_ids.size(1)
        dispatched.batch = replace(dispatched.batch, **trim(fields, width))

    def infer(
        self, batch: RolloutBatch, table: SampleTable, names: Sequence[str], *, last_token: bool = False
    ) -> dict[str, Tensor]:
        """Return per-token results [B, T] float32 of the samples owned by this rank.

        `names` are "logprobs" and "entropy", or "values".
        """
        dispatched = self.dispatch(batch, table)
        return infer_together([self], dispatched, batch, names, last_token=last_token)[0]

    def update(self, dispatched: DispatchedBatch, update: Update) -> tuple[Sums, int]:
        """Run optimizer steps over all mini-batches for `epochs`; return metrics and the number of steps."""
        sums, steps, table = Sums(), 0, dispatched.table
        if self.budget is not None:
            if self.budget.review():
                dispatched.micro_batches = self._micro_batches(dispatched.batch, table)
            head = HEADS[self.engine.head].metrics
            sums.add(f"{head}/tokens_per_micro_batch", self.budget.tokens, 1)
        for _ in range(update.epochs):
            for mini_batch, micro in zip(table.mini_batches, dispatched.micro_batches):
                fields = update.fields if steps or update.first_fields is None else update.first_fields
                scale = update.normalizer(table.response_B, mini_batch)
                metrics = self.engine.train_step(
                    dispatched.batch, micro, update.loss, fields=tuple(fields), scale=scale
                )
                sums.merge(metrics)
                steps += 1
                update.after_step(steps)
                if update.stop is not None and update.stop(metrics):
                    return sums, steps
        return sums, steps

    def to_owner(
        self,
        dispatched: DispatchedBatch,
        answers: list[tuple[MicroBatch, Outputs]],
        batch: RolloutBatch,
        names: Sequence[str],
    ) -> dict[str, Tensor]:
        """Return outputs of micro-batches, kept on the last stage, to the owner ranks: [B, T] float32."""
        groups = self.engine.groups
        is_last = groups.is_member and groups.is_last_stage
        sent = filled(self.engine, dispatched.batch, answers, names) if is_last else None
        owner_B = dispatched.table.owner_B
        return self.collector.to_owner(names, sent, dispatched.batch.sample_id, owner_B, batch)


def infer_together(
    roles: Sequence[Role],
    dispatched: DispatchedBatch,
    batch: RolloutBatch,
    names: Sequence[str],
    *,
    last_token: bool = False,
    first_mini_batch: int = 0,
) -> list[dict[str, Tensor]]:
    """Run `Role.infer` of several roles under the same layout, in one pass and one exchange.

    Each role returns those of `names` that its head has. Samples of mini-batches before `first_mini_batch`
    are skipped and get 0.
    """
    flat = [micro for mini_batch in dispatched.micro_batches[first_mini_batch:] for micro in mini_batch]
    results = infer_models(
        [role.engine for role in roles], dispatched.batch, flat, names, last_token=last_token
    )
    keys = [
        (place, name)
        for place, role in enumerate(roles)
        for name in names
        if name in HEADS[role.engine.head].names
    ]
    sent: dict[str, Tensor] | None = None
    if results[0] is not None:
        answers = [cast(dict[str, Tensor], result) for result in results]
        sent = {f"{name}_{place}": answers[place][name] for place, name in keys}
    owner_B = dispatched.table.owner_B
    returned = roles[0].collector.to_owner(
        [f"{name}_{place}" for place, name in keys], sent, dispatched.batch.sample_id, owner_B, batch
    )
    by_role: list[dict[str, Tensor]] = [{} for _ in roles]
    for place, name in keys:
        by_role[place][name] = returned[f"{name}_{place}"]
    return by_role


def make_role(
    model: ModelConfig,
    groups: ProcessGroups,
    *,
    arch: Architecture,
    head: Head,
    options: EngineOptions,
    training: Training | None = None,
) -> Role:
    """Build a role on the ranks of its layout; without `training` it is frozen."""
    engine = Engine(arch=arch, folder=model.path, groups=groups, head=head, options=options)
    collector, budget = DataCollector(groups.layout, groups.world, device=device.device()), None
    if training is not None:
        engine.prepare_training(lr=model.lr, total_steps=training.steps)
        if options.config.dynamic_batching:
            budget = budget_of_updates(engine, training.rows)
    return Role(engine, collector, budget=budget)
