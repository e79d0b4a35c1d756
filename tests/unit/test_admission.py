"""Samples at once by the use of the KV cache, with a scripted engine: starts, growth, cuts, same samples."""

import random

import numpy as np
import pytest

from tests.one_rank import ONE_RANK
from tests.scripted_engine import ScriptedEngine, admission_of
from verl_megatron.observe.metrics import Sums
from verl_megatron.rollout.admission import CacheReading, expected_lengths
from verl_megatron.rollout.dispatch import generate
from verl_megatron.rollout.sampling import Generation, Request, Sampling


def requests_of(count, *, max_tokens=64, prompt=8):
    return [Request(i, [1] * prompt, i, Sampling(max_tokens=max_tokens)) for i in range(count)]


def answers(lengths):
    """Answer with tokens that name the sample, as many as `lengths` says."""
    return lambda request: [3 + request.sample_id % 90] * lengths(request.sample_id)


def run(lengths, *, count=400, adaptive=True, tokens=1600, limit=200, max_tokens=64):
    """Generate; return the engine and its samples."""
    engine = ScriptedEngine(
        answers(lengths),
        max_num_seqs=limit,
        max_model_len=256,
        kv_cache_tokens=tokens,
        dynamic_batching=adaptive,
    )
    samples = generate(engine, requests_of(count, max_tokens=max_tokens))
    return engine, samples


def load_of(engine):
    engine.admission.add_load(sums := Sums(), is_first=True)
    return sums.reduce(ONE_RANK)


def mixed(sample_id):
    return random.Random(sample_id).randint(1, 40)


def some_long(sample_id):
    return 60 if random.Random(sample_id).random() < 0.3 else 4


@pytest.mark.parametrize(
    "lengths",
    [lambda sample: 64, lambda sample: 32, mixed, some_long],
    ids=["longest", "half", "mixed", "some_long"],
)
def test_the_cache_is_used_and_never_full(lengths):
    engine, samples = run(lengths)
    load = load_of(engine)
    assert load["rollout/preempted"] == 0 and load["rollout/kv_cache_used"] < 1
    fixed, same = run(lengths, adaptive=False)
    assert load_of(fixed)["rollout/preempted"] > 40, "200 samples at once do not fit"
    assert samples == same, "the same samples, whatever decodes together"
    generate(engine, requests_of(400))  # from the lengths that were seen
    again = load_of(engine)
    assert again["rollout/preempted"] == 0 and again["rollout/concurrent"] >= load["rollout/concurrent"] - 1
    assert sum(engine.readings[-200:-60]) / 140 > 0.4


def test_it_starts_from_what_certainly_fits():
    engine, _ = run(lambda sample: 64, count=100)
    assert engine.most_running == 1600 // (64 + 8), "all at their longest"
    engine, _ = run(lambda sample: 64, count=5)
    assert engine.most_running == 5
    engine, _ = run(lambda sample: 64, tokens=60)
    assert engine.most_running == 1, "one sample always runs"


def test_short_responses_bring_it_to_the_limit():
    engine, _ = run(lambda sample: 2, count=2000, limit=90)
    assert engine.most_running == 90, "never above max_num_seqs"


def test_nothing_starts_above_90_percent_and_nothing_grows_above_60():
    """Samples of 8 tokens in 2,000 blocks of 4, with responses of 40; 20 certainly fit."""
    admission, requests = admission_of(190, tokens=8000, adaptive=True), requests_of(400, max_tokens=392)
    admission.begin(requests, max_model_len=1000)
    assert admission.target == 20
    started = 0

    def after(used, *, finished=1):
        nonlocal started
        while len(admission._started) < admission.target:
            admission.start(requests[started])
            started += 1
        ids = list(admission._started)[:finished]
        samples = [Generation(sample, [1], [2] * 40, [-1.0] * 40, "stop") for sample in ids]
        admission.observe(CacheReading(used=used, preempted=0), samples)
        return admission.target

    for _ in range(40):
        admission.observe(CacheReading(used=0.3, preempted=0), [])
    assert after(0.3, finished=20) == 150, "90 % of the blocks hold 150 samples of 12 blocks"
    assert after(0.7) == 150 and after(0.89, finished=9) == 150, "who finishes is replaced"
    assert after(0.91) == 149 and after(0.95, finished=3) == 146, "who finishes is not replaced"
    assert after(0.8, finished=7) == 146 and after(0.1) == 150


# ---- expected lengths --------------------------------------------------------------------------------------


def expected_by_loop(age, ages, finished, longest):
    """Sum the survival of Kaplan and Meier token by token."""
    share, total = 1.0, 0.0
    for token in range(1, longest + 1):
        if token > age:
            total += share
        at_risk = sum(length >= token for length in finished) + sum(other >= token for other in ages)
        if token > age and (ended := finished.count(token)):
            share *= 1 - ended / at_risk
    if any(length > age for length in finished):
        return age + total
    return max(age, longest)


@pytest.mark.parametrize("seed", range(5))
def test_expected_lengths_match_a_loop(seed):
    draw = random.Random(seed)
    finished = [draw.randint(1, 30) for _ in range(20)]
    ages = [draw.randint(0, 40) for _ in range(15)] + [0]
    found = expected_lengths(np.array(ages), np.array(finished), longest=50)
    expected = [expected_by_loop(age, ages, finished, 50) for age in ages]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_running_samples_are_longer_than_their_age():
    """Nine short responses and one that runs: a tenth of the new ones is long, not none."""
    finished = np.array([4] * 9)
    expected = expected_lengths(np.array([4, 0]), finished, longest=100)
    np.testing.assert_allclose(expected, [100, 4 + 0.1 * 96])
    np.testing.assert_allclose(expected_lengths(np.array([0]), np.array([2, 4, 9]), longest=100), [5])
    np.testing.assert_allclose(expected_lengths(np.array([3]), np.array([2, 4, 9]), longest=100), [6.5])


# ---- the load ----------------------------------------------------------------------------------------------


def test_a_fixed_number_is_left_alone():
    admission = admission_of(50)
    requests = requests_of(50)
    admission.begin(requests, max_model_len=1000)
    for request in requests:
        admission.start(request)
    admission.observe(CacheReading(used=0.99, preempted=3), [])
    done = [Generation(sample, [1], [2], [-1.0], "stop") for sample in range(30)]
    admission.observe(CacheReading(used=0.5, preempted=3), done)
    admission.observe(CacheReading(used=None, preempted=4), [])
    assert admission.target == 50
    admission.add_load(sums := Sums(), is_first=True)
    load = {"rollout/concurrent": 40, "rollout/kv_cache_used": 0.99, "rollout/preempted": 4}
    assert sums.reduce(ONE_RANK) == load
    admission.add_load(sums := Sums(), is_first=True)
    assert sums.reduce(ONE_RANK) == {"rollout/preempted": 0}, "the load since the last time"


def test_samples_start_several_at_a_time():
    """All samples are made, with few steps in which some start."""
    engine = ScriptedEngine(answers(mixed), max_num_seqs=64, max_model_len=256, kv_cache_tokens=10**6)
    counts, step = [], engine.step

    def counted_step():
        counts.append(len(engine.submitted) - sum(counts))
        return step()

    engine.step = counted_step
    samples = generate(engine, requests_of(400))
    assert [sample.sample_id for sample in samples] == list(range(400)) and sum(counts) == 400
    assert counts[0] == 64, "at first as many as may run"
    *later, last = [count for count in counts[1:] if count]
    assert min(later) >= 64 // 16 and last > 0


@pytest.mark.parametrize(
    ("limit", "running", "expected"),
    [
        (8, [0, 7, 8, 9], [8, 1, 0, 0]),
        (160, [0, 150, 151, 160], [160, 10, 0, 0]),
    ],
)
def test_so_many_start_that_it_pays(limit, running, expected):
    admission = admission_of(limit)
    assert [max(0, admission.to_start(each)) for each in running] == expected
    assert admission_of(160).to_start(15, most=16) == 1
