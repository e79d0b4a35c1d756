"""Reward-model training: the score of the last token learns which of two responses is better.

Letters: N last tokens of the samples of a packed micro-batch, P pairs.
"""

import torch
from torch import Tensor

from verl_megatron.algorithms.normalizers import pair_mean
from verl_megatron.algorithms.preference import PairTokens, bradley_terry_loss, pair_sums
from verl_megatron.config import RewardModelConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.engine import Outputs
from verl_megatron.supervised.task import Step, Task


def loss(outputs: Outputs, micro: MicroBatch, step: Step) -> tuple[Tensor, Sums]:
    """Return the loss of each pair, divided between its two scores."""
    score_N = outputs["values"]
    pairs = PairTokens(micro.sample, step.num_samples, step.cp_group)
    score_P2, tokens_P2 = pairs.totals(score_N, torch.ones_like(score_N))
    loss_P, tokens_P = bradley_terry_loss(*score_P2.unbind(1)), tokens_P2.sum(1)
    sums = pair_sums("reward_model", loss_P, *score_P2.unbind(1), is_there_P=tokens_P > 0)
    return pairs.spread(loss_P, tokens_P), sums


def evaluate(config: RewardModelConfig, batch: RolloutBatch) -> Sums:
    """Return loss, accuracy and margins of the pairs."""
    score_P2 = batch.required("values").double().sum(1).view(-1, 2)  # 0 but at the last token
    return pair_sums("validation", bradley_terry_loss(*score_P2.unbind(1)), *score_P2.unbind(1))


REWARD_MODEL = Task(
    name="reward_model",
    output="values",
    loss=loss,
    normalizer=pair_mean,
    evaluate=evaluate,
    samples_per_item=2,
)
