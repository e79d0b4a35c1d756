import math
import re
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.one_rank import ONE_RANK
from tests.worlds import ROOT
from verl_megatron.algorithms.diagnostics import batch_sums
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import RESERVED, Amounts, PhaseTimer, Sums, iteration_metrics, own_metric


def alone(sums: Sums) -> dict[str, float]:
    return sums.reduce(ONE_RANK)


def over_ranks(parts: list[Sums]) -> dict[str, float]:
    """What every rank gets from `reduce`: collectives by hand, names first, then sums and maxima."""
    union = list(dict.fromkeys(name for part in parts for name in [*part._totals, *part._maxima]))
    sent_sums, sent_maxima = [], []
    for part in parts:
        part.reduce(
            SimpleNamespace(
                all_sum=lambda x: sent_sums.append(x) or x,
                all_max=lambda x: sent_maxima.append(x) or x,
                union=lambda names: union,
            )
        )
    total, maximum = sent_sums[0], sent_maxima[0]
    for summands, values in zip(sent_sums[1:], sent_maxima[1:]):
        total, maximum = total + summands, torch.where(values > maximum, values, maximum)  # gloo's maximum
    ranks = SimpleNamespace(all_sum=lambda x: total, all_max=lambda x: maximum, union=lambda names: union)
    results = [part.reduce(ranks) for part in parts]
    assert len(set(map(str, results))) == 1  # as text, in which NaN equals NaN
    return results[0]


def test_sums_divide_global_totals_by_global_counts():
    first, second, third = Sums(), Sums(), Sums()
    first.add("loss", torch.tensor(6.0, requires_grad=True), 3)
    first.add("loss", 2.0, torch.tensor(1))
    first.max("ratio", torch.tensor(1.5))
    second.add("loss", torch.tensor(2.0), 6)
    second.add("only here", 5, 2)
    second.max("ratio", 2.5)
    second.max("ratio", torch.tensor(-1.0))
    second.max("below zero", -3.0)
    # third saw nothing and takes part all the same
    assert over_ranks([first, second, third]) == {
        "loss": 1.0,
        "only here": 2.5,
        "ratio": 2.5,
        "below zero": -3.0,
    }


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_maximum_is_not_a_number_whichever_rank_has_it(rank):
    parts = [Sums(), Sums(), Sums()]
    for number, part in enumerate(parts):
        part.max("gap", math.nan if number == rank else 1.0)
        part.max("length", float(number))
    reduced = over_ranks(parts)
    assert math.isnan(reduced["gap"]) and reduced["length"] == 2.0


def test_sums_merge_like_adding_one_by_one():
    whole, left, right = Sums(), Sums(), Sums()
    for i in range(10):
        for sums in (whole, left if i % 3 else right):
            sums.add("x", torch.tensor(0.1 * i), 2)
            sums.max("top", torch.tensor(float(-i)))
    left.merge(right)
    assert alone(left) == pytest.approx(alone(whole), rel=1e-12)


def test_sums_keep_float64_digits_and_leave_out_empty_means():
    sums = Sums()
    for _ in range(1000):
        sums.add("x", torch.tensor(16777216.0), 1)
        sums.add("x", torch.tensor(1.0), 1)  # lost in float32
    sums.add("nothing", 0.0, 0)
    assert alone(sums) == {"x": (16777216.0 + 1.0) / 2}
    assert alone(Sums()) == {}


def test_sums_show_what_is_not_a_number():
    sums = Sums()
    sums.add("loss", torch.tensor(math.nan), 1)
    sums.max("ratio", torch.tensor(math.nan))
    assert all(math.isnan(value) for value in alone(sums).values()) and len(alone(sums)) == 2


def test_phase_timer_adds_up_and_starts_over():
    waits, entered = [], []

    @contextmanager
    def around(name):
        entered.append(name)
        yield
        assert len(waits) % 2 == 0, "left before the device was done"

    before = time.perf_counter()
    timer = PhaseTimer(synchronize=lambda: waits.append(1), around=around)
    assert timer.pop() == {}
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.02)
        time.sleep(0.03)
    with pytest.raises(RuntimeError), timer.phase("update"):
        raise RuntimeError
    seconds, wall_s = timer.pop(), time.perf_counter() - before
    assert list(seconds) == ["rollout", "update", "other"] and entered == ["rollout", "rollout", "update"]
    assert seconds["rollout"] >= 0.04 and seconds["other"] >= 0.06 and sum(seconds.values()) <= wall_s
    assert len(waits) == 5  # not after a failure: the device may be gone
    assert list(timer.pop()) == ["other"]


def test_memory_is_that_of_phases_since_the_last_iteration():
    timer = PhaseTimer(used_memory=lambda: 7)
    for name in ("validation", "rollout"):
        with timer.phase(name):
            pass
        assert timer.memory_bytes == {name: 7}
        timer.pop()


def test_batch_sums_match_a_loop():
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    logprobs, sampler, reference = (
        torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    batch = RolloutBatch(torch.arange(3), torch.zeros(3, 1), torch.zeros(3, 4), torch.ones(3, 4).bool(), mask)
    batch.rewards, batch.logprobs, batch.rollout_logprobs, batch.ref_logprobs, batch.teacher_logprobs = (
        torch.tensor([1.0, 0.0, 0.5]),
        logprobs,
        sampler,
        reference,
        2 * reference,
    )
    tokens = [(b, t) for b in range(3) for t in range(4) if mask[b, t]]
    gaps = [abs(logprobs[i] - sampler[i]).item() for i in tokens]
    assert alone(batch_sums(batch, kl_estimator="k1")) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/max": 1.0,
            "rollout/response_tokens_mean": 5 / 3,
            "rollout/response_tokens_max": 2.0,
            "rollout/logprob_gap_mean": sum(gaps) / 5,
            "rollout/logprob_gap_max": max(gaps),
            "kl/ref": sum((logprobs[i] - reference[i]).item() for i in tokens) / 3,
            "kl/teacher": sum((logprobs[i] - 2 * reference[i]).item() for i in tokens) / 3,
        }
    )
    assert alone(batch_sums(batch.select(torch.arange(0)), kl_estimator="k1")) == {}


def test_iteration_metrics_have_the_documented_keys():
    seconds = {"rollout": 2.0, "critic_update": 0.5, "actor_update": 1.0, "reshard": 0.25}
    amounts = Amounts(
        tokens=750,
        response_tokens=300,
        gpus=4,
        reshard_bytes=77,
        memory_bytes={"rollout": 2 * 2**20, "actor_update": 3 * 2**20},
    )
    costs = iteration_metrics(seconds, amounts)
    separate = iteration_metrics(seconds, amounts, waited_s=0.75, made_s=2.25)
    assert separate == costs | {
        "rollout/throughput_tokens_per_sec": 300 / 2.25,
        "async/rollout_wait_fraction": 0.25,
        "async/training_wait_fraction": 2.0 / 3.75,
    }
    none_made = iteration_metrics(seconds, amounts, waited_s=0.0, made_s=0.0)  # by the worlds that are left
    assert none_made["rollout/throughput_tokens_per_sec"] == none_made["async/rollout_wait_fraction"] == 0
    assert costs == {
        "rollout/throughput_tokens_per_sec": 150.0,
        "train/throughput_tokens_per_sec_per_gpu": 50.0,
        "train/step_time_ms": 3750.0,
        "memory/actor_gpu_mem_mb": 3.0,
        "memory/rollout_mb": 2.0,
        "memory/actor_update_mb": 3.0,
        "reshard/ms": 250.0,
        "reshard/bytes": 77.0,
        "critic/update_ms": 500.0,
        "time/rollout_s": 2.0,
        "time/critic_update_s": 0.5,
        "time/actor_update_s": 1.0,
        "time/reshard_s": 0.25,
    }


def test_a_reward_s_own_metrics_never_take_the_run_s_names():
    assert own_metric("length") == "reward/length" and own_metric("own_length") == "reward/own_length"
    reserved = {name.removeprefix("reward/") for name in RESERVED}
    own = [*reserved, *(f"own_{name}" for name in reserved), *(f"own_own_{name}" for name in reserved)]
    assert own_metric("mean") == "reward/own_mean" and len(set(map(own_metric, own))) == len(own)
    assert not set(map(own_metric, own)) & set(RESERVED)


def test_every_reward_metric_of_the_run_is_reserved():
    """The code that reports them takes their names from the table."""
    for file in (ROOT / "verl_megatron").rglob("*.py"):
        assert re.findall(r"(?:add|max)\(f?\"reward/\w+|metrics\[\"reward/\w+", file.read_text()) == [], file
