"""Direct preference optimization: a policy learns from pairs, without a reward model.

Letters: N response tokens of a packed micro-batch, P pairs.
"""

import torch
from torch import Tensor

from verl_megatron.algorithms.normalizers import pair_mean
from verl_megatron.algorithms.preference import DPO_LOSSES, PairTokens, pair_sums
from verl_megatron.config import DPOConfig
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.data.micro_batch import MicroBatch
from verl_megatron.observe.metrics import Sums
from verl_megatron.roles.engine import Outputs
from verl_megatron.supervised.task import Step, Task


def losses(
    config: DPOConfig, name: str, log_ratio_P2: Tensor, logprobs_P2: Tensor, is_there_P: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """Return the loss of each pair, [P], and metrics.

    Args:
        log_ratio_P2: log pi / pi_ref of the chosen and of the rejected response, nats.
        logprobs_P2: log pi of both, for metrics.
        is_there_P: pairs that the metrics count; None: all.
    """
    chosen_P, rejected_P = log_ratio_P2.unbind(1)
    loss_P = DPO_LOSSES[config.dpo.loss](chosen_P - rejected_P, config.dpo)
    beta = config.dpo.beta
    sums = pair_sums(name, loss_P, beta * chosen_P, beta * rejected_P, is_there_P)
    count = len(loss_P) if is_there_P is None else is_there_P.sum()
    for metric, value_P in zip(("chosen_logprob", "rejected_logprob"), logprobs_P2.unbind(1)):
        sums.add(f"{name}/{metric}", value_P.sum(), count)
    return loss_P, sums


def loss(outputs: Outputs, micro: MicroBatch, step: Step) -> tuple[Tensor, Sums]:
    """Return the loss of each pair, divided among its tokens."""
    logprobs_N = outputs["logprobs"]
    pairs = PairTokens(micro.sample, step.num_samples, step.cp_group)
    log_ratio_P2, logprobs_P2, tokens_P2 = pairs.totals(
        logprobs_N - micro.fields["ref_logprobs"], logprobs_N.detach(), torch.ones_like(logprobs_N)
    )
    tokens_P = tokens_P2.sum(1)
    loss_P, sums = losses(step.config, "dpo", log_ratio_P2, logprobs_P2, tokens_P > 0)
    return pairs.spread(loss_P, tokens_P), sums


def evaluate(config: DPOConfig, batch: RolloutBatch) -> Sums:
    """Return loss, accuracy and margins of the pairs."""
    logprobs_BT = batch.required("logprobs").double()
    log_ratio_P2 = (logprobs_BT - batch.required("ref_logprobs")).sum(1).view(-1, 2)
    return losses(config, "validation", log_ratio_P2, logprobs_BT.sum(1).view(-1, 2))[1]


DPO = Task(
    name="dpo",
    output="logprobs",
    loss=loss,
    normalizer=pair_mean,
    evaluate=evaluate,
    samples_per_item=2,
)
