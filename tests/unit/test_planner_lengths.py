"""Plans of responses that differ in length, beside simple cases that can be computed by hand."""

import random

import pytest

from tests.planned import H200, arch, run_config
from verl_megatron.commands.plan import command as plan
from verl_megatron.planner.memory import plan_memory
from verl_megatron.planner.planned_run import PlannedRun
from verl_megatron.planner.rollout.decoding import pipeline_of
from verl_megatron.planner.rollout.lengths import Lengths
from verl_megatron.planner.rollout.simulation import Costs, Decoding, pipeline
from verl_megatron.planner.search.choices import configured
from verl_megatron.planner.seconds import TimePlan, plan_seconds

MIXED = "64-512:80,512-4096:20"


def planned(lengths: str | None = None, *, training: int = 4, gpus: int = 6, **settings) -> PlannedRun:
    placed = {"rollout.devices": f"{training}-{gpus - 1}", "rollout.max_tokens": 4096} | settings
    config = configured(run_config(samples=512), placed)
    given = Lengths.parse(lengths) if lengths else None
    return PlannedRun.of(config, world_size=training, read=arch, lengths=given)


def seconds_of(run: PlannedRun) -> TimePlan:
    return plan_seconds(run, H200, plan_memory(run, H200))


@pytest.mark.parametrize("text", ["64-2048", "512", MIXED, "8:1,16:2,100-200:1"])
def test_a_distribution_has_the_moments_and_quantiles_of_its_draws(text):
    lengths, draw = Lengths.parse(text), random.Random(1)
    drawn = []
    for _ in range(20_000):
        (part,) = draw.choices(lengths.ranges, weights=[each.share for each in lengths.ranges])
        drawn.append(draw.uniform(part.least, part.most))
    assert lengths.mean == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert lengths.mean_square == pytest.approx(sum(x * x for x in drawn) / len(drawn), rel=0.03)
    assert lengths.quantile(0.5) == pytest.approx(sorted(drawn)[len(drawn) // 2], rel=0.05, abs=1)
    assert lengths.quantile(1.0) == lengths.longest == lengths.ranges[-1].most
    samples = lengths.samples(200, of=1600)
    assert sum(samples) / 200 == pytest.approx(lengths.mean, rel=0.02)
    assert max(samples) == lengths.quantile(1599.5 / 1600), "the replica with the longest of all samples"


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "5-", "-5", "9-8", "1-9,5-20", "a", "1,,2", "9" * 50, "1.5"),
        *("1:0", "1:0.0", "1:-1", "1:", "1:.", "1:1e", "1:1e999", "1:nan", "1:inf", "1:0x1", "1:1.2.3"),
    ],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match="--lengths") as refused:
        Lengths.parse(text)
    assert "write" in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["8:0.8,16-32:0.2", "8:8,16-32:2.", "8:.4,16-32:.1", "8:4e-2,16-32:1E-2"])
def test_only_the_ratios_of_weights_count(text):
    assert [each.share for each in Lengths.parse(text).ranges] == pytest.approx([0.8, 0.2])


def drained(lengths, at_once, step_s, **costs) -> float:
    decoding = Decoding(Costs(step_s=step_s, **costs), at_once=at_once, prompt_tokens=5)
    decoding.release(0, lengths)
    decoding.advance()
    return decoding.now


@pytest.mark.parametrize(
    ("lengths", "at_once", "seconds"),
    [
        ([10, 30], 2, 10 * 2 + 20 * 1),  # the long one goes on alone
        ([10, 30], 1, 40),
        ([30, 10, 10], 2, 10 * 2 + 10 * 2 + 10 * 1),  # the third takes the place of the second
        ([20] * 5, 2, 20 * 2 + 20 * 2 + 20 * 1),
        ([], 3, 0),
    ],
)
def test_a_replica_takes_steps_until_its_last_sample_has_ended(lengths, at_once, seconds):
    assert drained(lengths, at_once, lambda running, _: running) == seconds


def test_the_cache_has_the_tokens_of_those_that_run():
    # 10 steps of two samples with 5 to 15 tokens, then 20 of one with 15 to 35
    assert drained([10, 30], 2, lambda _, cached: cached) == 10 * 2 * 10 + 20 * 25
    # the second sample begins when the first has ended, with its prompt alone
    assert drained([10, 30], 1, lambda _, cached: cached) == 10 * 10 + 30 * 20


def test_a_single_length_is_the_plan_without_a_distribution():
    for settings in ({}, {"async.max_staleness": 2, "async.buffer": "window", "async.partial": "pause"}):
        one, other = (seconds_of(planned(lengths, **settings)) for lengths in (None, "4096"))
        assert one.seconds == pytest.approx(other.seconds) and one.flops == pytest.approx(other.flops)


def test_memory_is_that_of_the_longest_and_seconds_are_those_of_the_mean():
    mixed, longest = planned(MIXED), planned()
    assert plan_memory(mixed, H200).kinds == plan_memory(longest, H200).kinds
    mean = 0.8 * (64 + 512) / 2 + 0.2 * (512 + 4096) / 2
    assert mixed.response_tokens == pytest.approx(mean)
    tokens = [seconds_of(run).seconds["actor_update"] / run.packed_tokens for run in (mixed, longest)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.15), "but for the shorter attention and the optimizer"


def test_stragglers_are_waited_for():
    """One long response of many costs nearly as much as if it ran with no others."""
    few = {"data.prompts_per_iteration": 4}
    mixed, short, alone = (
        seconds_of(planned(text, **settings)).seconds["rollout"]
        for text, settings in (("256:99,4096:1", {}), ("256", {}), ("4096", few))
    )
    assert alone < mixed < alone + short
    assert alone > 1.5 * short, "its steps are fast, but many"


def test_starts_cost_and_come_several_at_a_time():
    def started(lengths, at_once):
        starts = []

        def start_s(count, running, cached):
            starts.append((count, running, cached))
            return 100 * count

        return starts, drained(lengths, at_once, lambda running, _: 1, start_s=start_s)

    assert started([10] * 3, 2) == ([(2, 2, 10), (1, 1, 5)], 20 + 300)
    # of 32 places a single free one waits for another
    starts, seconds = started([10, 20, *[30] * 30, 7, 7], 32)
    assert [count for count, *_ in starts] == [32, 2] and seconds == 30 + 3400


def test_both_sides_share_an_iteration_as_staleness_allows():
    def iteration(rollout: float, training: float, staleness: int) -> float:
        return TimePlan({"rollout": rollout, "actor_update": training}, {}, 8, 1e15, staleness).iteration

    assert iteration(30, 20, 0) == 50  # in turns
    assert iteration(30, 20, 1) == iteration(30, 20, 4) == 30  # the slower one
    assert iteration(10, 20, 1) == 20


def simulated(lengths, training, *, staleness, interval=1, at_once=100, samples_per_prompt=1):
    """Each step takes a second."""
    costs = Costs(step_s=lambda *_: 1.0)
    decoding = Decoding(costs, at_once=at_once, prompt_tokens=1, samples_per_prompt=samples_per_prompt)
    versions = []
    found = pipeline(
        decoding,
        lengths,
        training_s=training,
        staleness=staleness,
        interval=interval,
        on_version=lambda _: versions.append(1),
    )
    assert found.busy <= found.seconds and len(versions) == 4 * (staleness + 1)
    return found


@pytest.mark.parametrize(
    ("lengths", "training", "staleness", "interval", "seconds"),
    [
        ([10, 60], 20, 1, 1, (60 + 20) / 2),  # the long response may take one iteration and a wait
        ([10, 60], 20, 4, 1, 20),  # or four
        ([10, 10], 20, 1, 1, 20),
        ([10, 60], 20, 0, 1, 80),  # in turns
        ([10, 60], 10, 0, 2, (60 + 10) / 2),  # the short one is trained on while the long one runs
        ([10, 30], 10, 1, 2, 10),
    ],
)
def test_a_long_response_may_take_several_iterations(lengths, training, staleness, interval, seconds):
    found = simulated(lengths, training, staleness=staleness, interval=interval)
    assert found.seconds == pytest.approx(seconds)


def test_a_group_is_complete_with_its_last_sample():
    assert simulated([10, 60, 10, 10], 5, staleness=0, interval=2, samples_per_prompt=2).seconds == 65 / 2
    assert simulated([10, 60, 10, 60], 5, staleness=0, interval=2, samples_per_prompt=2).seconds == 70 / 2


def test_a_replica_without_room_for_all_is_busy_all_the_time():
    found = simulated([10] * 5, 20, staleness=2, at_once=1)
    assert found.seconds == found.busy == 50


def test_a_window_gains_where_lengths_differ():
    window = {"async.buffer": "window", "async.partial": "pause"}
    slow = {"async.max_staleness": 2, "rollout.max_num_seqs": 32}  # the rollout is the slower side
    in_order = seconds_of(planned(MIXED, **slow))
    streamed = seconds_of(planned(MIXED, **slow, **window))
    assert streamed.seconds["rollout"] < in_order.seconds["rollout"] > in_order.training
    assert streamed.iteration < in_order.iteration
    finishing = seconds_of(planned(MIXED, **slow, **window | {"async.partial": "finish"}))
    assert finishing.iteration == pytest.approx(in_order.iteration), "no sample starts before all have ended"
    again = planned(MIXED, **{"async.max_staleness": 2}, **window | {"async.partial": "continue"})
    pause = planned(MIXED, **{"async.max_staleness": 2}, **window)
    recomputed = [pipeline_of(run, H200, 60e9, training_s=10.0).busy for run in (again, pause)]
    assert recomputed[0] > recomputed[1], "new weights compute the caches again"


def test_several_rollout_worlds_are_planned_like_one_of_all_their_ranks():
    one, two = (planned(MIXED, gpus=8, **{"rollout.devices": text}) for text in ("4-7", "4-5+6-7"))
    assert (one.gpus, one.replicas) == (two.gpus, two.replicas) == (8, 2)
    assert plan_memory(one, H200) == plan_memory(two, H200)
    assert seconds_of(one).seconds == seconds_of(two).seconds


def test_the_command_takes_lengths(capsys):
    command = ["--model", "llama3-8b", "--gpus", "4", "--best", "1", "--algorithm", "grpo", "--separate"]
    assert plan.run([*command, "--lengths", "64-512:80,512-2048:20", "async.max_staleness=2"]) == 0
    text = capsys.readouterr().out
    assert "rollout.max_tokens=2048" in text and "GPUs: those that train" in text
    with pytest.raises(SystemExit):
        plan.run([*command, "--lengths", "64-2048", "--response", "512"])
    assert "leave it out, or make it as large" in capsys.readouterr().err
