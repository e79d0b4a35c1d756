"""Response tokens of a packed micro-batch, and what an update has of them, for tests of the policy loss.

Letters: N response tokens, B samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.one_rank import ONE_RANK
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.observe.metrics import Sums

LENGTHS = [5, 1, 0, 8, 3, 6]  # response tokens of each sample; one has none
PER_TOKEN = ("old_logprobs_N", "advantages_N", "ref_logprobs_N", "rollout_logprobs_N")


@dataclass
class PolicyCase:
    """Tokens in float64 in any order, with what requires a gradient."""

    logprobs_N: Tensor
    entropy_N: Tensor
    tokens: PolicyTokens

    def sample(self, b: int) -> list[int]:
        """Places of a sample's tokens."""
        return (self.tokens.sample_N == b).nonzero().flatten().tolist()

    def part(self, samples: list[int]) -> "PolicyCase":
        """The micro-batch of these samples."""
        place_N = torch.tensor([i for b in samples for i in self.sample(b)], dtype=torch.int64)
        values = {name: getattr(self.tokens, name)[place_N] for name in ("sample_N", *PER_TOKEN)}
        tokens = PolicyTokens(**values, num_samples=len(LENGTHS))
        return PolicyCase(self.logprobs_N[place_N], self.entropy_N[place_N], tokens)


def policy_case(*, gap: float = 0.3, per_sample: bool = False, seed: int = 0) -> PolicyCase:
    """Random tokens.

    Args:
        gap: standard deviation of the log ratios to the old policy, the reference and the sampler, nats.
        per_sample: one advantage for all tokens of a sample.
    """
    generator, count = torch.Generator().manual_seed(seed), sum(LENGTHS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    sample_N = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    sample_N = sample_N[torch.randperm(count, generator=generator)]
    old_N, advantages_N = -1.5 + normal(0.5), normal(1.0)
    if per_sample:
        advantages_N = advantages_N[: len(LENGTHS)][sample_N]
    tokens = PolicyTokens(
        sample_N,
        old_N,
        advantages_N,
        ref_logprobs_N=old_N + normal(gap),
        rollout_logprobs_N=old_N + normal(gap),
        num_samples=len(LENGTHS),
    )
    entropy_N = normal(0.1).add(1.0).requires_grad_()
    return PolicyCase((old_N + normal(gap)).requires_grad_(), entropy_N, tokens)


def reduced(*sums: Sums) -> dict[str, float]:
    """Metrics of one rank's sums, merged."""
    first, *others = sums
    for other in others:
        first.merge(other)
    return first.reduce(ONE_RANK)
