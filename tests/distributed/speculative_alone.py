"""Speculative decoding of one vLLM: tokens, distribution, log-probs, ends and metrics against those without.

Letters: T response tokens, V vocabulary, P prefixes, C cells of a table.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from tests.distributed.rollout_alone import hf_logprobs
from tests.distributed.rollout_engines import actor_of, tokens_of
from tests.one_rank import ONE_RANK
from tests.tiny import SHARP_VOCABULARY
from verl_megatron.benchmarks.repeating import following, write_repeating
from verl_megatron.config import RolloutConfig
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.dispatch import generate
from verl_megatron.rollout.sampling import Request, Sampling, sample_seed
from verl_megatron.rollout.stream import Group, GroupStream

VOCABULARY, END = SHARP_VOCABULARY, 2
OFF = RolloutConfig(max_num_seqs=64, kv_cache_mib=32)
ON = replace(OFF, speculative="ngram", speculative_tokens=3, speculative_max_seqs=64)
# A right sampler is above it with any seed but one in ten thousand, and the seeds are fixed.
LEAST_P = 1e-4
GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


def requests(count: int, prompt: list[int]) -> list[Request]:
    return [Request(n, prompt, sample_seed(3, 1, n)) for n in range(count)]


def load_of(actor) -> dict[str, float]:
    actor.admission.add_load(sums := Sums(), is_first=True)
    return sums.reduce(ONE_RANK)


# ---- what is exact -----------------------------------------------------------------------------------------


@torch.no_grad()
def step_probs(model, prompt: list[int], prefixes_PT: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities of the next token: [P, V]."""
    prompt_PT = torch.tensor(prompt).expand(len(prefixes_PT), -1)
    ids_PT = torch.cat([prompt_PT, prefixes_PT], 1)
    logits_PV = torch.cat([model(part).logits[:, -1] for part in ids_PT.split(2048)]) / sampling.temperature
    if sampling.min_tokens > prefixes_PT.shape[1]:
        logits_PV[:, END] = -torch.inf
    if sampling.top_k > 0:
        least_P1 = logits_PV.topk(sampling.top_k).values[:, -1:]
        logits_PV = logits_PV.masked_fill(logits_PV < least_P1, -torch.inf)
    return logits_PV.softmax(-1)


def tables(model, prompt: list[int], sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the last two of `max_tokens` tokens [V * V], and of each length [T + 1].

    All prefixes are enumerated; those that end in the end-of-sequence token go no further.
    """
    going_PT, chance_P = torch.empty(1, 0, dtype=torch.int64), torch.ones(1)
    ended_T1 = torch.zeros(sampling.max_tokens + 1)
    others = torch.tensor([token for token in range(VOCABULARY) if sampling.ignore_eos or token != END])
    for length in range(1, sampling.max_tokens + 1):
        next_PV = chance_P[:, None] * step_probs(model, prompt, going_PT, sampling)
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
    if found[~used].any():
        return 0.0  # a token that cannot be
    square = ((found - expected)[used] ** 2 / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1) / 2, square / 2))


# ---- checks ------------------------------------------------------------------------------------------------


def check_greedy(off, on, prompts: list[list[int]]) -> None:
    """Greedy tokens and their log-probs are the same, with fewer steps."""
    asked = [Request(n, prompt, n) for n, prompt in enumerate(prompts)]
    expected, found = off.generate(asked, GREEDY), on.generate(asked, GREEDY)
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
    load = load_of(on)
    assert load["rollout/acceptance_rate"] > 0.3 and load["rollout/draft_fraction"] > 0.5
    assert "rollout/acceptance_rate" not in load_of(off)


def check_distribution(model, on, prompt: list[int], count: int, *, top_k: int = 5) -> None:
    """Chi-square tests of pairs of tokens, and of lengths, against all that may be sampled.

    `top_k` is that of the second test; 0 is for half precision, where another token can be the last of them.
    """
    for sampling in (
        Sampling(temperature=0.7, max_tokens=4, ignore_eos=True),
        Sampling(temperature=1.5, top_k=top_k, max_tokens=4, ignore_eos=True),
        Sampling(max_tokens=5, min_tokens=2),
    ):
        samples = on.generate(requests(count, prompt), sampling)
        pairs_C, lengths_C = tables(model, prompt, sampling)
        if sampling.ignore_eos:
            cells = [sample.token_ids[-2] * VOCABULARY + sample.token_ids[-1] for sample in samples]
            wrong_C = tables(model, prompt, replace(sampling, temperature=1.3 * sampling.temperature))[0]
            assert p_value(cells, wrong_C) < LEAST_P, "the test would not notice another temperature"
            assert p_value(cells, pairs_C) > LEAST_P
        else:
            lengths = [len(sample.token_ids) for sample in samples]
            assert min(lengths) == 3  # two tokens before that which ends it
            assert p_value(lengths, lengths_C) > LEAST_P
        load = load_of(on)
        assert load["rollout/draft_fraction"] > 0.2 and 0.1 < load["rollout/acceptance_rate"] < 0.95


@torch.no_grad()
def check_logprobs(model, on, prompt: list[int], *, atol: float = 1e-4, least_share: float = 1.0) -> None:
    """Log-probs are the model's under the sampling parameters, greedy samples beside others included.

    Args:
        least_share: of the tokens that have to be within `atol`; below 1 for half precision, where another
            token can be the last that top_k or top_p keeps.
    """
    for changes in (dict(temperature=0.7), dict(temperature=1.3, top_k=5), dict(temperature=1.0, top_p=0.6)):
        sampling = Sampling(**changes, max_tokens=24, ignore_eos=True)
        asked = [replace(request, sampling=sampling) for request in requests(12, prompt)]
        asked[::3] = [replace(request, sampling=GREEDY) for request in asked[::3]]
        samples = generate(on, asked)
        alike = {tuple(sample.token_ids) for sample in samples if sample.sample_id % 3 == 0}
        assert len(alike) == 1, "greedy samples of a prompt"
        errors = []
        for sample in samples:
            given = dict(temperature=1.0) if sample.sample_id % 3 == 0 else changes
            errors.append((torch.tensor(sample.logprobs) - hf_logprobs(model, sample, **given)).abs())
        error_T = torch.cat(errors)
        share = (error_T <= atol).double().mean().item()
        assert share >= least_share, f"{changes}: {share:.3f} are right, the largest error is {error_T.max()}"


def check_ends(off, on, prompts: list[list[int]]) -> None:
    """Greedy samples end where they end without drafts: at stop tokens, stop strings and limits."""
    asked = [Request(n, prompt, n) for n, prompt in enumerate(prompts)]
    whole = off.generate(asked, GREEDY)[0].token_ids
    words = [f"w{token}" if token > 2 else ("<pad>", "<s>", "</s>")[token] for token in whole]
    for ends in (
        dict(stop=(" ".join(words[4:6]),)),
        dict(stop=(words[3], words[5]), min_tokens=7),
        dict(stop_token_ids=(whole[9],)),
        dict(stop_token_ids=(whole[2], whole[3]), min_tokens=12),
        dict(ignore_eos=False),
        dict(max_tokens=3),
    ):
        sampling = replace(GREEDY, **ends)
        expected, found = off.generate(asked, sampling), on.generate(asked, sampling)
        for one, other in zip(found, expected):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason), ends
            assert len(one.logprobs) == len(one.token_ids)


def check_acceptance(on) -> None:
    """The metrics of a text whose tokens are foreseen with a known probability."""
    write_repeating(on, chance=0.9)
    weights = {name: tensor.double() for name, tensor in on.weight_target().items()}
    logits_VV = weights["model.embed_tokens.weight"] @ weights["lm_head.weight"].T
    after = torch.tensor([following(token, VOCABULARY) for token in range(VOCABULARY)])
    chance = logits_VV[:VOCABULARY, :VOCABULARY].softmax(-1)[range(VOCABULARY), after].mean().item()
    assert 0.8 < chance < 0.97
    circle = [n % VOCABULARY for n in range(3 * VOCABULARY)]
    load_of(on)
    on.generate(requests(40, circle), Sampling(max_tokens=100, ignore_eos=True))
    load, tokens = load_of(on), ON.speculative_tokens
    accepted = sum(chance**n for n in range(1, tokens + 1))
    # 1000 drafts and more, each of three tokens at most: three standard deviations of the mean are below 0.12
    assert abs(load["rollout/acceptance_length"] - 1 - accepted) < 0.15
    assert abs(load["rollout/acceptance_rate"] - accepted / tokens) < 0.05
    assert 0.6 < load["rollout/draft_fraction"] < 1  # none where a wrong token came just before


def check_limit(limited) -> None:
    """No drafts while more samples run than rollout.speculative_max_seqs."""
    write_repeating(limited, chance=0.99)
    circle = [n % VOCABULARY for n in range(3 * VOCABULARY)]
    for running, drafts in ((3, False), (2, True)):
        limited.generate(requests(running, circle), Sampling(max_tokens=30, ignore_eos=True))
        load = load_of(limited)
        assert (load["rollout/draft_fraction"] > 0.5) == drafts
        assert ("rollout/acceptance_length" in load) == drafts


def check_versions(on) -> None:
    """Tokens that were drafted before new weights came are verified by the new ones."""
    write_repeating(on, chance=0.999999)
    circle = [n % VOCABULARY for n in range(3 * VOCABULARY)]
    stream = GroupStream(on, partial="pause", version=0)
    stream.add(Group(number=0, requests=[replace(r, sampling=GREEDY) for r in requests(4, circle)]))
    done = []
    with on.session():
        for _ in range(4):
            done += stream.step()
        assert not done and stream.begin_change()
        write_backwards(on)
        stream.end_change(1)
        while not done:
            done += stream.step()
    for sample, versions in zip(done[0].samples, done[0].versions):
        assert set(versions) == {0, 1} and versions == sorted(versions)
        before = [circle[-1], *sample.token_ids]
        for previous, token, version in zip(before, sample.token_ids, versions):
            assert token == following(previous, VOCABULARY, step=1 if version == 0 else -1)


def check_minimum(on) -> None:
    """The end-of-sequence token is allowed from the first place on where it is without drafts."""
    write_repeating(on, chance=0.999999)
    for length, least in product(range(1, 9), range(9)):
        if length <= least:
            continue
        circle = [n % VOCABULARY for n in range(4 * VOCABULARY + END + 1 - length)]
        sampling = Sampling(max_tokens=12, min_tokens=least)
        for sample in on.generate(requests(2, circle), sampling):
            assert (len(sample.token_ids), sample.finish_reason) == (length, "stop"), (length, least)


def check_stop_strings(on) -> None:
    """A response ends with the token that completes a stop string, wherever in a step that is."""
    write_repeating(on, chance=0.999999)
    circle = [n % VOCABULARY for n in range(3 * VOCABULARY + 3)]  # 3 follows
    for last, least in product(range(4, 12), (0, 4, 9)):
        stops = Sampling(max_tokens=40, ignore_eos=True, stop=(f"w{last - 1} w{last}",), min_tokens=least)
        # a pair counts whose second token comes after `least` tokens, perhaps in the next round
        expected = next(count for count in (last - 2, last - 2 + VOCABULARY) if count > least)
        for sample in on.generate(requests(2, circle), stops):
            assert sample.token_ids == [(3 + n) % VOCABULARY for n in range(expected)]
            assert len(sample.logprobs) == expected and sample.finish_reason == "stop"


def write_backwards(on) -> None:
    """As a weight sync does: in place, with samples running, whose cache stays."""
    with torch.no_grad():
        head_VC = on.weight_target()["lm_head.weight"]
        head_VC[:VOCABULARY] = head_VC[:VOCABULARY].roll(-2, 0)


def check_alone(prompts: list[list[int]], prompt: list[int], model) -> None:
    off, on = actor_of("sharp", config=OFF), actor_of("sharp", config=ON)
    assert on.tp == 1
    check_greedy(off, on, prompts)
    check_ends(off, on, prompts)
    off.close()
    check_distribution(model, on, prompt, 1500)
    check_logprobs(model, on, prompt)
    check_circles(on)
    on.close()


def check_circles(on) -> None:
    """What a text that repeats shows; also of a second engine, which starts when numba is imported."""
    check_acceptance(on)
    check_minimum(on)
    if on.has_tokenizer:
        check_stop_strings(on)
    check_versions(on)
    # vLLM lets one engine of a process sleep
    limited = actor_of("sharp", config=replace(on.config, speculative_max_seqs=2, sleep=False))
    check_limit(limited)
    limited.close()
