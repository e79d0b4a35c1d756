"""Speculative decoding without an engine: lengths of drafts, stop strings, settings, load, checks."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.job_files import write_job
from tests.one_rank import ONE_RANK
from tests.planned import H200, run_config, run_of
from tests.scripted_engine import admission_of
from tests.unit.test_checks import good
from verl_megatron.checks import rollout as checks
from verl_megatron.checks.batches import batch_arithmetic
from verl_megatron.checks.settings import check_config
from verl_megatron.config import RolloutConfig
from verl_megatron.observe.metrics import Sums
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.seconds import plan_seconds
from verl_megatron.planner.text import seconds_lines
from verl_megatron.rollout.admission import CacheReading, Drafts
from verl_megatron.rollout.sampling import Generation, Request, Sampling
from verl_megatron.rollout.vllm_decoding.drafts import (
    end_of_stop,
    engine_options,
    longest_draft,
    without_rest,
)

# Letters: B samples, N drafted tokens, V vocabulary.


def test_no_draft_reaches_beyond_the_limits():
    """The token behind a draft may be a stop token where the sample's next one may; it fits the limit."""
    for so_far, least, most in product(range(12), range(12), range(1, 12)):
        if so_far >= most or least > most:
            continue
        draft = longest_draft(so_far, min_tokens=least, max_tokens=most)
        assert draft >= 0 and so_far + draft + 1 <= most
        if draft:
            assert (so_far < least) == (so_far + draft < least)
        longer = so_far + draft + 1
        assert longer + 1 > most or (so_far < least) != (longer < least), "no shorter than needed"


WORDS = ["", "ab", "c", "abc", "d", "xa"]


def words(tokens) -> str:
    return "".join(WORDS[token] for token in tokens)


def is_complete(tokens, count: int, stop) -> bool:
    """Whether the last of so many tokens completes a stop string."""
    seen = len(words(tokens[: count - 1]))
    return any(words(tokens[:count]).find(string, max(0, seen - len(string) + 1)) >= 0 for string in stop)


@pytest.mark.parametrize("stop", [("bc",), ("d", "bc"), ("cab",), ("abcd",)])
@pytest.mark.parametrize("least", [0, 2, 4])
def test_what_follows_a_stop_string_in_its_step_is_cut(stop, least):
    """As a loop over single tokens would: the first after `least` whose text completes a stop string."""
    for tokens in product(range(1, 6), repeat=6):
        ends = [count for count in range(least + 1, 7) if is_complete(tokens, count, stop)]
        if not ends:
            continue
        first = ends[0]
        for most in range(1, 5):
            whole = tokens[: min(6, first + most - 1)]  # a step of `most` tokens that begins with that one
            assert end_of_stop(words, whole, stop, most=most, min_tokens=least) == first


def test_log_probs_are_cut_with_their_tokens():
    def decode(tokens, *, skip_special_tokens):
        assert skip_special_tokens
        return words(tokens)

    sample = Generation(3, [1], [2, 1, 2, 4, 4], [-0.1, -0.2, -0.3, -0.4, -0.5], "stop")
    cut = without_rest(sample, Sampling(stop=("bc",)), decode=decode, most=4)
    assert (cut.token_ids, cut.logprobs) == ([2, 1, 2], [-0.1, -0.2, -0.3])


def test_drafts_are_for_few_samples_only():
    pytest.importorskip("vllm")
    config = RolloutConfig(speculative="ngram", speculative_tokens=5, speculative_max_seqs=8)
    given = engine_options(config)["speculative_config"]
    assert given["num_speculative_tokens_per_batch_size"] == [(1, 8, 5), (9, 256, 0)]
    config.max_num_seqs = 4
    given = engine_options(config)["speculative_config"]
    assert given["num_speculative_tokens_per_batch_size"] == [(1, 4, 5)]
    assert engine_options(RolloutConfig()) == {}


@pytest.mark.parametrize("top_p", [None, 0.7])
@pytest.mark.parametrize("top_k", [None, 3])
def test_drafts_have_the_sampling_parameters_of_their_samples_on_cpus(top_k, top_p):
    """Against each sample's rows by themselves."""
    rejection_sampler = pytest.importorskip("vllm.v1.sample.rejection_sampler")
    vllm_cpu = pytest.importorskip("verl_megatron.rollout.vllm_cpu")
    if torch.cuda.is_available():
        pytest.skip("a patch of vLLM's CPU build")
    before = rejection_sampler.apply_sampling_constraints
    try:
        vllm_cpu.CPU_PATCHES["constrain_drafts"][1]()
        constrain = rejection_sampler.apply_sampling_constraints
        temperature_B, ends_B = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
        given = SimpleNamespace(
            all_greedy=False,
            temperature=temperature_B,
            top_k=None if top_k is None else torch.tensor([top_k] * 3, dtype=torch.int32),
            top_p=None if top_p is None else torch.tensor([top_p] * 3),
        )
        logits_NV = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
        found_NV = constrain(logits_NV.clone(), ends_B, given)
        expected_NV = logits_NV / torch.tensor([0.5, 0.5, 2.0, 2.0, 2.0])[:, None]
        for row_V, plain_V in zip(found_NV, expected_NV):
            kept_V = row_V > -torch.inf
            assert torch.equal(row_V[kept_V], plain_V[kept_V])
            if top_k is not None and top_p is None:
                assert kept_V.sum() == top_k
            if top_p is not None:
                assert kept_V.sum() < 7 and row_V.argmax() == plain_V.argmax()
            if top_k is top_p is None:
                assert kept_V.all()
        none_B = torch.zeros(3, dtype=torch.int32)
        assert constrain(torch.empty(0, 7), none_B, given).shape == (0, 7), "no drafts in a step"
    finally:
        rejection_sampler.apply_sampling_constraints = before


def started(steps: int, ahead: int):
    """An admission whose one running sample has generated steps + ahead tokens."""
    admission = admission_of(64, tokens=800, adaptive=True)
    requests = [Request(n, [1] * 8, n, Sampling(max_tokens=40)) for n in range(2)]
    admission.begin(requests, max_model_len=64)
    for length in (10, 20, 30, 40):
        admission.start(requests[1])
        done = [Generation(1, [1], [1] * length, [0.0] * length, "stop")]
        admission.observe(CacheReading(used=0.1, preempted=0), done)
    admission.start(requests[0])
    for step in range(steps):
        tokens = {0: ahead} if ahead and step == 0 else {}
        accepted = sum(tokens.values())
        drafts = Drafts(count=len(tokens), drafted=2 * accepted, accepted=accepted, ahead=tokens)
        admission.observe(CacheReading(used=0.1, preempted=0, drafts=drafts), [])
    return admission


def test_accepted_tokens_age_a_sample():
    assert started(24, 0)._room() == started(8, 16)._room() != started(8, 0)._room()


def test_load_tells_of_drafts():
    admission = started(8, 16)
    admission.add_load(sums := Sums(), is_first=True)
    load = sums.reduce(ONE_RANK)
    assert load["rollout/draft_fraction"] == pytest.approx(1 / 12)  # four steps more, of other samples
    assert load["rollout/acceptance_rate"] == 0.5 and load["rollout/acceptance_length"] == 17
    admission.add_load(sums := Sums(), is_first=True)
    assert not any("acceptance" in name or "draft" in name for name in sums.reduce(ONE_RANK))


def test_what_does_not_go_with_drafts_is_refused(tmp_path, monkeypatch):
    write_job(tmp_path)
    drafts = dict(rollout__speculative="ngram")
    assert check_config(good(tmp_path, **drafts), world_size=4) == []
    repeated = dict(run__resume="verify", **drafts)
    (problem,) = check_config(good(tmp_path, **repeated), world_size=4)
    assert "run.resume=verify" in problem and "2 replicas" in problem and "set run.resume=newest" in problem
    one_replica = dict(rollout__tp=4, **repeated)
    assert not [
        said for said in check_config(good(tmp_path, **one_replica), world_size=4) if "verify" in said
    ]
    (problem,) = check_config(good(tmp_path, rollout__speculative="eagle"), world_size=4)
    assert "rollout.speculative=" in problem and "ngram" in problem
    monkeypatch.setattr(checks, "installed", {"vllm": "0.25.1"}.get)
    (problem,) = check_config(good(tmp_path, **drafts), world_size=4)
    assert "needs vllm 0.26 or later, and 0.25.1 is installed" in problem


def test_settings_of_drafts_have_an_effect_and_are_shown(tmp_path):
    write_job(tmp_path)
    config = good(tmp_path, rollout__speculative_tokens=2)
    (problem,) = check_config(config, world_size=4)
    assert problem.startswith("rollout.speculative_tokens=2 has no effect with rollout.speculative=off")
    config.rollout.speculative = "ngram"
    assert check_config(config, world_size=4) == []
    assert "drafts of 2 tokens up to 16 samples" in batch_arithmetic(config, world_size=4)


def test_plans_say_that_drafts_are_not_predicted():
    config = run_config()
    texts = []
    for config.rollout.speculative in ("off", "ngram"):
        run = run_of(config, 8)
        memory = plan_memory(run, H200)
        texts.append(" ".join(seconds_lines(run, plan_seconds(run, H200, memory), memory)))
    assert "without rollout.speculative's drafts" in texts[1] and "speculative" not in texts[0]
