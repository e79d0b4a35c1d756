"""Continuous generation by a scripted engine: order, groups, and new weights in each of the three ways."""

import pytest

from tests.planned import arch, run_config
from tests.scripted_engine import ScriptedEngine
from verl_megatron.checks.rollout import check_rollout
from verl_megatron.rollout.sampling import Request, Sampling
from verl_megatron.rollout.stream import Group, GroupStream

LENGTHS = {0: 2, 1: 5, 2: 3, 3: 1, 4: 4, 5: 6}


def answer(request):
    """Tokens that count on from the prompt's last one, to the sample's length in all."""
    begun = len(request.prompt_token_ids) - 1
    return list(range(10 + begun, 10 + LENGTHS[request.sample_id]))


def group_of(number):
    ids = (2 * number, 2 * number + 1)
    return Group(
        number=number, requests=[Request(i, [9], seed=i, sampling=Sampling(max_tokens=9)) for i in ids]
    )


def stream_of(partial, *, limit=4, version=7):
    engine, scored = ScriptedEngine(answer, max_num_seqs=limit), []
    return GroupStream(engine, partial=partial, version=version, on_finish=scored.append), engine, scored


def drained(stream, steps=40):
    found = []
    for _ in range(steps):
        found += stream.step()
    assert not stream.num_running and not stream.num_waiting
    return found


@pytest.mark.parametrize("partial", ["finish", "continue", "pause"])
def test_groups_end_when_all_their_samples_have(partial):
    stream, engine, scored = stream_of(partial, limit=3)
    for number in range(3):
        stream.add(group_of(number))
    found = drained(stream)
    assert [group.number for group in found] == [1, 0, 2] and engine.most_running == 3
    for group in found:
        assert [len(sample.token_ids) for sample in group.samples] == [
            LENGTHS[2 * group.number],
            LENGTHS[2 * group.number + 1],
        ]
        assert all(set(versions) == {7} for versions in group.versions)
    assert sorted(sample.sample_id for sample in scored) == list(range(6))


def changed(partial, *, after, limit=4):
    """A stream of all groups whose weights change after so many steps; and how many steps that took."""
    stream, engine, scored = stream_of(partial, limit=limit)
    for number in range(3):
        stream.add(group_of(number))
    found, waited = [], 0
    for _ in range(after):
        found += stream.step()
    while not stream.begin_change():
        found += stream.step()
        waited += 1
    stream.end_change(8)
    return stream, engine, scored, found + drained(stream), waited


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("limit", [2, 6])
@pytest.mark.parametrize("partial", ["finish", "continue", "pause"])
def test_tokens_are_the_same_and_know_their_version(partial, after, limit):
    stream, engine, scored, found, waited = changed(partial, after=after, limit=limit)
    assert sorted(group.number for group in found) == [0, 1, 2]
    samples = {sample.sample_id: sample for group in found for sample in group.samples}
    versions = {
        sample.sample_id: own for group in found for sample, own in zip(group.samples, group.versions)
    }
    for i, length in LENGTHS.items():
        assert samples[i].token_ids == list(range(10, 10 + length)) and samples[i].is_sampled is None
        assert list(samples[i].prompt_token_ids) == [9] and len(samples[i].logprobs) == length
        assert len(versions[i]) == length and versions[i] == sorted(versions[i])
    mixed = sorted(i for i, own in versions.items() if len(set(own)) == 2)
    assert len(scored) == 6 and stream.num_interrupted >= len(mixed)
    if partial != "continue":
        assert not stream.aborted_tokens
    elif limit == 6:
        assert stream.aborted_tokens == after * len(mixed)
    if partial == "finish":
        assert not mixed and not stream.num_interrupted
    elif limit == 6 and 1 <= after <= 5:
        assert mixed == [i for i, length in LENGTHS.items() if length > after]
        assert all(own.count(7) == after for i, own in versions.items() if i in mixed)
    assert (waited > 0) <= (partial == "finish")


def test_the_cache_knows_its_version():
    for partial, resets in (("finish", 1), ("continue", 1), ("pause", 0)):
        _, engine, *_ = changed(partial, after=2, limit=2)
        assert engine.calls.count("reset_cache") == resets
        salts = [request.cache_salt for request in engine.submitted]
        assert set(salts) == {"7", "8"}


def test_what_goes_on_has_what_is_left_of_its_limits_and_another_seed():
    stream, engine, _, _, _ = changed("continue", after=2)
    first, second = (request for request in engine.submitted if request.sample_id == 1)
    assert second.sampling.max_tokens == first.sampling.max_tokens - 2 and second.seed != first.seed
    assert list(second.prompt_token_ids) == [9, 10, 11]


def test_nothing_starts_without_weights():
    stream, engine, _ = stream_of("finish", version=None)
    stream.add(group_of(0))
    assert stream.step() == [] and not engine.submitted and stream.begin_change()
    stream.end_change(1)
    assert [group.number for group in drained(stream)] == [0]


@pytest.mark.parametrize(("partial", "refused"), [("continue", True), ("pause", False), ("finish", False)])
def test_a_stop_string_is_not_split_by_new_weights(partial, refused):
    config = run_config("tp1", rollout=1)
    config.rollout.devices, config.rollout.stop = "1", ["##"]
    config.async_.buffer, config.async_.partial, config.async_.max_staleness = "window", partial, 1
    problems = check_rollout(config, arch("llama3-8b"), 1)
    found = [problem for problem in problems if "rollout.stop=['##']: a stop string" in problem]
    assert bool(found) == refused
