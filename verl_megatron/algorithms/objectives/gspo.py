"""Group sequence policy optimization (GSPO, Zheng et al. 2025): one clipped ratio for each sample."""

from torch import Tensor

from verl_megatron.algorithms.objectives.clip import clipped_surrogate
from verl_megatron.algorithms.tokens import PolicyTokens
from verl_megatron.config import AlgorithmConfig


def objective(logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Clip the sample's ratio s = exp(mean over its tokens of log p / p_old).

    Every token has the loss of its sample, so the mean over samples of token means is the paper's objective.
    Advantages that differ within a sample are averaged over it.
    """
    log_ratio_N = tokens.mean_of_sample(tokens.log_ratio(logprobs_N))
    return clipped_surrogate(log_ratio_N.exp(), tokens.mean_of_sample(tokens.advantages_N), config)


def token_objective(
    logprobs_N: Tensor, tokens: PolicyTokens, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Clip s_t = sg[s] p / sg[p], whose gradient is the token's own (GSPO-token).

    sg stops the gradient. Advantages may differ between the tokens of a sample.
    """
    log_ratio_N = tokens.mean_of_sample(tokens.log_ratio(logprobs_N.detach()))
    ratio_N = (log_ratio_N + logprobs_N - logprobs_N.detach()).exp()
    return clipped_surrogate(ratio_N, tokens.advantages_N, config)
