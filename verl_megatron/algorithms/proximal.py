"""Old log-probs without a pass for them: `loglinear` between the sampler's and those of the update.

Letters: N response tokens of a packed micro-batch.
"""

import torch
from torch import Tensor

from verl_megatron.config import AlgorithmConfig


def is_recomputed(config: AlgorithmConfig) -> bool:
    """Whether the old log-probs are the actor's own, from a pass of their own where one is needed."""
    return config.old_logprobs == "recompute"


def loglinear(logprobs_N: Tensor, rollout_logprobs_N: Tensor, behind_N: Tensor, *, done: float) -> Tensor:
    """Interpolate old log-probs between the sampler's and the present ones, by the versions of the weights.

        alpha = (v_prox - v_behav) / (v_theta - v_behav)
        log p_prox = log p_behav + alpha (log p_theta - log p_behav)

    (AReaL, `prox_logp_method=loglinear`, 2025). v_prox is the version from which the iteration starts,
    v_behav that of the sampler, and v_theta = v_prox + `done`. AReaL counts whole versions, so that `done` is
    1 there.

    Args:
        logprobs_N: of the present weights, float32.
        rollout_logprobs_N: of the sampler, float32.
        behind_N: v_prox - v_behav of each token, float32, at least 0.
        done: share of the iteration's optimizer steps that have been made, in [0, 1). At 0 the present
            weights are those of v_prox, and so are their log-probs, to the last bit.

    Returns:
        [N] float32, without gradient.
    """
    if not done:
        return logprobs_N.detach()
    return torch.lerp(rollout_logprobs_N, logprobs_N.detach(), behind_N / (behind_N + done))
