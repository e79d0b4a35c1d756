"""Settings of the policy-gradient algorithm."""

from dataclasses import dataclass

from verl_megatron.config.section import COUNT, POSITIVE, SHARE, Section, setting

ALGORITHM_NAMES = (
    *("ppo", "grpo", "dr_grpo", "gspo", "cispo", "rloo", "opo"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "distillation"),
)
OBJECTIVE_NAMES = ("clip", "gspo", "gspo_token", "cispo", "reinforce")
NORMALIZER_NAMES = ("token_mean", "sequence_mean", "sequence_sum")
CORRECTION_LEVELS = ("token", "sequence", "geometric")


@dataclass(kw_only=True)
class AlgorithmConfig(Section):
    """Policy-gradient algorithm; algorithms.md has the formulas and their sources."""

    name: str = setting(
        "ppo", "advantages, with their usual objective and normalizer", choices=ALGORITHM_NAMES
    )
    objective: str = setting(
        "auto", "loss of a response token; auto: the algorithm's", choices=("auto", *OBJECTIVE_NAMES)
    )
    normalizer: str = setting(
        "auto", "divisor of the policy loss; auto: the algorithm's", choices=("auto", *NORMALIZER_NAMES)
    )
    gamma: float = setting(1.0, "discount factor", within="(0, 1]")
    gae_lambda: float = setting(0.95, "lambda of generalized advantage estimation (GAE)", within="[0, 1]")
    whiten: bool = setting(True, "normalise advantages (mean 0, std 1) over the iteration's response tokens")
    scale_by_std: bool = setting(True, "GRPO: divide by the standard deviation of the group")
    epochs: int = setting(1, "passes over the samples of an iteration", within="[1, 10000]")
    num_mini_batches: int = setting(1, "optimizer steps per pass", within="[1, 1000000]")
    clip_ratio_low: float = setting(
        0.2, "lower bound of the clipped ratio: 1 - clip_ratio_low", within="(0, 1]"
    )
    clip_ratio_high: float = setting(
        0.2, "upper bound of the clipped ratio: 1 + clip_ratio_high", within="(0, 1000000]"
    )
    dual_clip: float = setting(
        0.0, "largest loss of a token with a negative advantage, divided by it; 0: off", within=SHARE
    )
    cliprange_value: float = setting(0.2, "clip range of the value loss; 0: off", within=SHARE)
    entropy_coef: float = setting(0.0, "coefficient of the entropy bonus in the policy loss", within=SHARE)
    kl_coef: float = setting(
        0.0, "coefficient of the KL penalty to the reference; 0: no reference model", within=SHARE
    )
    kl_in: str = setting(
        "reward",
        "where the KL penalty is added: token rewards (reward), policy loss (loss) or nowhere (none)",
        choices=("reward", "loss", "none"),
    )
    kl_estimator: str = setting(
        "k1", "with x = log p - log q: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x", choices=("k1", "k2", "k3")
    )
    kl_ctrl_target: float = setting(
        0.0, "target KL per sample (sum over tokens) of the adaptive coefficient; 0: fixed", within=SHARE
    )
    kl_ctrl_horizon: int = setting(10_000, "horizon of the adaptive coefficient, in samples", within=POSITIVE)
    kl_unbiased: bool = setting(
        False, "multiply the KL in the loss by p / p_old, which makes its gradient unbiased"
    )
    correction: str = setting(
        "auto",
        "importance weights against the gap between sampler and trainer: truncate (TIS), mask (IcePop, MIS); "
        "auto: truncate if async.max_staleness is above 0 or rollout.weight_dtype is fp8, else none",
        choices=("auto", "none", "truncate", "mask"),
    )
    correction_level: str = setting(
        "auto",
        "ratio of a token, of a sequence, or its geometric mean; auto: sequence if async.max_staleness is "
        "above 0 and responses have at most 128 tokens, else token",
        choices=("auto", *CORRECTION_LEVELS),
    )
    correction_low: float = setting(0.0, "lower bound of the importance weight", within="[0, 1]")
    correction_high: float = setting(2.0, "upper bound of the importance weight", within="[1, 1000000]")
    old_logprobs: str = setting(
        "recompute",
        "log-probs of the proximal policy, to which ratios are taken: the actor's before the iteration's "
        "updates (recompute); without a pass for them the sampler's, or loglinear between these and the "
        "update's, by version",
        choices=("recompute", "sampler", "loglinear"),
    )
    reuse_logprobs: bool = setting(
        True, "take the old log-probs of an iteration's first step from its own forward pass if possible"
    )
    check_logprobs_interval: int = setting(
        50, "iterations between comparisons of reused log-probs with a separate pass; 0: never", within=COUNT
    )
    target_kl: float = setting(
        0.0, "skip the iteration's remaining updates above this approximate KL; 0: off", within=SHARE
    )
    dynamic_sampling: bool = setting(False, "replace prompts whose samples all have the same score")
    max_sampling_rounds: int = setting(10, "maximum number of rounds of dynamic sampling", within="[1, 1000]")
    mask_cut: bool = setting(
        False,
        "no loss for responses cut off at rollout.max_tokens, as DAPO's overlong filtering; their scores "
        "still count in their group",
    )
    teacher_coef: float = setting(
        1.0, "coefficient of the log-prob gap to the teacher in the advantages", within=SHARE
    )
    critic_warmup: int = setting(0, "number of first iterations that train only the critic", within=COUNT)


@dataclass(kw_only=True)
class DPOLossConfig(Section):
    """Loss of direct preference optimization; algorithms.md has the formulas."""

    loss: str = setting(
        "sigmoid",
        "sigmoid: DPO, conservative with label_smoothing; ipo: squared distance",
        choices=("sigmoid", "ipo"),
    )
    beta: float = setting(
        0.1, "strength of the pull to the reference, the actor's initial weights", within="(0, 1000]"
    )
    label_smoothing: float = setting(
        0.0, "probability that a label is wrong (conservative DPO); sigmoid only", within="[0, 0.5)"
    )
