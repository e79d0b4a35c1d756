"""Sampler with a scripted engine: numbering, seeds, turns, dropped groups, and residency."""

from collections import Counter

import pytest
import torch

from parallel.reshard.execute import ReshardReport
from tests.scripted_engine import RecordedSleeper, ScriptedEngine
from verl_megatron.data.prompts import GivenPrompts, Prompt
from verl_megatron.observe.metrics import Sums
from verl_megatron.residency import Residency
from verl_megatron.rewards.pool import Reward
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
        self.failures, self.metric_names = Counter(), set()

    def submit(self, sample_id, prompt, response, answer, extra):
        self.samples[sample_id] = Reward(score=float(answer) + len(response) / 100)

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


def test_groups_that_are_not_kept_are_replaced_and_numbers_stay_dense():
    sampler, source = sampler_of(ScriptedEngine(lengths), FirstToken()), Endless()
    draw = Draw(num_prompts=4, samples_per_prompt=2, sampling=Sampling(max_tokens=5))
    asked = []

    def keep_odd(scores):
        asked.append(scores)
        return int(scores[0]) % 2 == 1

    batch = sampler.collect(source, draw, iteration=1, version=0, keep_group=keep_odd)
    assert batch.sample_id.tolist() == list(range(8)) and batch.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.input_ids[:, 0].tolist() == [2, 2, 4, 4, 6, 6, 8, 8], "prompts 1, 3, 5 and 7"
    assert sampler.score(batch, Sums()).int().tolist() == [1, 1, 3, 3, 5, 5, 7, 7]
    assert source.drawn == 4 + 2 + 1 + 1 and all(len(scores) == 2 for scores in asked)


def test_rounds_are_bounded_and_a_batch_may_be_smaller():
    sampler = sampler_of(ScriptedEngine(lengths), FirstToken())
    draw = Draw(num_prompts=4, samples_per_prompt=2, sampling=Sampling(max_tokens=5), max_rounds=2)
    batch = sampler.collect(Endless(), draw, iteration=1, version=0, keep_group=lambda scores: scores[0] >= 3)
    assert batch.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and sampler.score(
        batch, Sums()
    ).int().tolist() == [3, 3, 4, 4, 5, 5, 6, 6]
    batch = sampler.collect(
        Endless(), draw, iteration=2, version=0, keep_group=lambda scores: int(scores[0]) == 1
    )
    assert batch.sample_id.tolist() == [0, 1]


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


# ---- residency -------------------------------------------------------------------------------------------


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
