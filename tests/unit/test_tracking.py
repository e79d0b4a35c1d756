"""Sinks of metrics: files that survive damage and resuming, the console, TensorBoard, the report."""

import csv
import json
import math
import sys

import pytest

from verl_megatron.observe.pictures import draw_report
from verl_megatron.observe.tracking import MetricsTracker, check_sinks, console_line, read_metrics


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


def assert_two_rows_and_a_new_one(folder, mean):
    """Steps 0 and 1 as they were, then step 2 with this mean reward and a metric that is new."""
    rows = [(row["step"], row["reward/mean"]) for row in read_metrics(folder)]
    assert rows == [(0, 0.0), (1, 1.0), (2, mean)]
    rows = [(row["step"], row["reward/mean"], row["new"]) for row in csv_rows(folder)]
    assert rows == [("0", "0.0", ""), ("1", "1.0", ""), ("2", str(mean), "1.0")]


def test_resuming_drops_later_rows_and_a_cut_line_and_appends(tmp_path):
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=4) as tracker:
        for step in range(4):
            tracker.log(step, {"reward/mean": float(step)})
    for name in ("metrics.jsonl", "metrics.csv"):
        path = tmp_path / name
        path.write_text(path.read_text()[:-3])  # killed while writing
    with MetricsTracker(tmp_path, ["jsonl", "csv"], total_steps=4, first_step=2) as tracker:
        tracker.log(2, {"reward/mean": 20.0, "new": 1.0})
    assert_two_rows_and_a_new_one(tmp_path, 20.0)


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
    assert_two_rows_and_a_new_one(tmp_path, 5.0)


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
