import csv
import json
import math
import re
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.one_rank import ONE_RANK
from tests.worlds import ROOT
from verl_megatron.algorithms.diagnostics import batch_sums
from verl_megatron.data.batch import RolloutBatch
from verl_megatron.observe.metrics import RESERVED, PhaseTimer, Sums, iteration_metrics, own_metric
from verl_megatron.observe.report import draw_report
from verl_megatron.observe.tracking import MetricsTracker, check_sinks, console_line, read_metrics


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
    total, maximum = torch.stack(sent_sums).sum(0), torch.stack(sent_maxima).amax(0)
    ranks = SimpleNamespace(all_sum=lambda x: total, all_max=lambda x: maximum, union=lambda names: union)
    results = [part.reduce(ranks) for part in parts]
    assert all(result == results[0] for result in results)
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

    timer = PhaseTimer(synchronize=lambda: waits.append(1), around=around)
    assert timer.pop() == {}
    begin = time.perf_counter()
    for _ in range(2):
        with timer.phase("rollout"):
            time.sleep(0.02)
        time.sleep(0.03)
    with pytest.raises(RuntimeError), timer.phase("update"):
        raise RuntimeError
    seconds, wall_s = timer.pop(), time.perf_counter() - begin
    assert list(seconds) == ["rollout", "update", "other"] and entered == ["rollout", "rollout", "update"]
    assert 0.04 <= seconds["rollout"] < 1 and seconds["update"] < 0.02 and seconds["other"] >= 0.06
    assert sum(seconds.values()) == pytest.approx(wall_s, abs=0.02)
    assert len(waits) == 5  # not after a failure: the device may be gone
    assert list(timer.pop()) == ["other"]


def test_batch_sums_match_a_loop():
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    logprobs, sampler, reference = (
        torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    batch = RolloutBatch(torch.arange(3), torch.zeros(3, 1), torch.zeros(3, 4), torch.ones(3, 4).bool(), mask)
    batch.rewards, batch.logprobs, batch.rollout_logprobs, batch.ref_logprobs = (
        torch.tensor([1.0, 0.0, 0.5]),
        logprobs,
        sampler,
        reference,
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
        }
    )
    assert alone(batch_sums(batch.select(torch.arange(0)), kl_estimator="k1")) == {}


def test_iteration_metrics_have_the_documented_keys():
    seconds = {"rollout": 2.0, "critic_update": 0.5, "actor_update": 1.0, "reshard": 0.25}
    costs = iteration_metrics(
        seconds,
        response_tokens=300,
        reshard_bytes=77,
        memory_bytes={"rollout": 2 * 2**20, "actor_update": 3 * 2**20},
    )
    assert costs == {
        "rollout/throughput_tokens_per_sec": 150.0,
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


def csv_rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_hold_every_row_and_columns_may_grow(tmp_path):
    with MetricsTracker(tmp_path / "new" / "run", ["jsonl", "csv"], total_steps=3) as tracker:
        tracker.log(0, {"validation/accuracy": 0.25})
        tracker.log(1, {"reward/mean": 0.5, "bad": math.inf})
        tracker.log(2, {"time/x_s": 1.0, "reward/mean": 0.75})
    folder = tmp_path / "new" / "run"
    assert read_metrics(folder) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "bad": None},
        {"step": 2, "time/x_s": 1.0, "reward/mean": 0.75},
    ]
    rows = csv_rows(folder)
    assert list(rows[0]) == ["step", "validation/accuracy", "reward/mean", "bad", "time/x_s"]
    assert [row["reward/mean"] for row in rows] == ["", "0.5", "0.75"] and rows[1]["bad"] == "inf"


def test_resuming_drops_later_rows_and_a_cut_line_and_appends(tmp_path):
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=4) as tracker:
        for step in range(4):
            tracker.log(step, {"reward/mean": float(step)})
    for name in ("metrics.jsonl", "metrics.csv"):
        path = tmp_path / name
        path.write_text(path.read_text()[:-3])  # killed while writing
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=4, first_step=2) as tracker:
        tracker.log(2, {"reward/mean": 20.0, "new": 1.0})
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
    ]
    assert [(row["step"], row["reward/mean"], row["new"]) for row in csv_rows(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "20.0", "1.0"),
    ]


GARBAGE = {
    "metrics.jsonl": [
        b"{}",
        b'{"step": "1"}',
        b'{"step": 1, "x": "text"}',
        b'{"step": 1e3}',
        b"[1]",
        b"\xff\xfe",
        b"\0" * 9,
        b"[" * 100_000,
        b'{"step": -1}',
        b"text",
        b"",
    ],
    "metrics.csv": [
        b"1,2",
        b"one,0.5,,",
        b"\xff,1,2,3",
        b"\0",
        b'"',
        b"",
        b"-1,1,1,1",
        b"1" * 30 + b",1,1,1",
        b"x" * 200_000 + b",,,",
    ],
}


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in GARBAGE.items() for line in lines]
)
def test_lines_that_are_no_rows_are_put_aside_and_the_rows_stay(tmp_path, capsys, name, line):
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=4) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": float(step), "b": 1.0, "c": 2.0})
    path = tmp_path / name
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + b"\n" + b"".join(others))
    spoiled = path.read_bytes()
    if name == "metrics.jsonl":
        with pytest.raises(ValueError, match="has 1 lines that are no rows of metrics"):
            read_metrics(tmp_path)
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=4, first_step=2) as tracker:
        tracker.log(2, {"reward/mean": 5.0, "new": 1.0})
    assert (
        capsys.readouterr().out
        == f"warning: {path} had 1 lines that are no rows of metrics; it is now {path}.damaged\n"
    )
    assert (tmp_path / f"{name}.damaged").read_bytes() == spoiled
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 5.0),
    ]
    assert [(row["step"], row["reward/mean"], row["new"]) for row in csv_rows(tmp_path)] == [
        ("0", "0.0", ""),
        ("1", "1.0", ""),
        ("2", "5.0", "1.0"),
    ]


def test_files_that_are_garbage_from_end_to_end_are_put_aside(tmp_path, capsys):
    for name in ("metrics.jsonl", "metrics.csv"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 40)
        (tmp_path / f"{name}.damaged").write_text("of the last time")
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=1) as tracker:
        tracker.log(0, {"x": 1.0})
    assert read_metrics(tmp_path) == [{"step": 0, "x": 1.0}] and len(csv_rows(tmp_path)) == 1
    assert capsys.readouterr().out.count("it is now") == 2 and (tmp_path / "metrics.csv.damaged2").exists()
    assert (tmp_path / "metrics.csv.damaged").read_text() == "of the last time"


@pytest.mark.parametrize("sink", ["jsonl", "csv"])
def test_a_disk_that_takes_no_rows_is_told_in_a_sentence(tmp_path, sink):
    with MetricsTracker(tmp_path, [sink], total_steps=2) as tracker:
        tracker.log(0, {"x": 1.0})
        path = next(tmp_path.iterdir())
        path.unlink()
        path.symlink_to("/dev/full")
        with pytest.raises(
            ValueError,
            match=rf"{tmp_path} does not take what the run writes \(.*No space left on device.*\); make room",
        ):
            tracker.log(1, {"x": 1.0})


def test_console_prints_one_line_per_iteration_above_the_bar_of_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    metrics = {
        "reward/mean": 0.5,
        "kl/ref": 0.0123,
        "rollout/response_tokens_mean": 12.34,
        "rollout/throughput_tokens_per_sec": 1234.5,
    }
    with MetricsTracker(tmp_path, ["console"], total_steps=8, first_step=3) as tracker:
        tracker.log(3, metrics | {"time/rollout_s": 1.25, "time/actor_update_s": 2.0})
        tracker.log(3, {"validation/accuracy": 0.625})
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if line.strip()]
    assert lines == [
        "step 3/8: reward 0.500, kl 0.0123, length 12.3, rollout at 1,234 tokens/s, 3.2 s (rollout "
        "1.2 actor_update 2.0)",
        "step 3/8: validation accuracy 0.625",
    ]
    assert "| 3/8 [" in printed.err
    assert not list(tmp_path.iterdir())


def test_console_has_no_bar_where_there_is_no_terminal(tmp_path, capsys):
    with MetricsTracker(tmp_path, ["console"], total_steps=8) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    printed = capsys.readouterr()
    assert printed.out == "step 1/8: reward 0.500, 0 s left\n" and not printed.err


def test_console_line_leaves_out_what_was_not_measured():
    assert console_line(1, 2, {"sft/loss": 1.0, "other": 3.0}) == "step 1/2: loss 1.0000"


def test_console_line_says_how_many_rewards_failed():
    assert console_line(1, 2, {"reward/mean": 0.5, "reward/failed": 0.0}) == "step 1/2: reward 0.500"
    assert (
        console_line(1, 2, {"reward/mean": 0.5, "reward/failed": 1 / 64})
        == "step 1/2: reward 0.500, failed rewards 1.6%"
    )


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


def test_tensorboard_holds_the_scalars(tmp_path):
    with MetricsTracker(tmp_path, ["tensorboard"], total_steps=2) as tracker:
        tracker.log(1, {"reward/mean": 0.25})
        tracker.log(2, {"reward/mean": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_unknown_and_missing_sinks_are_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="'paper' is not known; choose among console, jsonl"):
        check_sinks(["jsonl", "paper"])
    monkeypatch.setattr(sys, "path", [])  # no package can be found
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match="'wandb' needs the package wandb; pip install wandb"):
        MetricsTracker(tmp_path, ["wandb"], total_steps=1)


def test_report_draws_a_picture_of_what_there_is(tmp_path):
    rows = [
        {"step": 0, "validation/accuracy": 0.3},
        {
            "step": 1,
            "reward/mean": 0.4,
            "kl/ref": 0.0,
            "policy/approx_kl": 0.1,
            "policy/entropy": 1.0,
            "time/rollout_s": 1.0,
        },
        {"step": 1, "time/validation_s": 1.0, "validation/accuracy": 0.5},
        {
            "step": 2,
            "reward/mean": None,
            "kl/ref": 0.1,
            "policy/approx_kl": 0.1,
            "time/rollout_s": 1.0,
            "time/update_s": 2.0,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = draw_report(tmp_path)
    from matplotlib import pyplot

    image = pyplot.imread(path)
    assert path == tmp_path / "report.png" and min(image.shape[:2]) > 500 and image[..., :3].std() > 0.05
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 2.0}\n')
    draw_report(tmp_path)


def test_report_without_metrics_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match=r"needs jsonl in run\.track_metrics"):
        draw_report(tmp_path)
