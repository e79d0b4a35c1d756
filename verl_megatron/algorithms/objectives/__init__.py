"""Policy-gradient objectives: one file with one per-token loss each, and one entry in the table `OBJECTIVES`.

Letters: N response tokens of a packed micro-batch.
"""

from typing import Protocol

from torch import Tensor

from verl_megatron.algorithms.objectives import cispo, clip, gspo, reinforce
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig


class Objective(Protocol):
    """Computes the loss of each response token, [N] float32, and which tokens are clipped, [N] bool.

    A clipped token has no gradient, or in CISPO a truncated weight. Gradients flow into `logprobs_N` only.
    """

    def __call__(
        self, logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig
    ) -> tuple[Tensor, Tensor]: ...


OBJECTIVES: dict[str, Objective] = {
    "clip": clip.objective,
    "gspo": gspo.objective,
    "gspo_token": gspo.token_objective,
    "cispo": cispo.objective,
    "reinforce": reinforce.objective,
}
# Settings of the clip that an objective does not read; a run that sets one is refused.
UNREAD: dict[str, tuple[str, ...]] = {
    "cispo": ("dual_clip",),
    "reinforce": ("clip_ratio_low", "clip_ratio_high", "dual_clip"),
}
