"""What a supervised task defines; data order, steps, validation, checkpoints and export are shared.

Letters: N target tokens of a packed micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from verl_megatron.algorithms.normalizers import LossScale
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.engine import Outputs


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a loss needs besides a micro-batch."""

    config: Any  # settings of the run
    num_samples: int  # on this data-parallel rank
    cp_group: dist.ProcessGroup | None  # over which the tokens of a sample are spread, if they are


class StepLoss(Protocol):
    """Computes the loss of each target token of a micro-batch, [N] float32, and metrics."""

    def __call__(self, outputs: Outputs, micro: MicroBatch, step: Step) -> tuple[Tensor, Sums]: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A supervised objective. Its models are those that `models_of` lists for its settings."""

    name: str  # prefix of its metrics, which have NAME/loss
    output: str  # what the trained model computes, a field of the batch: logprobs or values
    loss: StepLoss
    normalizer: Callable[[Tensor, range], LossScale]
    # (settings, samples owned by this rank with the models' outputs) → metrics validation/...
    evaluate: Callable[[Any, RolloutBatch], Sums]
    samples_per_item: int = 1  # samples of an entry of the data set; they share a micro-batch
