"""Sampler with a scripted engine: numbering, seeds, turns, dropped groups, and residency."""

import pytest
import torch

from parallel.reshard.execute import ReshardReport
from parallel.runtime.refusal import RefusalError
from tests.one_rank import ONE_RANK
from tests.scripted_engine import RecordedSleeper, ScriptedEngine
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.observe.metrics import Sums
from verl_megatron.residency import Residency
from verl_megatron.rewards.pool import Failure, Reward
from verl_megatron.rewards.shaping import has_variance, take_baselines
from verl_megatron.rollout.dispatch import generate
from verl_megatron.rollout.sampler import Draw, Sampler
from verl_megatron.rollout.sampling import Generation, Request, Sampling, sample_seed
from verl_megatron.rollout.weights import ColocatedChannel


class Characters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


class FirstToken:
    """A reward pool that scores a response by its length and the ground truth."""

    def __init__(self):
        self.samples, self.examples, self.total_ms, self.calls = {}, {}, 0.0, 0
        self.failed, self.first_failure, self.metric_names = 0, None, set()

    def forget(self):
        self.samples = {}

    def submit(self, sample_id, prompt, response, answer, extra, messages=None):
        assert sample_id not in self.samples, "as the real pool does"
        self.samples[sample_id] = Reward(score=float(answer) + len(response) / 100)

    def show_new_failures(self):
        pass

    def results(self, *, progress=lambda: None):
        found, self.samples, self.calls = self.samples, {}, len(self.samples)
        return found


class Endless:
    """Prompts 1, 2, 3, ... whose ground truth is their number."""

    def __init__(self):
        self.drawn = 0

    def draw(self, count):
        self.drawn += count
        return [prompt_of(i) for i in range(self.drawn - count, self.drawn)]


def prompt_of(number):
    return Prompt(prompt_token_ids=[1 + number, 2], text=f"prompt {number}", answer=number)


def sampler_of(engine, pool=None):
    return Sampler(engine, tokenizer=Characters(), pool=pool, seed=3)


def lengths(request):
    return [10 + request.sample_id] * (1 + request.sample_id % 3)


def test_samples_are_numbered_prompt_by_prompt_and_scored():
    engine, draw = (
        ScriptedEngine(lengths),
        Draw(num_prompts=3, samples_per_prompt=2, sampling=Sampling(max_tokens=5)),
    )
    sampler = sampler_of(engine, FirstToken())
    batch = sampler.collect(Endless(), draw, iteration=4, version=3)
    assert batch.sample_id.tolist() == list(range(6)) and batch.group_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.policy_version.tolist() == [3] * 6
    assert batch.response_mask.sum(1).tolist() == [1, 2, 3, 1, 2, 3]
    assert [request.seed for request in engine.submitted] == [sample_seed(3, 4, i) for i in range(6)]
    assert engine.most_running == 4, "the engine is kept full, and not fuller"
    torch.testing.assert_close(
        sampler.score(batch, Sums()), torch.tensor([0.01, 0.02, 1.03, 1.01, 2.02, 2.03])
    )


# ---- dynamic sampling and greedy samples ----------------------------------------------------------


def odd_vary(request):
    """Responses of 10 + prompt number; lengths vary within groups of odd numbers only, greedy ones have 7."""
    number = request.prompt_token_ids[0] - 1
    further = 6 if request.sampling.greedy else request.sample_id % 2
    return [10 + number] * (1 + number % 2 * further)


def draw_of(num_prompts, **options):
    return Draw(num_prompts=num_prompts, samples_per_prompt=2, sampling=Sampling(max_tokens=9), **options)


def collect_varied(sampler, source, draw, *, iteration=1):
    """Collect with dynamic sampling and check the numbering; the prompts' numbers, the batch, the metrics."""
    batch = sampler.collect(source, draw, iteration=iteration, version=0, keep_group=has_variance)
    size = draw.samples_per_prompt + draw.with_greedy
    assert batch.sample_id.tolist() == list(range(draw.num_prompts * size))
    assert torch.equal(batch.group_id, batch.sample_id // size)
    batch.rewards = sampler.score(batch, sums := Sums())
    prompts = (batch.input_ids[::size, 0] - 1).tolist()
    assert torch.equal(batch.generated_ids[:, 2] - 10, batch.input_ids[:, 0] - 1), (
        "responses follow their prompts"
    )
    expected_B = batch.input_ids[:, 0] - 1 + batch.response_mask.sum(1) / 100
    torch.testing.assert_close(batch.rewards, expected_B)  # rewards follow their samples
    return prompts, batch, sums.reduce(ONE_RANK)


def test_prompts_without_variance_are_replaced_by_further_ones():
    engine, source = ScriptedEngine(odd_vary), Endless()
    sampler = sampler_of(engine, FirstToken())
    prompts, batch, metrics = collect_varied(sampler, source, draw_of(4))
    assert prompts == [1, 3, 5, 7] and source.drawn == 4 + 2 + 1 + 1
    made = sum(len(odd_vary(request)) for request in engine.submitted)
    assert (sampler.num_dropped, sampler.dropped_tokens) == (8, made - int(batch.response_mask.sum()))
    assert metrics["rollout/groups_sampled"] == 8 and metrics["rollout/groups_without_variance"] == 4
    seeds = [request.seed for request in engine.submitted]
    assert seeds == [sample_seed(3, 1, i) for i in range(16)], (
        "also the samples of later rounds have their own"
    )


def test_missing_prompts_are_filled_with_the_last_ones_without_variance():
    sampler, source = sampler_of(ScriptedEngine(odd_vary), FirstToken()), Endless()
    prompts, _, metrics = collect_varied(sampler, source, draw_of(4, max_rounds=2))
    assert prompts == [1, 3, 4, 5] and source.drawn == 6
    assert metrics["rollout/groups_sampled"] == 6 and metrics["rollout/groups_without_variance"] == 3
    prompts, _, _ = collect_varied(sampler, source, draw_of(3, max_rounds=1), iteration=2)
    assert prompts == [6, 7, 8], "the source goes on: no prompt is left out, and none comes twice"
    batch = sampler.collect(source, draw_of(2), iteration=3, version=0)
    sampler.score(batch, sums := Sums())
    assert "rollout/groups_sampled" not in sums.reduce(ONE_RANK), "every prompt is kept"


def test_nothing_is_drawn_beyond_a_full_batch():
    source = GivenPrompts([prompt_of(number) for number in (1, 3, 5)])
    prompts, _, metrics = collect_varied(
        sampler_of(ScriptedEngine(odd_vary), FirstToken()), source, draw_of(3)
    )
    assert prompts == [1, 3, 5] and metrics["rollout/groups_without_variance"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_last_sample_of_each_prompt_is_greedy_and_its_score_the_baseline(dynamic):
    engine, draw = ScriptedEngine(odd_vary), draw_of(3, with_greedy=True)
    sampler = sampler_of(engine, FirstToken())
    if dynamic:
        prompts, batch, _ = collect_varied(sampler, Endless(), draw)
    else:
        batch = sampler.collect(Endless(), draw, iteration=1, version=0)
        batch.rewards, prompts = sampler.score(batch, Sums()), [0, 1, 2]
    temperatures = [request.sampling.temperature for request in engine.submitted]
    assert temperatures == [1.0, 1.0, 0.0] * (len(temperatures) // 3)
    greedy_lengths = [1 + number % 2 * 6 for number in prompts]
    assert batch.response_mask.sum(1)[2::3].tolist() == greedy_lengths
    assert prompts == ([1, 3, 5] if dynamic else [0, 1, 2])
    part = take_baselines(batch, Sums(), num_groups=3, all_sum=lambda x: x)
    assert part.sample_id.tolist() == list(range(6)) and part.group_id.tolist() == [0, 0, 1, 1, 2, 2]
    expected = [number + length / 100 for number, length in zip(prompts, greedy_lengths)]
    assert part.baselines.tolist() == pytest.approx([score for score in expected for _ in range(2)])
    assert part.response_mask.sum(1).max() < 7, "no greedy sample is trained on"


# ---- turns ----------------------------------------------------------


def test_a_turn_goes_on_after_a_tools_answer_which_is_not_the_models():
    engine = ScriptedEngine(lambda request: [7] * (3 if len(request.prompt_token_ids) == 2 else 2))

    def tool(so_far):
        return [50, 51] if so_far.is_sampled is None else None

    draw = Draw(num_prompts=1, samples_per_prompt=2, sampling=Sampling(max_tokens=9))
    batch = sampler_of(engine).collect(
        GivenPrompts([prompt_of(0)]), draw, iteration=1, version=0, continue_turn=tool
    )
    assert batch.generated_ids.tolist() == [[1, 2, 7, 7, 7, 50, 51, 7, 7]] * 2
    assert batch.response_mask.tolist() == [[False] * 2 + [True] * 3 + [False] * 2 + [True] * 2] * 2
    assert (
        batch.attention_mask.all()
        and batch.rollout_logprobs[0].tolist() == [0.0] * 2 + [-1.0] * 3 + [0.0] * 2 + [-1.0] * 2
    )
    assert (
        engine.submitted[-1].prompt_token_ids == [1, 2, 7, 7, 7, 50, 51]
        and engine.submitted[-1].sampling.max_tokens == 4
    )
    assert len({request.seed for request in engine.submitted}) == 4, "each turn has a seed of its own"
    assert {request.cache_salt for request in engine.submitted} == {"0"}, "a cache of this version alone"


def test_a_tools_answer_that_leaves_no_room_ends_the_sample():
    samples = generate(
        ScriptedEngine(lambda request: [7] * 3),
        [Request(0, [1], 0, Sampling(max_tokens=5))],
        continue_turn=lambda _: [50, 51],
    )
    assert samples == [Generation(0, [1], [7] * 3, [-1.0] * 3, "stop")]


def test_what_was_generated_before_an_abort_is_there():
    engine = ScriptedEngine(lambda request: [7] * 5)
    with engine.session():
        engine.submit(Request(0, [1], 0))
        engine.step()
        (partial,) = engine.abort([0])
    assert partial.token_ids == [7] and partial.finish_reason == "abort"


# ---- residency ----------------------------------------------------------


class Recorded(RecordedSleeper):
    """A model, a weight sync and an engine whose calls are written down in one list."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def offload_async(self, what):
        self.calls.append(f"{self.name} off {what}")

    def wait_offload(self, *, for_others=True):
        self.calls.append(f"{self.name} wait")

    def onload_async(self):
        self.calls.append(f"{self.name} on")

    def run(self, meanwhile):
        self.calls.append("weights")
        meanwhile()
        return ReshardReport(bytes_local=5)

    def restore(self):
        self.calls.append("restore")
        return False


@pytest.mark.parametrize("sleeps", [True, False])
def test_engine_and_models_take_turns(sleeps):
    calls = []
    actor, critic = Recorded(calls, "actor"), Recorded(calls, "critic")
    residency = Residency(
        Recorded(calls, "engine"), Recorded(calls, "sync"), [actor, critic], offload="all", sleeps=sleeps
    )
    channel = ColocatedChannel(residency)
    assert channel.adopt() == 0 and channel.report.bytes_local == 5
    assert calls == [
        "actor off all",
        "critic off all",
        "wake weights",
        "weights",
        "actor wait",
        "critic wait",
        "wake kv_cache",
    ]
    calls.clear()
    assert channel.adopt() == 0 and calls == [] and channel.report.bytes_local == 0, (
        "the engine has these weights"
    )
    residency.enter_training(critic)
    assert calls == ["restore", *["sleep"] * sleeps, "actor off all", "actor wait", "critic on"]
    calls.clear()
    residency.enter_training(actor)
    assert calls == ["critic off all", "critic wait", "actor on"], "the engine is left once"
    calls.clear()
    channel.publish(1)
    assert calls == ["actor off all", "critic off all"] and channel.adopt() == 1 and "weights" in calls
    residency.enter_training()
    calls.clear()
    assert channel.adopt() == 1 and ("weights" in calls) == sleeps, (
        "who slept has to be given its weights again"
    )


class Failing(FirstToken):
    """A pool whose function fails on prompts of some numbers."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.outcomes = fails, []

    def submit(self, sample_id, prompt, response, answer, extra, messages=None):
        super().submit(sample_id, prompt, response, answer, extra, messages)
        self.outcomes.append(self.fails(answer))

    def results(self, *, progress=lambda: None):
        self.failed, self.outcomes = sum(self.outcomes), []
        failure = Failure(kind="error", error="E", sample_id=0, prompt="p", response="r")
        self.first_failure = failure if self.failed else None
        return super().results(progress=progress)

    def complaint(self, failed, calls, first):
        return f"failed on all {calls}: {first.error}" if failed == calls else ""


def test_a_round_of_failures_is_replaced_like_any_other():
    """Only a collection of which every call failed teaches nothing."""
    draw = Draw(num_prompts=2, samples_per_prompt=2, sampling=Sampling(max_tokens=5), max_rounds=3)

    def collect(fails):
        sampler = sampler_of(ScriptedEngine(lengths), Failing(fails))
        batch = sampler.collect(
            Endless(), draw, iteration=1, version=0, keep_group=lambda scores: int(scores[0]) != 1
        )
        sampler.score(batch, Sums())
        return sampler, batch

    sampler, batch = collect(lambda number: number == 2)
    assert len(batch) == 4 and sampler._failed == 2
    with pytest.raises(RefusalError, match="failed on all 4: E"):
        collect(lambda number: True)


def test_a_collection_after_an_interrupted_one_begins_anew():
    pool, draw = FirstToken(), Draw(num_prompts=1, samples_per_prompt=2, sampling=Sampling(max_tokens=5))
    pool.submit(0, "left over", "", 9, {})
    sampler = sampler_of(ScriptedEngine(lengths), pool)
    batch = sampler.collect(Endless(), draw, iteration=1, version=0)
    assert sampler.score(batch, Sums()).int().tolist() == [0, 0]


def test_a_quota_drops_surplus_prompts():
    sampler = sampler_of(ScriptedEngine(lengths), FirstToken())
    draw = Draw(num_prompts=6, samples_per_prompt=2, sampling=Sampling(max_tokens=5), quota=3)
    batch = sampler.collect(Endless(), draw, iteration=1, version=0, keep_group=lambda scores: scores[0] >= 2)
    assert batch.group_id.tolist() == [0, 0, 1, 1, 2, 2]
    assert sampler.score(batch, Sums()).int().tolist() == [2, 2, 3, 3, 4, 4]
