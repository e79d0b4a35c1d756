"""What goes into vLLM for a sample, and what comes out: sampling parameters, and the tokens so far."""

from dataclasses import dataclass, field
from typing import Any

from verl_megatron.rollout.sampling import Generation, Request, Sampling


def sampling_params(sampling: Sampling, *, seed: int, max_tokens: int) -> Any:
    """Return vLLM's parameters of a sample with a budget of `max_tokens` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_tokens=min(sampling.min_tokens, max_tokens),
        max_tokens=max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=seed,  # required: without it each rank would draw from its own global generator
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def internal_id(processor: Any, request_id: str) -> str:
    """Return the engine's id of a running request; newer vLLM versions have internal ones."""
    return getattr(processor, "external_req_ids", {}).get(request_id, [request_id])[0]


@dataclass(slots=True)
class Tokens:
    """What a request has generated so far."""

    has_stop: bool  # vLLM looks for its stop strings after every step
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def generation(self, request: Request, finish_reason: str, *, count: int | None = None) -> Generation:
        """Return the sample of a request that has ended, of its first `count` tokens; None: of all."""
        assert len(self.logprobs) == len(self.token_ids)
        return Generation(
            request.sample_id,
            request.prompt_token_ids,
            self.token_ids[:count],
            self.logprobs[:count],
            finish_reason,
        )
