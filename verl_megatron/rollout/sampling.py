"""Records of rollout: sampling parameters, request, generation; and the seed of each sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_megatron.config import RolloutConfig

_SEED_BITS = 63  # vLLM's seeds are signed 64-bit
_SEED_MASK = (1 << _SEED_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters; fields as in `RolloutConfig`."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: Sequence[str] = field(default_factory=tuple)
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    ignore_eos: bool = False

    @classmethod
    def from_config(cls, config: RolloutConfig) -> "Sampling":
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            ignore_eos=config.ignore_eos,
            min_tokens=config.min_tokens,
            max_tokens=config.max_tokens,
            stop=tuple(config.stop),
            stop_token_ids=tuple(config.stop_token_ids),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def trained_temperature(self) -> float:
        """The temperature of the log-probs: vLLM's are those of temperature 1 for greedy samples."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A sample to generate. Samples of the same prompt differ in `sample_id` and `seed` only."""

    sample_id: int  # number of the sample in the iteration
    prompt_token_ids: Sequence[int]
    seed: int  # sampling seed, see `sample_seed`
    sampling: Sampling = field(default_factory=Sampling)
    cache_salt: str = ""  # the version of the weights: the prefix cache serves only requests of the same one


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished sample."""

    sample_id: int
    prompt_token_ids: Sequence[int]
    token_ids: list[int]  # response, including the stop token
    # Per response token, under the sampling distribution: after temperature, top-p, top-k and min-tokens.
    logprobs: list[float]
    finish_reason: str  # "stop" (a stop token or string), "length" or "abort"
    is_sampled: list[bool] | None = None  # per response token: generated, not appended; None: all generated

    def then(self, other_token_ids: Sequence[int], following: "Generation") -> "Generation":
        """Join this turn, appended tokens (not sampled, with log-probability 0 here) and the next turn."""
        given, own = len(other_token_ids), self.is_sampled or [True] * len(self.token_ids)
        return Generation(
            sample_id=self.sample_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=[*self.token_ids, *other_token_ids, *following.token_ids],
            logprobs=[*self.logprobs, *[0.0] * given, *following.logprobs],
            finish_reason=following.finish_reason,
            is_sampled=[*own, *[False] * given, *(following.is_sampled or [True] * len(following.token_ids))],
        )


def sample_seed(run_seed: int, iteration: int, sample_id: int) -> int:
    """Return the seed of a sample in [0, 2^63), independent of the replica that generates it.

    (iteration, sample_id) is packed into one number below 2^63, and an odd multiple of the run's seed is
    added. The bits are mixed by invertible steps: multiplication by an odd number, xor with the upper bits.
    So all samples of a run have different seeds, and those of neighbours differ in half of the bits.

    Args:
        iteration: below 2^31.
        sample_id: below 2^32.
    """
    assert 0 <= iteration < 1 << 31 and 0 <= sample_id < 1 << 32, (iteration, sample_id)
    seed = ((iteration << 32 | sample_id) + run_seed * 0x1E3779B97F4A7C15) & _SEED_MASK
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        seed = ((seed ^ seed >> 31) * factor) & _SEED_MASK
    return seed ^ seed >> 31


def token_budget(request: Request, *, max_model_len: int, vocab_size: int) -> int:
    """Return the maximum response length of a sample: `sampling.max_tokens`, limited by `max_model_len`.

    Raises:
        ValueError: the prompt is empty, leaves no room for a response, or has ids outside the vocabulary.
    """
    length, sample = len(request.prompt_token_ids), request.sample_id
    if not length:
        raise ValueError(
            f"sample {sample} has an empty prompt; give it at least one token, such as the tokenizer's bos"
        )
    if length >= max_model_len:
        raise ValueError(
            f"sample {sample}: a prompt of {length} tokens leaves no room for a response within "
            f"max_model_len={max_model_len}; shorten the prompt or raise max_model_len"
        )
    low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"sample {sample}: token id {low if low < 0 else high} is outside the model's vocabulary of "
            f"{vocab_size}; use the model's own tokenizer"
        )
    return min(request.sampling.max_tokens, max_model_len - length)
