"""Speculative decoding of one vLLM: tokens, distribution, log-probs, ends and metrics against those without.

Letters: N samples, T response tokens, V vocabulary, P prefixes, C cells of a table.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tests.distributed.rollout_engines import actor_of, folder
from tests.one_rank import ONE_RANK
from verl_megatron.config import RolloutConfig
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.sampling import Request, Sampling, sample_seed

VOCABULARY, END = 12, 2
OFF = RolloutConfig(max_num_seqs=64, kv_cache_mib=32)
ON = replace(OFF, speculative="ngram", speculative_tokens=3, speculative_max_seqs=64)
PROMPT = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]  # what follows is drafted from the first token on
# A right sampler is above it with any seed but one in ten thousand, and the seeds are fixed.
LEAST_P = 1e-4


def requests(count: int, prompt: list[int] = PROMPT) -> list[Request]:
    return [Request(n, prompt, sample_seed(3, 1, n)) for n in range(count)]


def load_of(actor) -> dict[str, float]:
    actor.admission.add_load(sums := Sums(), is_first=True)
    return sums.reduce(ONE_RANK)


# ---- what is exact -----------------------------------------------------------------------------------------


@torch.no_grad()
def step_probs(model, prefixes_PT: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities of the next token: [P, V]."""
    prompt_PT = torch.tensor(PROMPT).expand(len(prefixes_PT), -1)
    ids_PT = torch.cat([prompt_PT, prefixes_PT], 1)
    logits_PV = torch.cat([model(part).logits[:, -1] for part in ids_PT.split(2048)]) / sampling.temperature
    if sampling.min_tokens > prefixes_PT.shape[1]:
        logits_PV[:, END] = -torch.inf
    if sampling.top_k > 0:
        least_P1 = logits_PV.topk(sampling.top_k).values[:, -1:]
        logits_PV = logits_PV.masked_fill(logits_PV < least_P1, -torch.inf)
    return logits_PV.softmax(-1)


def tables(model, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the last two of `max_tokens` tokens [V * V], and of each length [T + 1].

    All prefixes are enumerated; those that end in the end-of-sequence token go no further.
    """
    going_PT, chance_P = torch.empty(1, 0, dtype=torch.int64), torch.ones(1)
    ended_T1 = torch.zeros(sampling.max_tokens + 1)
    others = torch.tensor([token for token in range(VOCABULARY) if sampling.ignore_eos or token != END])
    for length in range(1, sampling.max_tokens + 1):
        next_PV = chance_P[:, None] * step_probs(model, going_PT, sampling)
        if not sampling.ignore_eos:
            ended_T1[length] = next_PV[:, END].sum()
        chance_P = next_PV[:, others].flatten()
        going_PT = torch.cat(
            [going_PT.repeat_interleave(len(others), 0), others.repeat(len(going_PT))[:, None]], 1
        )
    ended_T1[-1] += chance_P.sum()
    cell_P = going_PT[:, -2] * VOCABULARY + going_PT[:, -1]
    return torch.zeros(VOCABULARY**2).index_add(0, cell_P, chance_P), ended_T1


def p_value(cells: Iterable[int], chance_C: Tensor) -> float:
    """Return Pearson's chi-square test of cell numbers against their probabilities; rare cells are one."""
    counts = Counter(cells)
    total = sum(counts.values())
    expected_C = chance_C.double() / chance_C.sum() * total
    found_C = torch.tensor([float(counts[cell]) for cell in range(len(chance_C))], dtype=torch.float64)
    often_C = expected_C >= 5
    expected = torch.cat([expected_C[often_C], expected_C[~often_C].sum()[None]])
    found = torch.cat([found_C[often_C], found_C[~often_C].sum()[None]])
    used = expected > 0
    assert not found[~used].any(), "a token that has no probability"
    square = ((found - expected)[used] ** 2 / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1) / 2, square / 2))
