"""Response tokens of a micro-batch, as a policy loss sees them. Letters: N response tokens, B samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.differentiable import sum_over
from verl_megatron.algorithms.kl import MAX_LOG_RATIO
from verl_megatron.data.micro_batch import MicroBatch


@dataclass(slots=True)
class PolicyTokens:
    """Quantities of the response tokens that are fixed before the update. [N] float32 unless stated.

    All tokens of a sample are in one micro-batch; with context parallelism they are spread over the ranks of
    `cp_group`.
    """

    sample_N: Tensor  # int64, the sample that each token belongs to
    old_logprobs_N: Tensor | None  # from the actor before the iteration's updates; None: this pass's own
    advantages_N: Tensor
    ref_logprobs_N: Tensor | None = None  # for KL in the loss
    rollout_logprobs_N: Tensor | None = None  # from the sampler, for the correction
    num_samples: int = 0  # sample_N is below it; 0: its maximum plus 1
    cp_group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls, micro: MicroBatch, *, num_samples: int = 0, cp_group: dist.ProcessGroup | None = None
    ) -> "PolicyTokens":
        """Return the target tokens of a micro-batch."""
        fields = micro.fields
        return cls(
            micro.sample,
            fields.get("logprobs"),
            fields["advantages"],
            fields.get("ref_logprobs"),
            fields.get("rollout_logprobs"),
            num_samples,
            cp_group,
        )

    def log_ratio(self, logprobs_N: Tensor) -> Tensor:
        """Return log p - log p_old, [N], with gradient, limited to ±MAX_LOG_RATIO nats.

        So an infinite ratio never multiplies an advantage of 0.
        """
        old_N = logprobs_N.detach() if self.old_logprobs_N is None else self.old_logprobs_N
        return (logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sum_of_sample(self, x_N: Tensor) -> Tensor:
        """Sum x over all tokens of each token's sample: [N], with gradient. Collective over `cp_group`."""
        return self._sums([x_N])[0][self.sample_N]

    def mean_of_sample(self, x_N: Tensor) -> Tensor:
        """Average x over each token's sample: [N], with gradient. Collective over `cp_group`."""
        total_B, count_B = self._sums([x_N, torch.ones_like(x_N)])
        return (total_B / count_B.clamp(min=1))[self.sample_N]

    def _sums(self, terms: Sequence[Tensor]) -> Tensor:
        num_samples = self.num_samples or len(self.sample_N.bincount())
        terms_NK = torch.stack(list(terms), 1)
        return sample_totals(terms_NK, self.sample_N, num_samples=num_samples, cp_group=self.cp_group).T


def sample_totals(
    terms_NK: Tensor, sample_N: Tensor, *, num_samples: int, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Sum terms over the tokens of each sample: [B, K], with gradient. Collective over `cp_group`.

    Args:
        terms_NK: K terms of each token.
        sample_N: int64, the sample of each token, below `num_samples`.
        cp_group: over which the tokens of a sample are spread; None: they are all here.
    """
    total_BK = terms_NK.new_zeros(num_samples, terms_NK.size(1)).index_add(0, sample_N, terms_NK)
    return total_BK if cp_group is None else sum_over(total_BK, cp_group)
