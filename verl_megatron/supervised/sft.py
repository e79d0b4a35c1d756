"""Supervised fine-tuning: cross-entropy over the response tokens, averaged over the tokens of a step."""

from functools import partial

from torch import Tensor

from verl_megatron.algorithms.losses import cross_entropy
from verl_megatron.algorithms.normalizers import token_mean
from verl_megatron.config import SFTConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.engine import Outputs
from verl_megatron.supervised.task import Step, Task


def loss(outputs: Outputs, micro: MicroBatch, step: Step) -> tuple[Tensor, Sums]:
    """Return the negative log-likelihood of the response tokens."""
    return cross_entropy(outputs["logprobs"])


def evaluate(config: SFTConfig, batch: RolloutBatch) -> Sums:
    """Return the mean negative log-likelihood of the response tokens."""
    sums = Sums()
    sums.add("validation/loss", -batch.required("logprobs").double().sum(), batch.response_mask.sum())
    return sums


SFT = Task(
    name="sft",
    output="logprobs",
    loss=loss,
    normalizer=partial(token_mean, max_tokens=0),
    evaluate=evaluate,
)
