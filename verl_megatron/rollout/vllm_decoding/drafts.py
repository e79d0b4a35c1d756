"""Speculative decoding in vLLM, `rollout.speculative`: what is drafted, and what became of it.

A draft is what followed the last tokens where they occurred before in the same sample. The model computes
all tokens of a draft in one step. Rejection sampling (Leviathan et al. 2023) keeps the model's distribution:
a drafted token x is accepted with its probability p(x), and otherwise replaced by one of p without x. So
are the log-probs, which are those of p.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_megatron.config import RolloutConfig
from verl_megatron.rollout.admission import Drafts
from verl_megatron.rollout.sampling import Generation, Sampling

# Tokens at the end of a sample that are looked for in it, as many as are found. A single one tells little.
LEAST_MATCH, MOST_MATCH = 2, 5


def engine_options(config: RolloutConfig) -> dict[str, Any]:
    """Return vLLM's settings for `rollout.speculative`."""
    if config.speculative == "off":
        return {}
    most, tokens = min(config.speculative_max_seqs, config.max_num_seqs), config.speculative_tokens
    schedule = [(1, most, tokens)]  # running samples from, to, and the tokens of their drafts
    if most < config.max_num_seqs:
        schedule.append((most + 1, config.max_num_seqs, 0))
    return dict(
        speculative_config=dict(
            method=config.speculative,
            num_speculative_tokens=tokens,
            num_speculative_tokens_per_batch_size=schedule,
            prompt_lookup_min=LEAST_MATCH,
            prompt_lookup_max=MOST_MATCH,
        ),
        scheduler_cls=_scheduler_class(),
        async_scheduling=False,  # drafts need a step's tokens before the next step is scheduled
    )


@functools.cache
def _scheduler_class() -> type:
    from vllm.v1.core.sched.scheduler import Scheduler

    class DraftScheduler(Scheduler):
        """vLLM's scheduler, which shortens drafts where they would matter and counts the verified ones."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._drafts = self._drafted = self._accepted = 0
            self._ahead: dict[str, int] = {}  # accepted tokens by the names of requests

        def update_draft_token_ids(self, draft_token_ids) -> None:
            super().update_draft_token_ids(draft_token_ids)
            for name in draft_token_ids.req_ids:
                request = self.requests.get(name)
                if request is not None and request.spec_token_ids:
                    params: Any = request.sampling_params
                    longest = longest_draft(
                        request.num_output_tokens,
                        min_tokens=params.min_tokens,
                        max_tokens=params.max_tokens,
                    )
                    request.spec_token_ids = request.spec_token_ids[:longest]

        def make_spec_decoding_stats(self, *args, num_draft_tokens: int, num_accepted_tokens: int, **kwargs):
            self._drafts, self._drafted = self._drafts + 1, self._drafted + num_draft_tokens
            self._accepted += num_accepted_tokens
            name = kwargs["request_id"]
            self._ahead[name] = self._ahead.get(name, 0) + num_accepted_tokens
            return super().make_spec_decoding_stats(
                *args,
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                **kwargs,
            )

        def take_drafts(self, samples: Mapping[str, int]) -> Drafts:
            """Return the drafts since the last call; `samples` are the running ones by their requests."""
            drafts = Drafts(
                count=self._drafts,
                drafted=self._drafted,
                accepted=self._accepted,
                ahead={samples[name]: tokens for name, tokens in self._ahead.items() if name in samples},
            )
            self._drafts = self._drafted = self._accepted = 0
            self._ahead = {}
            return drafts

    return DraftScheduler


def longest_draft(so_far: int, *, min_tokens: int, max_tokens: int) -> int:
    """Return the tokens that the draft of a sample may have; one more than accepted ones is sampled.

    vLLM forbids stop tokens to that last one if the sample is shorter than `min_tokens` before the step, and
    so it must be so behind the draft, too.

    Args:
        so_far: tokens of the response.
    """
    last = min_tokens if so_far < min_tokens else max_tokens
    return max(0, last - so_far - 1)


def read_drafts(scheduler: Any, samples: Mapping[str, int]) -> Drafts | None:
    """Return the drafts since the last call; None without speculative decoding.

    Args:
        samples: running samples by the names of their requests.
    """
    return scheduler.take_drafts(samples) if hasattr(scheduler, "take_drafts") else None


def without_rest(
    sample: Generation, sampling: Sampling, *, decode: Callable[..., str], most: int
) -> Generation:
    """Return a sample that a stop string ended without what its last step made behind that.

    Args:
        decode: of the engine's tokenizer.
        most: tokens that a step may make.
    """
    count = end_of_stop(
        lambda tokens: decode(tokens, skip_special_tokens=True),
        sample.token_ids,
        sampling.stop,
        most=most,
        min_tokens=sampling.min_tokens,
    )
    return replace(sample, token_ids=sample.token_ids[:count], logprobs=sample.logprobs[:count])


def end_of_stop(
    decode: Callable[[Sequence[int]], str],
    token_ids: Sequence[int],
    stop: Sequence[str],
    *,
    most: int,
    min_tokens: int,
) -> int:
    """Return the number of tokens that complete a stop string: vLLM looks for one after a whole step.

    Newer versions drop the rest themselves, vLLM 0.26 does not.

    Args:
        token_ids: of a response that has a stop string.
        most: tokens that its last step may have made.
        min_tokens: of the response, in whose text no stop string counts.
    """
    before = max(len(token_ids) - most, min_tokens, 0)
    seen = len(decode(token_ids[:before]))
    for count in range(before + 1, len(token_ids)):
        text = decode(token_ids[:count])
        if any(text.find(string, max(0, seen - len(string) + 1)) >= 0 for string in stop):
            return count
    return len(token_ids)
