"""Losses on pairs of responses to one prompt: DPO, IPO, cDPO, and the Bradley-Terry loss of reward models.

Each pair is a chosen response w and a rejected response l. Letters: P pairs, N target tokens of a packed
micro-batch, B samples on this data-parallel rank: sample 2p is the chosen and 2p + 1 the rejected response of
pair p.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from verl_megatron.algorithms.tokens import sample_totals
from verl_megatron.config import DPOLossConfig
from verl_megatron.observe.metrics import Sums


def sigmoid_loss(gap_P: Tensor, config: DPOLossConfig) -> Tensor:
    """DPO (Rafailov et al. 2023, equation 7), [P]: -log sigmoid(beta h).

    With label_smoothing e above 0 the conservative form (Mitchell 2023), for labels that are wrong with
    probability e: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).
    """
    logits_P, smoothing = config.beta * gap_P, config.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits_P) - smoothing * F.logsigmoid(-logits_P)


def ipo_loss(gap_P: Tensor, config: DPOLossConfig) -> Tensor:
    """IPO (Azar et al. 2024, equation 17, with tau = beta), [P]: (h - 1 / (2 beta))^2."""
    return (gap_P - 1 / (2 * config.beta)).square()


# Gap h of each pair, in nats → its loss. h = log pi(w)/pi_ref(w) - log pi(l)/pi_ref(l), summed over tokens.
DPO_LOSSES: dict[str, Callable[[Tensor, DPOLossConfig], Tensor]] = {
    "sigmoid": sigmoid_loss,
    "ipo": ipo_loss,
}


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Negative log-likelihood of the preferences (Bradley and Terry 1952), [P]: -log sigmoid(r_w - r_l).

    The loss of reward models (Ouyang et al. 2022, equation 1, with two responses to a prompt).
    """
    return -F.logsigmoid(chosen_P - rejected_P)


@dataclass(slots=True)
class PairTokens:
    """Target tokens of a micro-batch, in which both responses of a pair are.

    With context parallelism the tokens of a sample are spread over the ranks of `cp_group`.
    """

    sample_N: Tensor  # int64, the sample that each token belongs to
    num_samples: int  # on this data-parallel rank, also of other micro-batches
    cp_group: dist.ProcessGroup | None = None

    def totals(self, *terms: Tensor) -> list[Tensor]:
        """Sum each of `terms` [N] over the tokens of each sample: [P, 2] float64, with gradient.

        Pairs of other micro-batches have 0. Collective over `cp_group`. Float64 makes the sums independent of
        packing and context parallelism for any practical purpose.
        """
        terms_NK = torch.stack(list(terms), 1).double()
        totals_BK = sample_totals(
            terms_NK, self.sample_N, num_samples=self.num_samples, cp_group=self.cp_group
        )
        return [total_B.view(-1, 2) for total_B in totals_BK.unbind(1)]

    def spread(self, loss_P: Tensor, tokens_P: Tensor) -> Tensor:
        """Divide the loss of each pair among its tokens, [N] float32: summed over them it is the pair's loss.

        So the sum over all tokens, wherever they are, has each pair once.
        """
        return (loss_P / tokens_P.clamp(min=1))[self.sample_N // 2].float()


def pair_sums(
    name: str, loss_P: Tensor, chosen_P: Tensor, rejected_P: Tensor, is_there_P: Tensor | None = None
) -> Sums:
    """Return the metrics of pairs: loss, accuracy, margin, and the rewards of both responses.

    A pair is right if its chosen response has the higher reward.

    Args:
        name: prefix of the metrics.
        chosen_P, rejected_P: rewards, for DPO implicit ones: beta log pi / pi_ref.
        is_there_P: bool, the pairs to count; None: all.
    """
    there_P = torch.ones_like(loss_P, dtype=torch.bool) if is_there_P is None else is_there_P
    sums, count = Sums(), there_P.sum()
    for metric, value_P in {
        "loss": loss_P,
        "accuracy": chosen_P > rejected_P,
        "margin": chosen_P - rejected_P,
        "chosen_reward": chosen_P,
        "rejected_reward": rejected_P,
    }.items():
        sums.add(f"{name}/{metric}", (value_P * there_P).sum(), count)
    return sums
