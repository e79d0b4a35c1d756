"""Prompts in, rows out: what vLLM generated here, scored while it was being generated."""

from collections.abc import Callable, Sequence

from verl_megatron.batch import RolloutBatch
from verl_megatron.data import Prompt
from verl_megatron.rewards.pool import RewardPool
from verl_megatron.rollout.sampling import Generation, Request, Sampling, row_seed
from verl_megatron.rollout.vllm import VLLMActor
from verl_megatron.tokenizer import Tokenizer


def generate_rows(
    vllm: VLLMActor,
    prompts: Sequence[Prompt],
    *,
    samples_per_prompt: int,
    sampling: Sampling,
    seed: int,
    iteration: int,
    tokenizer: Tokenizer,
    pool: RewardPool | None,
    on_step: Callable[[], None] = lambda: None,
) -> RolloutBatch:
    """Rows prompt by prompt: row i answers prompt i // samples_per_prompt. Every rank passes the same prompts.

    Returns the rows whose home is this rank (the first of its replica; the other ranks hold none), ordered by number.
    Function rewards start as rows finish; `pool.results()` has them afterwards. `on_step` is called as tokens are added.
    """
    requests = [
        Request(row_id=i * samples_per_prompt + s, prompt_token_ids=prompt.prompt_token_ids, seed=row_seed(seed, iteration, i * samples_per_prompt + s))
        for i, prompt in enumerate(prompts)
        for s in range(samples_per_prompt)
    ]

    def score(row: Generation) -> None:
        prompt = prompts[row.row_id // samples_per_prompt]
        pool.submit(row.row_id, prompt.text, tokenizer.decode(row.token_ids), prompt.answer, prompt.extra)

    generations = vllm.generate(requests, sampling, on_finish=score if pool is not None and vllm.is_home else None, on_step=on_step)
    mine = sorted(generations, key=lambda row: row.row_id) if vllm.is_home else []
    return RolloutBatch.from_rows(
        [row.row_id for row in mine],
        [list(row.prompt_token_ids) for row in mine],
        [list(row.token_ids) for row in mine],
        [list(row.logprobs) for row in mine],
    )
