"""Alarms of a report: planted illnesses are found by name and nothing else is; healthy runs have none."""

import json
import os
import random
import re
import time

import pytest

from tests.documents import PAGES, text_of
from tests.reported_runs import (
    ILLNESSES,
    SEPARATE_ILLNESSES,
    healthy_rows,
    plant_stall,
    separate_rows,
    starts_of,
    write_run,
)
from tests.unit.test_documents import KNOWN, NAMED
from verl_megatron.observe.report import history
from verl_megatron.observe.report.alarms import ENDS, find_alarms
from verl_megatron.observe.report.record import RunRecord, State, read_run, series_of
from verl_megatron.observe.report.rules import Alarm

AT_STALENESS_1 = {"async.max_staleness": "1"}


def run_of(rows, settings=AT_STALENESS_1, **state) -> RunRecord:
    return RunRecord(name="run", series=series_of(rows), settings=settings, state=State(**state))


def names_of(rows, **state) -> set[str]:
    return {alarm.name for alarm in find_alarms(run_of(rows, **state))}


@pytest.mark.parametrize("iterations", [1, 3, 25, 120, 500])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rows_of", [healthy_rows, separate_rows])
def test_a_healthy_run_has_no_alarm(rows_of, iterations, seed):
    assert names_of(rows_of(iterations, seed=seed), silent_s=20.0, at_work=True) == set()


PLANTED = [
    *((name, healthy_rows) for name in ILLNESSES),
    *((name, separate_rows) for name in SEPARATE_ILLNESSES),
]


def planted(name, rows_of) -> list[dict]:
    """Rows of a run with an illness."""
    rows = rows_of(500)
    (ILLNESSES | SEPARATE_ILLNESSES)[name](rows)
    return rows


def is_ill(row, was) -> bool:
    return row != was and row.get("policy/reuse_error") != 1e-6


@pytest.mark.parametrize(("name", "rows_of"), PLANTED)
def test_an_illness_is_found_by_its_name_and_nothing_else_is(name, rows_of):
    rows = planted(name, rows_of)
    changed = [row["step"] for row, was in zip(rows, rows_of(500)) if is_ill(row, was)]
    (alarm,) = find_alarms(run_of(rows))
    assert alarm.name == name and alarm.text and alarm.remedy and alarm.metric
    # a rolling median sees an illness some points after it began
    assert changed[0] <= alarm.first <= changed[0] + 25 or name == "memory growth"
    assert changed[0] <= alarm.last <= changed[-1]
    assert alarm.is_over == (changed[-1] < 495)


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": step, "sft/loss": 2.0 - 0.01 * step + 0.02 * (step % 3)} for step in range(100)],
        [{"step": 0}, {"step": 1, "dpo/loss": 0.69}],
        [],
    ],
)
def test_supervised_and_empty_runs_have_no_alarm(rows):
    assert names_of(rows) == set()


def test_a_loss_that_leaps_and_a_validation_loss_that_rises_are_found():
    rng = random.Random(1)
    rows = [{"step": step, "sft/loss": 1.5 + 0.1 * rng.random()} for step in range(100)]
    rows[60]["sft/loss"] = 9.0
    for place, step in enumerate(range(0, 100, 10)):
        rows[step]["validation/loss"] = 1.5 - 0.1 * min(place, 4) + 0.1 * max(place - 4, 0)
    assert names_of(rows) == {"loss off its history", "validation loss rising"}


def test_a_stall_is_told_by_stacks_by_a_dead_process_and_by_silence(tmp_path):
    folder = write_run(tmp_path / "run", healthy_rows(30))
    assert find_alarms(read_run(folder)) == []
    plant_stall(folder)
    (alarm,) = find_alarms(read_run(folder))
    assert alarm.name == "stalled" and "ranks 0, 1" in alarm.text and alarm.first == 30 and not alarm.is_over
    os.utime(folder / "metrics.jsonl")  # the run went on
    (alarm,) = find_alarms(read_run(folder))
    assert alarm.name == "stalled" and alarm.is_over and alarm.first is None
    assert names_of(healthy_rows(30), was_killed=True) == {"killed"}
    assert names_of(healthy_rows(30), at_work=True, silent_s=301.0) == {"stalled"}
    assert names_of([], at_work=True, silent_s=601.0) == {"stalled"}


def test_the_lock_tells_a_run_at_work_from_a_killed_one(tmp_path):
    folder = write_run(tmp_path / "run", healthy_rows(3))
    assert read_run(folder).state.at_work is read_run(folder).state.was_killed is False
    (folder / "run.lock").write_text(json.dumps({"pid": 1}))
    assert read_run(folder).state.at_work
    os.utime(folder / "run.lock", (time.time() - 500,) * 2)
    assert read_run(folder).state.was_killed and not read_run(folder).state.at_work


def test_waiting_is_no_fault_where_both_sides_take_turns():
    rows = separate_rows(100)
    for row in rows[1:]:
        row |= {"async/staleness_max": 0.0, "async/training_wait_fraction": 0.6}
    for settings in ({"async.max_staleness": "0"}, {}):
        assert find_alarms(run_of(rows, settings)) == []


def test_staleness_is_judged_by_the_setting_of_the_last_start(tmp_path):
    rows = separate_rows(60)
    rows[15]["async/staleness_max"] = 3.0
    folder = write_run(tmp_path / "run", rows)
    (folder / "config.yaml").write_text("async:\n  max_staleness: 1\n")
    (alarm,) = find_alarms(read_run(folder))
    assert alarm.name == "samples too old" and "3 syncs" in alarm.text and alarm.first == alarm.last == 15
    (folder / "run.json").write_text(json.dumps(starts_of(("stopped", ""), ("stopped", ""), ("", ""))))
    assert find_alarms(read_run(folder)) == [], "the samples of iteration 15 were made before the third start"


def test_alarms_that_last_come_first():
    rows = healthy_rows(200)
    ILLNESSES["rewards failing"](rows)
    ILLNESSES["entropy collapse"](rows)
    found = find_alarms(run_of(rows))
    assert [(alarm.name, alarm.is_over) for alarm in found] == [
        ("entropy collapse", False),
        ("rewards failing", True),
    ]


def every_alarm() -> list[Alarm]:
    return [alarm for name, rows_of in PLANTED for alarm in find_alarms(run_of(planted(name, rows_of)))]


def test_remedies_name_settings_that_exist_and_the_page_of_alarms_has_each():
    page = next(text_of(page) for page in PAGES if page.name == "report.md")
    titles = set(re.findall(r"^\| ([a-zA-Z -]+) \|", page, re.MULTILINE))
    for alarm in every_alarm():
        named = {(section, name) for section, name, _ in NAMED.findall(alarm.remedy)}
        assert named <= KNOWN.keys(), named - KNOWN.keys()
        assert alarm.name in titles, f"docs/report.md has no row {alarm.name}"
    assert {name for name, _ in ENDS.values()} <= titles


def test_a_point_is_judged_by_the_points_before_it_only():
    values = [1.0 + 0.01 * (place % 7) for place in range(80)]
    values[60] = 50.0
    assert history.above_history(values) == ([60], [pytest.approx(1.03, abs=0.02)])
    assert history.above_history(values[:20]) == ([], [])


def test_a_new_level_that_stays_is_no_history():
    where, usual = history.above_history([1.0] * 60 + [10.0] * 60)
    assert where == list(range(60, 120)) and set(usual) == {1.0}
    where, _ = history.above_history([1.0] * 60 + [10.0] * 5 + [1.0] * 60 + [10.0])
    assert where == [*range(60, 65), 125]
